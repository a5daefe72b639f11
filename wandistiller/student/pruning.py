"""Cut of the teacher to a narrower student: its tensors, and the choice of units by activation statistics.

Shape letters: D the teacher's width, d the student's, H heads, E a head's width, I = H E, U units of a layer,
R rows of a table.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wandistiller.network.config import NetworkConfig
from wandistiller.network.names import in_block
from wandistiller.wan import structure


@dataclass(frozen=True, slots=True)
class Subspace:
    """The student's coordinates of one of the teacher's vector spaces: some of its units, or directions."""

    basis: Tensor
    """units_d, int64; or directions_Dd, float32 with orthonormal columns."""
    gain: float = 1.0
    """Factor from the output of the student's norm to what is read through this axis."""

    @property
    def picks(self) -> bool:
        """True for units, False for directions."""
        return not self.basis.is_floating_point()

    def along(self, value: Tensor, dim: int) -> Tensor:
        """Return the student's coordinates of vectors that lie along one dimension of `value`."""
        if self.picks:
            return value.index_select(dim, self.basis)
        return (value.movedim(dim, -1) @ self.basis).movedim(-1, dim)

    def lost(self, mean_D: Tensor) -> Tensor:
        """Return the part of a vector that the student's coordinates drop, in the teacher's coordinates."""
        if self.picks:
            return mean_D.index_fill(0, self.basis, 0.0)
        return mean_D - self.basis @ (self.basis.T @ mean_D)


