"""Which heads, units and channels of the teacher a narrower student keeps, by what was measured of the teacher in use.

Shape letters: D the teacher's width, d the student's, H heads, E a head's width, I = H E, U units of a layer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wandistiller.cuts import Axis, Cuts

Read = Callable[[str], Tensor]
"""The teacher's tensor of a name, float32 on the CPU."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What was measured of one module's input over the probes."""

    mean_D: Tensor
    square_D: Tensor
    """Mean square."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the choice of a cut needs to know of the teacher in use."""

    moments: dict[str, Moments]
    """By the teacher's module, such as `blocks.3.ffn.net.2`; of its input."""
    stream_DD: Tensor
    """Second moment of LayerNorm(h) over all places where a norm reads the residual stream."""
    text_DD: Tensor
    """Second moment about its mean of the text stream, which every cross-attention reads."""


def plan(config: dict[str, Any], teacher: dict[str, Any], blocks: list[int], measured: Measured, read: Read,
         width_basis: str, ffn_units: str) -> Cuts:  # fmt: skip
    """How a student of `config` is cut from the teacher.

    Args:
        blocks: the teacher's layers that are kept.
        read: the teacher's tensor of a name, float32.
        width_basis: `channels`, `principal` or `truncate`.
        ffn_units: `activation` or `weight`.
    """
    axes: dict[str, Axis] = {}
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    if (heads, head_dim) != (teacher["num_attention_heads"], teacher["attention_head_dim"]):
        width = heads * head_dim
        axes["stream"] = _stream(measured.stream_DD, width, width_basis)
        axes["text"] = Axis(_principal(measured.text_DD, width))
        axes["time"] = Axis(_strongest(_written(measured, read, "condition_embedder.time_embedder.linear_2"), width))
        axes["words"] = Axis(_strongest(_written(measured, read, "condition_embedder.text_embedder.linear_2"), width))
        picked = _strongest(_written(measured, read, "condition_embedder.time_proj"), width)
        axes["temb"] = axes["stream"] if axes["stream"].picks else Axis(picked)
        for i in blocks:
            for attention in (f"blocks.{i}.attn1", f"blocks.{i}.attn2"):
                axes |= _attention(measured, read, attention, teacher, heads, head_dim)
    if config["ffn_dim"] != teacher["ffn_dim"]:
        for i in blocks:
            score_U = _written(measured, read, f"blocks.{i}.ffn.net.2", ffn_units == "activation")
            if ffn_units == "weight":
                score_U = score_U * read(f"blocks.{i}.ffn.net.0.proj.weight").square().sum(1)
            axes[f"blocks.{i}.ffn"] = Axis(_strongest(score_U, config["ffn_dim"]))
    return Cuts(axes, {name: moments.mean_D for name, moments in measured.moments.items()})


def _written(measured: Measured, read: Read, name: str, used: bool = True) -> Tensor:
    """What each input of the linear map `name` adds to its outputs: its weights' squared norm, times its mean square."""
    score_U = read(f"{name}.weight").square().sum(0)
    return score_U * measured.moments[name].square_D if used else score_U


def _strongest(score_U: Tensor, keep: int) -> Tensor:
    """The units with the greatest scores, in their old order."""
    return score_U.argsort(descending=True, stable=True)[:keep].sort().values


def _principal(moment_DD: Tensor, keep: int) -> Tensor:
    """Orthonormal directions_Dd of the greatest second moment; signs fixed so that every machine finds the same."""
    directions_DD = torch.linalg.eigh(moment_DD.double()).eigenvectors.flip(1)[:, :keep]
    signs_d = directions_DD.gather(0, directions_DD.abs().argmax(0, keepdim=True)).sign()
    return (directions_DD * signs_d).float()


def _stream(moment_DD: Tensor, width: int, basis: str) -> Axis:
    """The residual stream's axis, from the second moment of LayerNorm(h)."""
    if basis == "principal":
        basis_Dd = _turned(moment_DD, width)
        return Axis(basis_Dd, ((basis_Dd * (moment_DD @ basis_Dd)).sum() / width).sqrt().item())
    units_d = torch.arange(width) if basis == "truncate" else _strongest(moment_DD.diagonal(), width)
    kept_dd = moment_DD[units_d][:, units_d]
    # the student's LayerNorm takes off the mean of the kept channels, and divides by the rest's rms
    return Axis(units_d, (kept_dd.diagonal().mean() - kept_dd.mean()).sqrt().item())


