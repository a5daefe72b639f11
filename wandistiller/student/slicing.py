"""Tensors of a narrower student from the teacher's, given the units and directions that stay.

Three rules hold for every cut. A linear map that loses inputs gets their mean, times its weights, into its
bias: only their deviation from the mean is lost. A norm's divisor changes with the cut, so its own weights
take the ratio. A cut of unused units changes nothing but rounding.

The student keeps some channels of the residual stream. LayerNorm divides by the rms of these, so its output
is scaled by 1 / `gain`, `gain` the rms of the kept channels of LayerNorm(h), and its readers multiply by it:
SliceGPT, Ashkboos et al. 2024, arXiv:2401.15024. Wan's modulation (1 + scale), shift and gate acts channel by
channel, so its cut is exact.
Shape letters: D the teacher's width, d the student's, R rows of a table.
"""

from dataclasses import dataclass, field

from torch import Tensor

SHIFT_ROWS = slice(0, None, 3)
"""Rows of shifts; the order is shift, scale, gate, twice; shift and scale in the last table."""
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

    def in_words(self) -> str:
        """Describe the kept units: `0-31 64-95`."""
        if not self.picks:
            return f"{self.basis.shape[1]} principal directions of {self.basis.shape[0]}"
        units = self.basis.tolist()
        starts = [u for i, u in enumerate(units) if i == 0 or units[i - 1] != u - 1]
        ends = [u for i, u in enumerate(units) if i == len(units) - 1 or units[i + 1] != u + 1]
        return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))

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
    """Cuts the tensors of one of the teacher's modules to those of the student's."""

    axes: dict[str, Subspace] = field(default_factory=dict)
    """Subspaces by name, as in `ENDS`; all others stay whole."""
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
        if "scale_shift_table" in values:
            return {"scale_shift_table": self._table(name, values["scale_shift_table"])}
        if leaf == "time_proj":
            rows = {k: v.unflatten(0, (6, -1)) for k, v in self._linear(name, values, None, "temb").items()}
            return {k: self._modulation(v, 0, 1).flatten(0, 1) for k, v in rows.items()}
        if leaf in ("norm_q", "norm_k"):
            axis = self.axes.get(name.replace("norm_", "to_"))
            return {"weight": axis.along(values["weight"], 0) * axis.gain} if axis else values
        if leaf == "norm2" and (axis := self.axes.get("stream")):
            weight, bias = (axis.along(values[k], 0) for k in ("weight", "bias"))
            return {"weight": weight, "bias": bias / axis.gain}
        written, read = _ends(name)
        return self._linear(name, values, written, read)

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
            value.movedim(rows, 0)[SHIFT_ROWS] /= axis.gain
        return value

    def _table(self, name: str, table_1RD: Tensor) -> Tensor:
        temb = self.axes.get("temb")
        if name or not temb:
            return self._modulation(table_1RD, 1, 2)
        # the last table is added to temb itself, which is not divided by the gain: right on average
        mean_D = self.means["condition_embedder.act_fn"]
        return self._modulation(table_1RD + mean_D, 1, 2) - temb.along(mean_D, 0)


def _ends(name: str) -> list[str | None]:
    """The axes that a linear map of the teacher writes to and reads from."""
    inside = name.split(".", 2)[2] if name.startswith("blocks.") else name
    layer = name.removesuffix(inside)
    return [layer + end[1:] if end and end[0] == "." else end for end in ENDS.get(inside, (None, None))]
