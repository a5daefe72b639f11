"""How the tensors of a narrower student are made of the teacher's, once it is known which units and directions stay.

Three rules hold for every cut. A linear map that loses inputs gets their mean, times its weights, into its bias: only their
deviation from the mean is lost. What a norm divides by changes with the cut, so the norm's own weights take the ratio.
A cut that removes only what is not used changes nothing but rounding.

The residual stream's coordinates in the student are z = P^T h. LayerNorm divides by the rms of what is left, so what it gives
is scaled by 1 / `gain`, `gain` the rms of P^T LayerNorm(h), and what reads it takes that back: SliceGPT, Ashkboos et al. 2024,
arXiv:2401.15024. Wan's modulation (1 + scale), shift and gate acts channel by channel: exact where P picks channels; where P
turns, the diagonal of P^T diag(.) P is the nearest diagonal, and P^T shift is the shift.
Shape letters: D the teacher's width, d the student's, R rows of a table.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

SHIFT_ROWS = (0, 3)  # of a block's table and of time_proj: shift, scale, gate, twice; the last table has a shift and a scale
ENDS = {
    "patch_embedding": ("stream", None),
    "condition_embedder.time_embedder.linear_1": ("time", None),
    "condition_embedder.time_embedder.linear_2": ("temb", "time"),
    "condition_embedder.text_embedder.linear_1": ("words", None),
    "condition_embedder.text_embedder.linear_2": ("text", "words"),
    "attn1.to_q": (".attn1.to_q", "stream"),
    "attn1.to_k": (".attn1.to_k", "stream"),
    "attn1.to_v": (".attn1.to_v", "stream"),
    "attn1.to_out.0": ("stream", ".attn1.to_v"),
    "attn2.to_q": (".attn2.to_q", "stream"),
    "attn2.to_k": (".attn2.to_k", "text"),
    "attn2.to_v": (".attn2.to_v", "text"),
    "attn2.to_out.0": ("stream", ".attn2.to_v"),
    "ffn.net.0.proj": (".ffn", "stream"),
    "ffn.net.2": ("stream", ".ffn"),
    "proj_out": (None, "stream"),
}
"""The axes that each linear map of a Wan network writes to and reads from; with a dot, one for each layer."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The student's coordinates of one of the teacher's vector spaces: some of its units, or directions in it."""

    basis: Tensor
    """units_d, int64; or directions_Dd, float32 with orthonormal columns."""
    gain: float = 1.0
    """What is read through this axis is so many times what the student's norm gives."""

    @property
    def picks(self) -> bool:
        return not self.basis.is_floating_point()

    def in_words(self) -> str:
        """What is kept, for people: `0-31 64-95`."""
        if not self.picks:
            return f"{self.basis.shape[1]} principal directions of {self.basis.shape[0]}"
        units = self.basis.tolist()
        starts = [u for i, u in enumerate(units) if i == 0 or units[i - 1] != u - 1]
        ends = [u for i, u in enumerate(units) if i == len(units) - 1 or units[i + 1] != u + 1]
        return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))

    def along(self, value: Tensor, dim: int) -> Tensor:
        """Coordinates of a vector, along one dimension of `value`."""
        if self.picks:
            return value.index_select(dim, self.basis)
        return (value.movedim(dim, -1) @ self.basis).movedim(-1, dim)

    def diagonal(self, value: Tensor, dim: int) -> Tensor:
        """The diagonal of P^T diag(value) P: factors that act channel by channel."""
        return self.along(value, dim) if self.picks else (value.movedim(dim, -1) @ self.basis.square()).movedim(-1, dim)

    def lost(self, mean_D: Tensor) -> Tensor:
        """What of a vector the student's coordinates do not hold, in the teacher's coordinates."""
        if self.picks:
            return mean_D.index_fill(0, self.basis, 0.0)
        return mean_D - self.basis @ (self.basis.T @ mean_D)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Makes the tensors of one module of the student from those of the teacher's module that it stands for."""

    axes: dict[str, Axis] = field(default_factory=dict)
    """By name, as in `ENDS`; what is not named stays whole."""
    means: dict[str, Tensor] = field(default_factory=dict)
    """Mean input mean_D of each of the teacher's modules that was measured."""

    def cut(self, name: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The student's tensors.

        Args:
            name: of the teacher's module, such as `blocks.3.ffn.net.2`; empty for the network itself.
            values: that module's own tensors by name, such as `weight` and `bias`.
        """
        if not values or not self.axes:
            return values
        leaf = name.rpartition(".")[2]
        if "scale_shift_table" in values:
            return {"scale_shift_table": self._table(name, values["scale_shift_table"])}
        if leaf == "time_proj":
            rows = {k: v.unflatten(0, (6, -1)) for k, v in self._linear(name, values, None, "temb").items()}
            return {k: self._modulation(v, 0, 1).flatten(0, 1) for k, v in rows.items()}
        if leaf in ("norm_q", "norm_k"):
            axis = self.axes.get(name.replace("norm_", "to_"))
            return {"weight": axis.along(values["weight"], 0) * axis.gain} if axis else values
        if leaf == "norm2":
            return self._affine(values)
        written, read = _ends(name)
        return self._linear(name, values, written, read)

    def _linear(self, name: str, values: dict[str, Tensor], written: str | None, read: str | None) -> dict[str, Tensor]:
        weight, bias = values["weight"], values["bias"]
        if axis := self.axes.get(read):
            bias = bias + weight @ axis.lost(self.means[name])
            weight = axis.along(weight, 1) * (axis.gain if read == "stream" else 1.0)
        if axis := self.axes.get(written):
            weight, bias = axis.along(weight, 0), axis.along(bias, 0)
        return {"weight": weight, "bias": bias}

    def _affine(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        axis = self.axes.get("stream")
        if not axis:
            return values
        return {"weight": axis.diagonal(values["weight"], 0), "bias": axis.along(values["bias"], 0) / axis.gain}

    def _modulation(self, value: Tensor, rows: int, dim: int) -> Tensor:
        """Rows of shift, scale, gate, shift, ... along dimension `rows`, whose channels lie along `dim`."""
        axis = self.axes.get("stream")
        if not axis:
            return value
        return torch.stack([
            axis.along(row, dim - 1) / axis.gain if i in SHIFT_ROWS else axis.diagonal(row, dim - 1)
            for i, row in enumerate(value.unbind(rows))
        ], dim=rows)  # fmt: skip

    def _table(self, name: str, table_1RD: Tensor) -> Tensor:
        temb = self.axes.get("temb")
        if name or not temb:
            return self._modulation(table_1RD, 1, 2)
        # the last table is added to temb itself, whose channels the student may have to choose otherwise: right on average
        mean_D = self.means["condition_embedder.act_fn"]
        return self._modulation(table_1RD + mean_D, 1, 2) - temb.along(mean_D, 0)


def _ends(name: str) -> list[str | None]:
    """The axes that a linear map of the teacher writes to and reads from."""
    inside = name.split(".", 2)[2] if name.startswith("blocks.") else name
    layer = name.removesuffix(inside)
    return [layer + end[1:] if end and end[0] == "." else end for end in ENDS.get(inside, (None, None))]