def _turned(moment_DD: Tensor, width: int) -> Tensor:
    """Principal directions_Dd that map ones to ones (both of length one), so that P^T and LayerNorm's centring commute.

    LayerNorm(h) has no mean, so its principal directions are orthogonal to ones; a reflection of the student's coordinates
    brings ones to where the student's LayerNorm looks for it.
    """
    ones_D, ones_d = (torch.full((n,), n**-0.5) for n in (len(moment_DD), width))
    frame_Dd = torch.linalg.qr(torch.cat([ones_D[:, None], _principal(moment_DD, width - 1)], dim=1)).Q
    mirror_d = frame_Dd.T @ ones_D - ones_d
    return frame_Dd - 2 * torch.outer(frame_Dd @ mirror_d, mirror_d) / mirror_d.dot(mirror_d)


def _attention(measured: Measured, read: Read, name: str, teacher: dict[str, Any], heads: int, head_dim: int) -> dict[str, Axis]:
    """Heads that write most into the stream; in each, for queries and keys rope's pairs, for values what writes most."""
    old = teacher["attention_head_dim"]
    score_HE = _written(measured, read, f"{name}.to_out.0").view(-1, old)
    kept_H = _strongest(score_HE.sum(1), heads)
    within_E = torch.tensor(rope_units(old, head_dim))
    values = [h * old + _strongest(score_HE[h], head_dim) for h in kept_H.tolist()]
    units_I = (kept_H[:, None] * old + within_E).flatten()
    axes = {f"{name}.to_v": Axis(torch.cat(values))}
    for which in "qk":
        square_I = measured.moments[f"{name}.norm_{which}"].square_D
        # the norm now divides by the rms of what is left, and attention by the root of the new head's width
        gain = (square_I[units_I].mean() / square_I.mean()).sqrt().item() * (head_dim / old) ** 0.25
        axes[f"{name}.to_{which}"] = Axis(units_I, gain)
    return axes


def rope_pairs(head_dim: int, theta: float = 10000.0) -> list[tuple[str, float]]:
    """The axis (t, h, w) and log frequency of each pair of channels of a head, as WanRotaryPosEmbed splits and turns them.

    h = w = 2 (E // 6), t = the rest; pair i of an axis of width n turns by theta^(-2 i / n) per position.
    """
    side = 2 * (head_dim // 6)
    widths = {"t": head_dim - 2 * side, "h": side, "w": side}
    return [(axis, -2 * i / n * math.log(theta)) for axis, n in widths.items() for i in range(n // 2)]


def fits_rope(old: int, new: int) -> bool:
    """Whether a head of width `old` has enough pairs for each axis of one of width `new`."""
    before, after = ([a for a, _ in rope_pairs(n)] for n in (old, new))
    return all(after.count(axis) <= before.count(axis) for axis in "thw")


def rope_units(old: int, new: int) -> list[int]:
    """Which channels of a head of `old` stay in one of `new`: per axis the pairs that turn most like the new head's own.

    Each axis keeps as many pairs as the new head has, in their order; of all such choices the one with the least sum of
    squared differences of log frequency.
    """
    before, after = rope_pairs(old), rope_pairs(new)
    kept = [
        pair for axis in "thw"
        for pair in _nearest_rising([(i, f) for i, (a, f) in enumerate(before) if a == axis], [f for a, f in after if a == axis])
    ]  # fmt: skip
    return [unit for pair in kept for unit in (2 * pair, 2 * pair + 1)]


def _nearest_rising(have: list[tuple[int, float]], want: list[float]) -> list[int]:
    """Rising numbers of `have`, one for each of `want`, with the least sum of squared differences."""
    best: list[tuple[float, list[int]]] = [(0.0, [])] + [(math.inf, [])] * len(want)
    for number, value in have:
        for n in range(len(want), 0, -1):
            cost, numbers = best[n - 1]
            best[n] = min(best[n], (cost + (value - want[n - 1]) ** 2, [*numbers, number]))
    return best[len(want)][1]
