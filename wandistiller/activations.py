"""What flows through a network in use: means, mean squares and second moments, taken by hooks where its weights are."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wandistiller.prune import Measured, Moments

STREAM_NORMS = ("norm1", "norm2", "norm3", "norm_out")  # where a Wan network reads its residual stream
QK_NORMS = ("norm_q", "norm_k")


AT_ONCE = 2**24
"""Elements that are taken to float64 at once: a video's hidden units are 1.8 x 10^9 a sample (Wan 14B, 81 frames of 480x832)."""


class _Sums:
    """Sums over all tokens seen, float64 where they were first seen, so that they do not depend on how samples were batched."""

    def __init__(self) -> None:
        self.vectors: dict[str, list[Tensor]] = {}
        self.matrices: dict[str, list[Tensor]] = {}

    def vector(self, name: str, x_TD: Tensor) -> None:
        for part_TD in _parts(x_TD):
            part_TD = part_TD.double()
            self._add(self.vectors, name, part_TD.new_tensor(len(part_TD)), part_TD.sum(0), part_TD.square().sum(0))

    def matrix(self, name: str, x_TD: Tensor, norm: Callable[[Tensor], Tensor] = lambda part_TD: part_TD) -> None:
        for part_TD in _parts(x_TD):
            part_TD = norm(part_TD.float())
            self._add(self.matrices, name, part_TD.new_tensor(len(part_TD)), (part_TD.T @ part_TD).double())

    def _add(self, sums: dict[str, list[Tensor]], name: str, *new: Tensor) -> None:
        totals = sums.setdefault(name, [torch.zeros_like(t, dtype=torch.float64) for t in new])
        for total, t in zip(totals, new, strict=True):
            total += t.to(total.device)


def _parts(x_TD: Tensor) -> tuple[Tensor, ...]:
    return x_TD.split(max(1, AT_ONCE // x_TD.shape[-1]))


def measure(networks: Iterable[nn.Module], use: Callable[[], object]) -> Measured | None:
    """Run `use`, which asks `networks`, and return what flowed through them, all of them together; None if there are none."""
    sums, hooks = _Sums(), []
    for network in networks:
        for name, module in network.named_modules():
            if look := _look(sums, name, module):
                hooks.append(module.register_forward_pre_hook(look))
    try:
        with torch.no_grad():
            use()
    finally:
        for hook in hooks:
            hook.remove()
    if not hooks:
        return None
    moments = {name: Moments((s / n).float().cpu(), (q / n).float().cpu()) for name, (n, s, q) in sums.vectors.items()}
    stream_n, stream_DD = (t.cpu() for t in sums.matrices["stream"])
    text_n, text_DD = (t.cpu() for t in sums.matrices["text"])
    mean_D = moments["blocks.0.attn2.to_k"].mean_D.double()
    return Measured(moments, (stream_DD / stream_n).float(), (text_DD / text_n - torch.outer(mean_D, mean_D)).float())


def _look(sums: _Sums, name: str, module: nn.Module) -> Callable[[nn.Module, tuple[Tensor, ...]], None] | None:
    leaf = name.split(".")[-1]
    if leaf in STREAM_NORMS and not isinstance(module, nn.Identity):
        return lambda _, x: sums.matrix("stream", x[0].flatten(0, -2), lambda part_TD: F.layer_norm(part_TD, part_TD.shape[-1:]))
    if name == "blocks.0.attn2.to_k":
        def both(_: nn.Module, x: tuple[Tensor, ...]) -> None:
            sums.vector(name, x[0].flatten(0, -2))
            sums.matrix("text", x[0].flatten(0, -2))
        return both  # fmt: skip
    if isinstance(module, nn.Linear | nn.SiLU) or leaf in QK_NORMS:
        return lambda _, x: sums.vector(name, x[0].flatten(0, -2))
    return None
