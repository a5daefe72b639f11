"""Measurements of the teacher: moments of its activations, its velocity errors, importance of its blocks."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wandistiller.batch import Batch, padded
from wandistiller.data.cached_dataset import CachedData
from wandistiller.data.tensor_cache import Measured, batches_digest
from wandistiller.distributed import collectives
from wandistiller.distributed.progress import Progress
from wandistiller.experts import Expert, expert_at
from wandistiller.flow import FlowSchedule, band_name, with_noise
from wandistiller.student.pruning import CalibrationStats, InputMoments
from wandistiller.teacher.base import Teacher, local_modules
from wandistiller.utils.files import digest, write_json
from wandistiller.utils.logging import heartbeat
from wandistiller.wan.structure import CONDITION, IMAGE_NORM, NORMED, STREAM_NORMS, TEXT_READER
from wandistiller.wan.text_padding import TEXT_TOKENS

AT_ONCE = 2**24
"""Elements converted to float64 at once: a video of Wan 14B has 1.8 x 10^9 hidden units."""


class _Sums:
    """Sums over all tokens in float64, so that they do not depend on how samples were batched."""

    def __init__(self) -> None:
        self.vectors: dict[str, list[Tensor]] = {}
        """Number, sum and sum of squares of the inputs of each module."""
        self.matrices: dict[str, list[Tensor]] = {}
        """Number of vectors of a stream, and the sum of their outer products."""

    def add_vectors(self, name: str, x_TD: Tensor) -> None:
        if name == TEXT_READER:  # its inputs are a stream, too
            self.add_products("text", x_TD.float())
        x_TD = x_TD.double()
        _add(self.vectors, name, x_TD.new_tensor(len(x_TD)), x_TD.sum(0), x_TD.square().sum(0))

    def add_products(self, name: str, x_TD: Tensor) -> None:
        _add(self.matrices, name, x_TD.new_tensor(len(x_TD)), (x_TD.T @ x_TD).double())

    def statistics(self) -> CalibrationStats:
        """Return what the sums are for."""
        moments = {
            name: InputMoments((s / n).float().cpu(), (q / n).float().cpu())
            for name, (n, s, q) in self.vectors.items()
        }
        products = {name: total_DD.cpu() / n.cpu() for name, (n, total_DD) in self.matrices.items()}
        mean_D = moments[TEXT_READER].mean_D.double()
        text_DD = products["text"] - torch.outer(mean_D, mean_D)
        image_DD = products["image"].float() if "image" in products else None
        return CalibrationStats(moments, products["stream"].float(), text_DD.float(), image_DD)


def _add(sums: dict[str, list[Tensor]], name: str, *new: Tensor) -> None:
    totals = sums.setdefault(name, [torch.zeros_like(t, dtype=torch.float64) for t in new])
    for i, t in enumerate(new):
        totals[i] = totals[i].to(t.device).add_(t)


def measure(
    networks: Collection[nn.Module], calls: Sequence[Callable[[], object]]
) -> CalibrationStats | None:
    """Make `calls`, which use `networks`; return joint statistics of their activations, None without any.

    Collective.

    Raises:
        Stopped: on all ranks, after a call, if any rank received a request to stop.
    """
    sums = _Sums()
    with ExitStack() as hooks, torch.no_grad():
        if any("forward" in vars(m) for network in networks for m in network.modules()):
            # blocks that were compiled in an earlier call see no hook inside of them (torch 2.13)
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for network in networks:
            for module_name, module in network.named_modules():
                if add := _adder(sums, module_name, module):
                    hooks.enter_context(module.register_forward_pre_hook(partial(_in_parts, add)))
        progress = Progress("activations of the teacher", len(calls), "call")
        for call in calls:
            progress.counting(call)()
            collectives.raise_if_stop_requested("while the teacher was measured")
    return sums.statistics() if sums.vectors else None


def _adder(sums: _Sums, name: str, module: nn.Module) -> Callable[[Tensor], None] | None:
    """Return what adds the inputs x_TD of a module to the sums; None if they are not needed."""
    leaf = name.split(".")[-1]
    reads_stream = leaf in STREAM_NORMS and not name.startswith(CONDITION)
    if (reads_stream or name == IMAGE_NORM) and not isinstance(module, nn.Identity):
        of = "stream" if reads_stream else "image"
        return lambda x_TD: sums.add_products(of, F.layer_norm(x_TD.float(), x_TD.shape[-1:]))
    if isinstance(module, nn.Linear | nn.SiLU) or leaf in NORMED:
        return lambda x_TD: sums.add_vectors(name, x_TD)
    return None


def _in_parts(add: Callable[[Tensor], None], _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    x_TD = inputs[0].flatten(0, -2)
    for part_TD in x_TD.split(max(1, AT_ONCE // x_TD.shape[-1])):
        add(part_TD)


TOKENS, FEWEST, MOST = 2**15, 16, 64
"""Patches of all calibration samples together, and bounds for the number of samples."""
BANDS = [(0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)]
"""Of sigma, in which the error before training is stated."""


def calibration_batches(
    data: CachedData, schedule: FlowSchedule, *, tokens: int, batch_size: int, most: int = MOST
) -> list[Batch]:
    """Make batches, each of one expert, at evenly spaced points of the unshifted line, as in training.

    Args:
        tokens: patches of a sample; the samples together have `TOKENS` patches, if `FEWEST` to
            `MOST` samples can.
        most: further bound of their number.
    """
    count = min(max(FEWEST, TOKENS // tokens), MOST, most)
    sigmas = [schedule.shifted((i + 0.5) / count) for i in range(count)]
    batches = []
    for expert in Expert:
        numbers = [i for i in range(count) if expert_at(sigmas[i], schedule.boundary) is expert]
        for first in range(0, len(numbers), batch_size):
            index_B = numbers[first : first + batch_size]
            x0_BCFHW, conditioning = data.examples(index_B)
            text_BLD = padded(conditioning.text_BLD, TEXT_TOKENS)  # moments of all rows, merged or not
            conditioning = replace(conditioning, text_BLD=text_BLD)
            keys = [(schedule.seed, "probe", i) for i in index_B]
            sigma_B = [sigmas[i] for i in index_B]
            batches.append(with_noise(x0_BCFHW, conditioning, expert, sigma_B, keys))
    return batches


@dataclass(frozen=True)
class VelocityError:
    """The relative velocity error over samples: the root of sum |v - v*|^2 / sum |v*|^2."""

    rows_N3: Tensor
    """The samples' `error_rows`."""

    def relative(self, low: float = 0.0, high: float = 1.0) -> float | None:
        """Return the error over the samples with sigma in the band of that name; None without any."""
        sigma_N = self.rows_N3[:, 0]
        rows_N3 = self.rows_N3[(sigma_N >= low) & ((sigma_N < high) | (high == 1))]
        _, error, norm = rows_N3.sum(0)
        return (error / norm).sqrt().item() if len(rows_N3) else None

    def by_sigma(self) -> dict[str, float]:
        """Return the error in each of `BANDS`, without empty ones."""
        errors = {band_name(low, high): self.relative(low, high) for low, high in BANDS}
        return {band: error for band, error in errors.items() if error is not None}


