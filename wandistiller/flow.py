"""The flow-matching path and the distribution of sigma. Draws are keyed by (seed, step, sample index)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from wandistiller.batch import Batch, Conditioning, State, to_device
from wandistiller.experts import Expert, expert_at
from wandistiller.utils.keyed_random import keyed_generator, keyed_normal

Level = TypeVar("Level", float, Tensor)
States = Callable[[list[int]], Tensor]
"""Cached states x_BCFHW of a batch's samples, each by its number on the sample's path."""
TRAIN_TIMESTEPS = 1000.0  # Wan's networks take t = 1000 sigma

EULER, RENOISE, FLOW_MAP = "euler", "renoise", "flow_map"
"""Samplers of students of few steps: along the velocity, to clean latents that are noised again, or along the
mean velocity to the next level, in any number of steps."""

NUMBERS = (2, 4, 8, 16, 50)
"""Numbers of steps that a flow map's own samples are of while it is trained on them."""


class FewSteps(NamedTuple):
    """The sampler that a student of few steps is trained for."""

    sigmas: tuple[float, ...]
    """Noise level of each call, falling from 1; 0 follows."""
    boundary: float | None = None
    """Between the last level of a student's high-noise expert and the first of its other one."""
    sampler: str = EULER

    def expert(self, call: int) -> Expert:
        return expert_at(self.sigmas[call], self.boundary)

    def ends(self, call: int) -> tuple[float, float]:
        """Return the noise levels from which, and to which, a call leads, counted from 0."""
        return self.sigmas[call], (*self.sigmas, 0.0)[call + 1]

    def following(self, call: int, x_BCFHW: Tensor, v_BCFHW: Tensor, new_BCFHW: Tensor | None) -> Tensor:
        """Return the state after a call, counted from 0, with its velocity; RENOISE takes new noise."""
        sigma, following = self.ends(call)
        if self.sampler != RENOISE:
            return x_BCFHW + (following - sigma) * v_BCFHW
        return (1 - following) * (x_BCFHW - sigma * v_BCFHW) + following * new_BCFHW


