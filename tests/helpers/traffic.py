"""Counts the kernels of a pass on the meta device, and the bytes that they read and write."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import NoneAsConstantBuffer
from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
WITHOUT_KERNEL = {
    aten.empty_like.default,
    aten.empty.memory_format,
    aten._unsafe_view.default,
    aten.new_empty_strided.default,
}


class Traffic(TorchDispatchMode):
    """Kernels and bytes of all that is no matrix product or attention.

    A number that is broadcast is read once. A kernel that skips numbers is counted as if it could.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in PRODUCTS | WITHOUT_KERNEL and not func.is_view:
            written = args[:1] if func._schema.name.endswith("_") else out
            read = args[1:] if func is aten.copy_.default else (args, kwargs)
            self.add(read, written)
        return out

    def add(self, *tensors: Any) -> None:
        """Add a kernel that reads and writes these."""
        self.kernels += 1
        self.total += sum(map(_nbytes, tree_leaves(tensors)))


def _nbytes(t: Any) -> int:
    if not isinstance(t, Tensor):
        return 0
    sizes = zip(t.shape, t.stride(), strict=True)
    return t.element_size() * math.prod(size for size, stride in sizes if stride)


class FusedTraffic:
    """Kernels that inductor fuses, and their bytes, without those of matrix products and attention.

    It fuses for the CPU and compiles no C++: the graphs are called, but their outputs have no values.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels = self.total = 0
        monkeypatch.setattr(GraphLowering, "compile_to_module", lambda graph: self._count(graph))

    def _count(self, graph: GraphLowering) -> SimpleNamespace:
        graph.codegen()
        fused = [n for n in graph.scheduler.nodes if isinstance(n, SchedulerNode | FusedSchedulerNode)]
        self.kernels += len(fused)
        self.total += sum(node.get_read_write_buffers_sizes() for node in fused)
        return SimpleNamespace(call=lambda _: [*map(_empty, graph.graph_outputs)])


def _empty(out: Any) -> Tensor | None:
    if isinstance(out, NoneAsConstantBuffer):  # of an input that needs no gradient
        return None
    size, stride = ([int(n) for n in numbers] for numbers in (out.get_size(), out.get_stride()))
    return torch.empty_strided(size, stride, dtype=out.get_dtype())


class CudaKernels(TorchFunctionMode):
    """Lets RMS norms and attention be what they are on a GPU: one kernel forward, and one backward."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.rms_norm:
            return _Norm.apply(args[0], self._traffic)
        if func is torch.nn.functional.scaled_dot_product_attention:
            named = kwargs or {}
            query, key, value = args if args else (named[name] for name in ("query", "key", "value"))
            return _Attention.apply(query, key, value)
        return func(*args, **(kwargs or {}))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, traffic: Traffic) -> Tensor:
        ctx.traffic, out = traffic, torch.empty_like(x)
        traffic.add(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        out = torch.empty_like(slope)
        ctx.traffic.add(slope, slope, out)  # the second for x, of the same size
        return out, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[0])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))
