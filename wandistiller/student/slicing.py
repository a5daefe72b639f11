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
    """Cuts the tensors of one of the teacher's modules to those of the student's."""

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