@dataclass(frozen=True, slots=True)
class FlowSchedule:
    """The distribution of sigma, the path x_t and the split of the path between two experts."""

    shift: float
    """Resolution-dependent shift, above 0; 1 leaves sigma uniform, 3 for 480p, 5 for 720p."""
    boundary: float | None
    """Least sigma of the high-noise expert; None for a teacher with one expert."""
    seed: int
    handover: float | None = None
    """Sigma at which a student's high-noise expert hands over to its other one; None: it has one expert."""
    few: FewSteps | None = None
    trained: Expert | None = None
    """The only expert of the student that is trained; None: all."""

    def shifted(self, u: Level) -> Level:
        """Map uniform u in [0, 1] to sigma in [0, 1]; 1 is pure noise.

        sigma = s u / (1 + (s - 1) u). Source: Esser et al. 2024, arXiv:2403.03206.
        """
        return self.shift * u / (1 + (self.shift - 1) * u)

    def unshifted(self, sigma: Level) -> Level:
        """Invert `shifted`: u = sigma / (s - (s - 1) sigma)."""
        return sigma / (self.shift - (self.shift - 1) * sigma)

    def steps(self, number: int) -> list[float]:
        """List the noise levels of that many sampling steps, from 1; 0 follows the last."""
        if self.few and len(self.few.sigmas) == number:  # the scheduler's own, which are rounded
            return list(self.few.sigmas)
        return [self.shifted(1 - k / number) for k in range(number)]

    def earlier(self, sigma_B: Tensor, u: float) -> Tensor:
        """Return sigma after a step of length `u` on the unshifted line towards data, at least 0."""
        return self.shifted((self.unshifted(sigma_B) - u).clamp(min=0))

    def ends(self, sigma_B: Tensor, sample_index_B: list[int], step: int) -> Tensor:
        """Draw to which noise level each sample's mean velocity leads: a half to its own, a quarter to 0.

        The others lead to one below it, uniform on the unshifted line.
        """
        drawn = [self.uniform("end", step, i) for i in sample_index_B]
        u_B = to_device(torch.tensor(drawn, dtype=torch.float64), sigma_B.device)
        below_B = self.shifted(self.unshifted(sigma_B.double()) * (4 * u_B - 3).clamp(min=0))
        return torch.where(u_B < 0.5, sigma_B, below_B.to(sigma_B.dtype))

    def segment_end(self, sigma_B: Tensor, steps: int | None, expert: Expert) -> Tensor:
        """Return where each sigma's segment ends, of so many steps (None: of one) of the student's expert."""
        ends = [0.0, *(self.steps(steps) if steps else [])]
        if self.handover is not None and expert is Expert.HIGH_NOISE:
            ends = [max(end, self.handover) for end in ends]
        ends_E = torch.tensor(ends, dtype=sigma_B.dtype, device=sigma_B.device)
        below_BE = torch.where(ends_E < sigma_B[:, None], ends_E, min(ends))
        return below_BE.amax(1)

    def high_noise_share(self) -> float:
        """Return the probability of the high-noise expert: 1 - unshifted(boundary)."""
        return 1.0 if self.boundary is None else 1 - self.unshifted(self.boundary)

    def draw_expert(self, step: int, call: int | None = None) -> Expert:
        """Draw the expert of one optimizer step, equal on every rank by construction.

        Args:
            call: of a few-step student, to draw an expert of levels between its ends.
        """
        if self.trained:
            return self.trained
        u = self.uniform("expert", step, 0)
        if call is not None:
            start, end = self.few.ends(call)
            return expert_at(end + (start - end) * u, self.boundary)
        return Expert.HIGH_NOISE if u < self.high_noise_share() else Expert.LOW_NOISE

    def draw_sigma(self, expert: Expert, step: int, sample_index: int, call: int | None = None) -> float:
        """Draw sigma in (0, 1], with u uniform on the part of the unshifted line that belongs to `expert`.

        Args:
            call: of a few-step student, to draw sigma uniformly between its ends, as far as `expert` serves.
        """
        share = self.high_noise_share()
        low, high = (1 - share, 1.0) if expert is Expert.HIGH_NOISE else (0.0, 1 - share)
        # 1 - u is in (0, 1], so sigma is never exactly 0, where x_t has no noise and v cannot be learned
        u = 1 - self.uniform("sigma", step, sample_index)
        if call is not None:
            start, end = self.few.ends(call)
            low, high = max(self.shifted(low), end), min(self.shifted(high), start)
            return low + (high - low) * u
        return self.shifted(low + (high - low) * u)

    def uniform(self, *key: int | str) -> float:
        """Draw from [0, 1) in float64."""
        return torch.rand((), generator=keyed_generator(self.seed, *key), dtype=torch.float64).item()

    def noised(
        self, x0_BCFHW: Tensor, conditioning: Conditioning, sample_index_B: list[int], step: int
    ) -> Batch:
        """Put clean latents on the path.

        Args:
            x0_BCFHW: normalised clean latents, float32.
            sample_index_B: global sample indices, step times samples of a step + slot.
            step: optimizer step, counted from 0.
        """
        expert = self.draw_expert(step)
        sigmas = [self.draw_sigma(expert, step, i) for i in sample_index_B]
        keys = [(self.seed, "noise", step, i) for i in sample_index_B]
        return with_noise(x0_BCFHW, conditioning, expert, sigmas, keys)

    def noised_as(self, like: State, x0_BCFHW: Tensor, sample_index_B: list[int], step: int) -> Batch:
        """Put clean latents on the path at the noise levels, and with the conditioning, of other states."""
        keys = [(self.seed, "real noise", step, i) for i in sample_index_B]
        return with_noise(x0_BCFHW, like.conditioning, like.expert, like.sigma_B.tolist(), keys)

    def exits(self) -> list[int]:
        """List the calls of a few-step student that are trained; the calls before are without gradient."""
        return [n for n in range(len(self.few.sigmas)) if self.trained in (None, self.few.expert(n))]

    def jumps(self, update: int) -> tuple["FewSteps", int]:
        """Draw the sampler of an update's own samples, and its calls before the one that learns.

        A flow map's has up to three, whatever the number of steps is from which they come: from noise to a
        level, from there to the next, and to data. Source: Gu et al. 2026, arXiv:2605.13724.
        """
        u, exits = self.uniform("exit", update, 0), self.exits()
        if self.few.sampler != FLOW_MAP:
            return self.few, exits[int(u * len(exits))]
        number = NUMBERS[int(self.uniform("number", update) * len(NUMBERS))]
        call, levels = int(u * number), [*self.steps(number), 0.0]
        sigmas = [1.0] * (call > 0) + [level for level in levels[call : call + 2] if level]
        return self.few._replace(sigmas=tuple(sigmas)), min(call, 1)

    def segments(self, expert: Expert, sigma_S: list[float]) -> list[int]:
        """Return the segments of a path, each from state s to s + 1, that begin at a sigma of `expert`."""
        return [s for s, sigma in enumerate(sigma_S[:-1]) if expert_at(sigma, self.boundary) is expert]

    def on_path(
        self,
        sigma_S: Tensor,
        states: States,
        conditioning: Conditioning,
        sample_index_B: list[int],
        step: int,
    ) -> Batch:
        """Put each sample at the start of a segment of its cached path, drawn among those of its expert.

        The result's x0 and noise are the ends of the straight line through the segment's two states, so
        noise - x0 is the segment's velocity, (x_s - x_s+1) / (sigma_s - sigma_s+1).

        Args:
            sigma_S: noise levels of the states, falling to 0, where the state is x0.
            states: reads each sample's state of a number.
        """
        expert = self.draw_expert(step)
        segments = self.segments(expert, sigma_S.tolist())
        generators = [keyed_generator(self.seed, "segment", step, i) for i in sample_index_B]
        s_B = [segments[torch.randint(len(segments), (), generator=g)] for g in generators]
        following_B = [s + 1 for s in s_B]
        x_t_BCFHW, sigma_B = states(s_B), sigma_S[s_B]
        length_B1111 = (sigma_B - sigma_S[following_B]).view(-1, 1, 1, 1, 1)
        v_BCFHW = (x_t_BCFHW - states(following_B)) / length_B1111
        x0_BCFHW = clean(x_t_BCFHW, v_BCFHW, sigma_B)
        return Batch(
            x0_BCFHW=x0_BCFHW,
            noise_BCFHW=x0_BCFHW + v_BCFHW,
            x_t_BCFHW=x_t_BCFHW,
            sigma_B=sigma_B,
            conditioning=conditioning,
            expert=expert,
        )