@dataclass(frozen=True, slots=True)
class WidthSlicer:
    """Cuts the tensors of one of the teacher's modules to those of the student's.

    Three rules hold for every cut. A linear map that loses inputs gets their mean, times its weights,
    into its bias: only their deviation from the mean is lost. A norm's divisor changes with the cut, so
    its own weights take the ratio. A cut of unused units changes nothing but rounding.

    The student keeps some channels of the residual stream. LayerNorm divides by the rms of these, so its
    output is scaled by 1 / `gain`, `gain` the rms of the kept channels of LayerNorm(h), and its readers
    multiply by it: SliceGPT, Ashkboos et al. 2024, arXiv:2401.15024. Wan's modulation (1 + scale), shift
    and gate acts channel by channel, so its cut is exact.
    """

    axes: dict[str, Subspace] = field(default_factory=dict)
    """Subspaces by name, as in `structure.AXES`; all others stay whole."""
    means: dict[str, Tensor] = field(default_factory=dict)
    """Mean input mean_D of each of the teacher's modules that was measured."""

    def cut(self, name: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the student's tensors.

        Args:
            name: the teacher's module, such as `blocks.3.ffn.net.2`; empty for the network itself.
            values: that module's own tensors by name, such as `weight` and `bias`.
        """
        if not values or not self.axes:
            return values
        leaf = name.rpartition(".")[2]
        if structure.TABLE in values:
            return {structure.TABLE: self._table(name, values[structure.TABLE])}
        if leaf == structure.MODULATION:
            rows = {k: v.unflatten(0, (6, -1)) for k, v in self._linear(name, values, None, "temb").items()}
            return {k: self._modulation(v, 0, 1).flatten(0, 1) for k, v in rows.items()}
        if leaf in structure.NORMED:
            axis = self.axes.get(name.removesuffix(leaf) + structure.NORMED[leaf])
            return {"weight": axis.along(values["weight"], 0) * axis.gain} if axis else values
        if name == structure.IMAGE_NORM:
            if not (axis := self.axes.get("image")):
                return values
            # its weights take the gain: of all its outputs' readers they are the first
            weight, bias = (axis.along(values[k], 0) for k in ("weight", "bias"))
            return {"weight": weight * axis.gain, "bias": bias}
        if leaf == structure.AFFINE_NORM and (axis := self.axes.get("stream")):
            weight, bias = (axis.along(values[k], 0) for k in ("weight", "bias"))
            return {"weight": weight, "bias": bias / axis.gain}
        axes = structure.axes_of(name)
        return self._linear(name, values, *axes) if any(axes) else values

    def _linear(
        self, name: str, values: dict[str, Tensor], written: str | None, read: str | None
    ) -> dict[str, Tensor]:
        weight, bias = values["weight"], values["bias"]
        if axis := self.axes.get(read):
            bias = bias + weight @ axis.lost(self.means[name])
            weight = axis.along(weight, 1) * (axis.gain if read == "stream" else 1.0)
        if axis := self.axes.get(written):
            weight, bias = axis.along(weight, 0), axis.along(bias, 0)
        return {"weight": weight, "bias": bias}

    def _modulation(self, value: Tensor, rows: int, dim: int) -> Tensor:
        """Rows of shift, scale, gate, shift, ... along dimension `rows`, whose channels lie along `dim`."""
        if axis := self.axes.get("stream"):
            value = axis.along(value, dim)  # a copy
            value.movedim(rows, 0)[structure.SHIFT_ROWS] /= axis.gain
        return value

    def _table(self, name: str, table_1RD: Tensor) -> Tensor:
        temb = self.axes.get("temb")
        if name or not temb:
            return self._modulation(table_1RD, 1, 2)
        # the last table is added to temb itself, which is not divided by the gain: right on average
        mean_D = self.means[structure.TEMB_READER]
        return self._modulation(table_1RD + mean_D, 1, 2) - temb.along(mean_D, 0)


Read = Callable[[str], Tensor]
"""Reads the teacher's tensor of a name, float32 on the CPU."""


@dataclass(frozen=True, slots=True)
class InputMoments:
    """Mean and mean square of one module's input over the calibration batches."""

    mean_D: Tensor
    square_D: Tensor


@dataclass(frozen=True, slots=True)
class CalibrationStats:
    """Activation statistics from which a cut is chosen."""

    moments: dict[str, InputMoments]
    """Input moments of each of the teacher's modules, by name, such as `blocks.3.ffn.net.2`."""
    stream_DD: Tensor
    """Second moment of LayerNorm(h) over all norms that read the residual stream."""
    text_DD: Tensor
    """Covariance of the text stream, which every cross-attention reads."""
    image_DD: Tensor | None = None
    """Second moment of LayerNorm of what is made of the states of given frames; None without these."""


def strongest_cut(
    config: NetworkConfig, teacher: NetworkConfig, blocks: list[int], stats: CalibrationStats, read: Read
) -> WidthSlicer:
    """Choose the cut of a student of `config` from the teacher: by the strongest activations everywhere.

    Args:
        blocks: the teacher's layers that are kept.
    """
    axes: dict[str, Subspace] = {}
    heads, head_dim = config.num_attention_heads, config.attention_head_dim
    if (heads, head_dim) != (teacher.num_attention_heads, teacher.attention_head_dim):
        width = heads * head_dim
        axes["stream"] = _of_norm(stats.stream_DD, _strongest(stats.stream_DD.diagonal(), width))
        directions_DD = torch.linalg.eigh(stats.text_DD.double()).eigenvectors.flip(1)[:, :width]
        signs_d = directions_DD.gather(0, directions_DD.abs().argmax(0, keepdim=True)).sign()
        axes["text"] = Subspace((directions_DD * signs_d).float())  # signs are equal on all machines
        if stats.image_DD is not None:
            readers = [f"{structure.ATTENTIONS[1]}.{name}" for name in structure.IMAGE_MAPS]
            scores = [_scores(stats, read, in_block(i, name)) for i in blocks for name in readers]
            axes["image"] = _of_norm(stats.image_DD, _strongest(torch.stack(scores).sum(0), width))
        for axis in ("time", "words"):
            axes[axis] = Subspace(_strongest(_scores(stats, read, structure.reader_of(axis)), width))
        axes["temb"] = axes["stream"]
        for i in blocks:
            for attention in structure.ATTENTIONS:
                axes |= _attention(stats, read, in_block(i, attention), teacher, heads, head_dim)
    if config.ffn_dim != teacher.ffn_dim:
        for i in blocks:
            axis = in_block(i, structure.FEED_FORWARD)
            score_U = _scores(stats, read, structure.reader_of(axis))
            axes[axis] = Subspace(_strongest(score_U, config.ffn_dim))
    return WidthSlicer(axes, {name: moments.mean_D for name, moments in stats.moments.items()})


def _scores(stats: CalibrationStats, read: Read, name: str) -> Tensor:
    """Importance of each input of a linear map: the squared norm of what reads it, times its mean square."""
    return read(f"{name}.weight").square().sum(0) * stats.moments[name].square_D


def _strongest(score_U: Tensor, keep: int) -> Tensor:
    """Units with the greatest scores, in their old order."""
    return score_U.argsort(descending=True, stable=True)[:keep].sort().values


def _of_norm(moment_DD: Tensor, units_d: Tensor) -> Subspace:
    """An axis that LayerNorms read, from the second moment of LayerNorm(h) and the units that stay."""
    kept_dd = moment_DD[units_d][:, units_d]
    # the student's LayerNorm subtracts the mean of the kept channels, and divides by the rest's rms
    return Subspace(units_d, (kept_dd.diagonal().mean() - kept_dd.mean()).sqrt().item())


def _attention(
    stats: CalibrationStats, read: Read, name: str, teacher: NetworkConfig, heads: int, head_dim: int
) -> dict[str, Subspace]:
    """Axes of the strongest heads; within each, rope's pairs for queries and keys, the strongest values."""
    old = teacher.attention_head_dim
    reader = structure.reader_of(f"{name}.{structure.VALUES}")
    score_HE = _scores(stats, read, reader).view(-1, old)
    kept_H = _strongest(score_HE.sum(1), heads)
    within_E = torch.tensor(rope_units(old, head_dim))
    values = [h * old + _strongest(score_HE[h], head_dim) for h in kept_H.tolist()]
    units_I = (kept_H[:, None] * old + within_E).flatten()
    axes = {f"{name}.{structure.VALUES}": Subspace(torch.cat(values))}
    for norm, axis in structure.NORMED.items():
        if not (moments := stats.moments.get(f"{name}.{norm}")):
            continue  # it reads no given frames
        square_I = moments.square_D
        # the norm now divides by the rms of the kept units, and attention by the root of the new head's width
        gain = (square_I[units_I].mean() / square_I.mean()).sqrt().item() * (head_dim / old) ** 0.25
        axes[f"{name}.{axis}"] = Subspace(units_I, gain)
    return axes


def rope_pairs(head_dim: int, theta: float = 10000.0) -> list[tuple[str, float]]:
    """Return axis (t, h, w) and log frequency of each pair of channels of a head, as in WanRotaryPosEmbed.

    h = w = 2 (E // 6), t = the rest; pair i of an axis of width n turns by theta^(-2 i / n) per position.
    """
    side = 2 * (head_dim // 6)
    widths = {"t": head_dim - 2 * side, "h": side, "w": side}
    return [(axis, -2 * i / n * math.log(theta)) for axis, n in widths.items() for i in range(n // 2)]


def fits_rope(old: int, new: int) -> bool:
    """Return whether a head of width `old` has enough pairs for each axis of one of width `new`."""
    before, after = ([a for a, _ in rope_pairs(n)] for n in (old, new))
    return all(after.count(axis) <= before.count(axis) for axis in "thw")


def rope_units(old: int, new: int) -> list[int]:
    """Return the channels of a head of width `old` for one of width `new`: per axis the nearest frequencies.

    Each axis keeps as many pairs as the new head has, in their order; of all such choices the one with the
    least sum of squared differences of log frequency.
    """
    before, after = rope_pairs(old), rope_pairs(new)
    pairs = []
    for axis in "thw":
        have = [(i, f) for i, (a, f) in enumerate(before) if a == axis]
        pairs += _nearest_rising(have, [f for a, f in after if a == axis])
    return [unit for pair in pairs for unit in (2 * pair, 2 * pair + 1)]


def _nearest_rising(have: list[tuple[int, float]], want: list[float]) -> list[int]:
    """Rising numbers of `have`, one for each of `want`, with the least sum of squared differences."""
    best: list[tuple[float, list[int]]] = [(0.0, [])] + [(math.inf, [])] * len(want)
    for number, value in have:
        for n in range(len(want), 0, -1):
            cost, numbers = best[n - 1]
            best[n] = min(best[n], (cost + (value - want[n - 1]) ** 2, [*numbers, number]))
    return best[len(want)][1]