def error_rows(batch: Batch, v_BCFHW: Tensor, target_BCFHW: Tensor) -> Tensor:
    """Return sigma, |v - v*|^2 and |v*|^2 of each sample, rows_B3 float64 on the CPU."""
    tensors = (v_BCFHW - target_BCFHW, target_BCFHW)
    error_B, norm_B = (t.flatten(1).double().square().sum(1) for t in tensors)
    return torch.stack([batch.sigma_B.double(), error_B, norm_B], dim=1).cpu()


@torch.no_grad()
def velocity_error(
    batches: list[Batch], targets: Iterable[Tensor], velocity: Callable[[Batch], Tensor]
) -> VelocityError:
    """Measure the predicted velocities v_BCFHW against the teacher's, `targets`. Collective.

    Raises:
        Stopped: on all ranks, before a call, if any of them received a request to stop.
    """
    rows = []
    for batch, target_BCFHW in zip(batches, targets, strict=True):
        collectives.raise_if_stop_requested()
        heartbeat()
        rows.append(error_rows(batch, velocity(batch), target_BCFHW))
    return VelocityError(torch.cat(rows))


ROUNDS = 8


def importance(
    teacher: Teacher, batches: list[Batch], layers: int, keep: int, measured: Measured | None = None
) -> list[dict[int, float]]:
    """Drop the least important blocks, in rounds, as importance depends on the others. Collective.

    Args:
        teacher: without guidance.
        batches: equal on every rank.
        keep: number of blocks that stay; the others are dropped over at most `ROUNDS` rounds.
    Returns:
        For each round, by block, the relative velocity error without it and those dropped before; the last
        round has the blocks that stay. Equal on every rank.
    """
    measured, left, rounds = measured or Measured(None), list(range(layers)), []
    numbers = [layers]  # of blocks at the start of each round; each of them is left out once in it
    for to_go in range(min(ROUNDS, layers - keep), 0, -1):
        numbers.append(numbers[-1] + -(numbers[-1] - keep) // to_go)
    progress = Progress("importance of blocks", (1 + sum(numbers)) * len(batches), "call")
    velocity, same = progress.counting(teacher.velocity), batches_digest(batches)
    targets = []
    for batch in batches:
        collectives.raise_if_stop_requested()
        targets.append(velocity(batch))

    def error_without(blocks: set[int]) -> Tensor:
        with _skipped(teacher, blocks):
            return torch.tensor(velocity_error(batches, targets, velocity).relative(), dtype=torch.float64)

    for following in [*numbers[1:], keep]:
        dropped = set(range(layers)) - set(left)
        scores = {}
        for i in left:
            name, before = digest(same, sorted(dropped | {i})), progress.done
            scores[i] = measured.of(name, lambda i=i, dropped=dropped: error_without(dropped | {i})).item()
            if progress.done == before:
                progress.skip(len(batches))
        rounds.append(scores)
        message = "importance: without the least important of %d blocks the error is %.4f"
        collectives.log0(message, len(left), min(scores.values()))
        left = sorted(sorted(left, key=lambda i: (-scores[i], i))[:following])
    return rounds


@contextmanager
def _skipped(teacher: Teacher, blocks: set[int]) -> Iterator[None]:
    """Let hidden states pass these blocks unchanged. What places or fetches weights are hooks, which stay."""
    skipped = [network.blocks[number] for network in local_modules(teacher) for number in blocks]
    before = [vars(block).get("forward") for block in skipped]  # compiled blocks have one of their own
    for block in skipped:
        block.forward = lambda hidden_states_BSD, *_: hidden_states_BSD
    try:
        yield
    finally:
        for block, forward in zip(skipped, before, strict=True):
            del block.forward
            if forward:
                block.forward = forward


def write_importance(folder: Path, rounds: list[dict[int, float]], experts: Iterable[Expert]) -> None:
    """Write importance.json, which `wandistiller report` charts, into `folder`."""
    measured = {"experts": [e.value for e in experts], "relative_error_without": rounds}
    measured["kept"] = list(rounds[-1])
    write_json(folder / "importance.json", measured)