def band_name(low: float, high: float) -> str:
    """Name a band of sigma, [low, high): 0.75-0.875; the last one, which ends at 1, has 1 too."""
    return f"{low:g}-{high:g}"


def path(x0_BCFHW: Tensor, noise_BCFHW: Tensor, sigma_B: Tensor) -> Tensor:
    """Return x_t = (1 - sigma) x0 + sigma noise. Source: Lipman et al. 2022, arXiv:2210.02747."""
    sigma_B1111 = sigma_B.view(-1, 1, 1, 1, 1)
    return (1 - sigma_B1111) * x0_BCFHW + sigma_B1111 * noise_BCFHW


def clean(x_t_BCFHW: Tensor, v_BCFHW: Tensor, sigma_B: Tensor) -> Tensor:
    """Return the clean latents to which a velocity leads in one step: x0 = x_t - sigma v."""
    return x_t_BCFHW - sigma_B.view(-1, 1, 1, 1, 1) * v_BCFHW


def with_noise(
    x0_BCFHW: Tensor,
    conditioning: Conditioning,
    expert: Expert,
    sigmas: list[float],
    keys: list[tuple[int | str, ...]],
) -> Batch:
    """Put each clean latent on the path at its noise level, with the noise drawn by its key."""
    noise_BCFHW = torch.stack([keyed_normal(x0_BCFHW.shape[1:], *key) for key in keys])
    sigma_B = torch.tensor(sigmas, dtype=torch.float32)
    noise_BCFHW, sigma_B = (to_device(t, x0_BCFHW.device) for t in (noise_BCFHW, sigma_B))
    x0_BCFHW, noise_BCFHW = conditioning.with_given(x0_BCFHW), conditioning.with_given(noise_BCFHW)
    return Batch(
        x0_BCFHW=x0_BCFHW,
        noise_BCFHW=noise_BCFHW,
        x_t_BCFHW=path(x0_BCFHW, noise_BCFHW, sigma_B),
        sigma_B=sigma_B,
        conditioning=conditioning,
        expert=expert,
    )
