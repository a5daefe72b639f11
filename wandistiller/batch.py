"""A micro-step's samples, and the legend for every tensor name in this package.

B sample on this rank, C latent channel, F latent frame, H W latent pixel, L text token, D width of a
state, S place in a sequence: a patch of a sample, or a state of a sampling path.
The order is always BCFHW, which is diffusers' own; it is never permuted.
sigma is in [0, 1] and 1 is pure noise; x_t = (1 - sigma) x0 + sigma noise; v = noise - x0; t = 1000 sigma.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from wandistiller.experts import Expert

NOISED, PATH = "noised", "path"
"""Kinds of states: clean latents with noise added, the teacher's own while it sampled."""
STUDENT = "student"
"""Role of the network that is the result; an objective may train others beside it."""


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Inputs of a network beside noisy latents and their noise level."""

    text_BLD: Tensor
    """Zero rows follow a prompt's own; Wan takes no mask, and networks see zeros up to 512 rows."""
    joined_BCFHW: Tensor | None = None
    """Channels joined to noisy latents: a mask of the given frames, and latents of a clip with them."""
    first_BCFHW: Tensor | None = None
    """Clean latents of the given first frame, F = 1, in the place of noisy ones; its noise level is 0."""
    image_BLD: Tensor | None = None
    """States of the given frames, of an image encoder."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order of the fields."""
        return [t for f in fields(self) if (t := getattr(self, f.name)) is not None]

    def with_tensors(self, tensors: Iterable[Tensor]) -> "Conditioning":
        """Return the conditioning of other samples, with what `tensors` returned for them."""
        names = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        return Conditioning(**dict(zip(names, tensors, strict=True)))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Conditioning":
        """Return it with each tensor changed."""
        return self.with_tensors(map(change, self.tensors()))

    def with_given(self, x_BCFHW: Tensor) -> Tensor:
        """Return latents, noisy latents or noise with the given first frame in its place.

        The frame is its own noise, so that it is the same at every noise level, and its velocity is 0.
        """
        if self.first_BCFHW is None:
            return x_BCFHW
        return torch.cat([self.first_BCFHW.to(x_BCFHW), x_BCFHW[:, :, 1:]], dim=2)

    def without_given(self, v_BCFHW: Tensor) -> Tensor:
        """Return a velocity with that of the given first frame, 0."""
        if self.first_BCFHW is None:
            return v_BCFHW
        return torch.cat([torch.zeros_like(v_BCFHW[:, :, :1]), v_BCFHW[:, :, 1:]], dim=2)

    def to(self, device: torch.device) -> "Conditioning":
        """Copy it from CPU memory to a device, as `to_device` does."""
        return self.map(lambda t: to_device(t, device))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Samples at one point of the path from data to noise, as a network is given them."""

    x_t_BCFHW: Tensor
    sigma_B: Tensor
    """float32, in [0, 1]."""
    conditioning: Conditioning
    expert: Expert
    """Equal on all ranks for one micro-step."""
    end_B: Tensor | None = None
    """Noise level to which a flow map's velocity leads, at most sigma_B; None: sigma_B. Others ignore it."""
    guided_B: Tensor | None = None
    """How often guidance counts in the teacher's prediction for each sample: 0 or above; None: once."""

    def tensors(self) -> list[Tensor]:
        optional = (t_B for t_B in (self.end_B, self.guided_B) if t_B is not None)
        return [self.x_t_BCFHW, self.sigma_B, *optional, *self.conditioning.tensors()]

    def with_tensors(self, tensors: list[Tensor]) -> "State":
        """Return the state of other samples, with what `tensors` returned for them."""
        x_t_BCFHW, sigma_B, *others = tensors
        end_B = None if self.end_B is None else others.pop(0)
        guided_B = None if self.guided_B is None else others.pop(0)
        return State(
            x_t_BCFHW=x_t_BCFHW,
            sigma_B=sigma_B,
            end_B=end_B,
            guided_B=guided_B,
            conditioning=self.conditioning.with_tensors(others),
            expert=self.expert,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(State):
    """Samples on the straight line from clean latents to noise."""

    x0_BCFHW: Tensor
    noise_BCFHW: Tensor

    @property
    def v_BCFHW(self) -> Tensor:
        """The velocity of the line: noise - x0."""
        return self.noise_BCFHW - self.x0_BCFHW


@dataclass(frozen=True, slots=True)
class Prediction:
    """A network's output for a batch."""

    v_BCFHW: Tensor
    """float32."""
    features: dict[int, Tensor] = field(default_factory=dict)
    """Hidden states h_BSD by block number, S a rank's patches, D the teacher's width; the network's dtype."""
    mean: Callable[[Tensor], Tensor] = lambda x: x
    """Averages what is computed of the features over the ranks that share the sample. Collective."""


def padded(text_BLD: Tensor, rows: int) -> Tensor:
    """Return the text with zero rows up to `rows` in all; unchanged if it has as many."""
    missing = rows - text_BLD.shape[1]
    return F.pad(text_BLD, (0, 0, 0, missing)) if missing > 0 else text_BLD


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Copy from CPU memory without the wait that a copy from pageable memory makes the host do."""
    return value.pin_memory().to(device, non_blocking=True) if device.type != "cpu" else value.to(device)


def concat_batches(batches: dict[str, State]) -> State:
    """Join `batches`, which are of one expert, for one forward pass."""
    first, *others = batches.values()
    if not others:
        return first
    tensors = zip(*(batch.tensors() for batch in batches.values()), strict=True)
    return first.with_tensors([torch.cat(of_all) for of_all in tensors])


def split_prediction(prediction: Prediction, batches: dict[str, State]) -> dict[str, Prediction]:
    """Divide the prediction for the joined `batches` among them."""
    lengths = [len(b.sigma_B) for b in batches.values()]
    v = prediction.v_BCFHW.split(lengths)
    features = {k: h_BSD.split(lengths) for k, h_BSD in prediction.features.items()}
    of_one = ({k: h[i] for k, h in features.items()} for i in range(len(batches)))
    return {name: Prediction(*both, prediction.mean) for name, *both in zip(batches, v, of_one, strict=True)}
