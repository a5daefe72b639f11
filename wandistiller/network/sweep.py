"""Passes that go through a network's blocks together, so that each block's weights arrive once."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from wandistiller.distributed.device import device

T = TypeVar("T")


def block_by_block(blocks: Iterable[nn.Module], calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of `calls`, forward passes through `blocks`, none of which enters a block early.

    All of them finish a block before the first enters the next. Each computes what it computes alone, on the
    same shapes and in its own modes of gradients and autocast, and may be several forward passes. Within a
    call, others join those that run already, through whose blocks they go.
    """
    if outer := getattr(getcurrent(), "sweep", None):
        return outer.join(calls)
    if len(calls) < 2:
        return [call() for call in calls]
    return _Sweep().run(blocks, calls)


def backward_together(passes: Sequence[Callable[[], None]]) -> None:
    """Make backward passes, each by one `Tensor.backward`, as one, in which `Blocks` set the order of blocks.

    What a pass does before and after that is done for it alone.
    """
    if len(passes) < 2:
        for each in passes:
            each()
        return
    roots: list[Tensor] = []

    def wait(root: Tensor, *_: Any, **__: Any) -> None:
        roots.append(root)
        getcurrent().parent.switch()

    begun = [greenlet(each) for each in passes]
    # at stage 0 DeepSpeed (0.19.8) accepts no backward pass but its own, which can only be stopped within
    backward, torch.autograd.backward = torch.autograd.backward, wait
    try:
        for each in begun:
            each.switch()
    finally:
        torch.autograd.backward = backward
    backward(roots)
    for each in begun:
        each.switch()


class _Sweep:
    """Calls that take turns, a block each."""

    def __init__(self) -> None:
        self._running: list[greenlet] = []
        self._results: dict[greenlet, Any] = {}

    def run(self, blocks: Iterable[nn.Module], calls: Sequence[Callable[[], T]]) -> list[T]:
        """Make the calls; they pause before each of `blocks`."""
        hooks = [block.register_forward_pre_hook(self._pause, prepend=True) for block in blocks]
        try:
            begun = [self._begin(call) for call in calls]
            while self._running:
                for call in list(self._running):
                    self._resume(call)
        finally:
            for hook in hooks:
                hook.remove()
            for call in self._running:  # after an error; their contexts end too
                call.throw()
        return [self._results.pop(call) for call in begun]

    def join(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Make the calls beside those that run, for one of them, which waits for the results."""
        caller = getcurrent()
        begun = [self._begin(call) for call in calls]  # to its first block, where the caller is
        while any(call in self._running for call in begun):
            _switched(caller.parent)
        return [self._results.pop(call) for call in begun]

    def _begin(self, function: Callable[[], T]) -> greenlet:
        call = greenlet(function)
        call.sweep = self
        self._running.append(call)
        self._resume(call)
        return call

    def _resume(self, call: greenlet) -> None:
        call.parent = getcurrent()  # to which it returns at its next block
        result = _switched(call)
        if call.dead:
            self._results[call] = result
            self._running.remove(call)
            call.sweep = None  # results must not wait for the collector of cycles

    def _pause(self, *_: Any) -> None:
        if getattr(call := getcurrent(), "sweep", None) is self:
            _switched(call.parent)


def _switched(call: greenlet) -> Any:
    """Go on with another call; come back in the modes of this one, which torch has for a thread."""
    kind, has_gradients = device().type, torch.is_grad_enabled()
    is_autocast, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    result = call.switch()
    torch.set_grad_enabled(has_gradients)
    torch.set_autocast_enabled(kind, is_autocast)
    torch.set_autocast_dtype(kind, dtype)
    return result


def only_here(hook: Callable[..., None]) -> Callable[..., None]:
    """Return `hook` for the forward pass that registers it, not for those that go through blocks with it."""
    registered = getcurrent()

    def checked(*args: Any) -> None:
        if getcurrent() is registered:
            hook(*args)

    return checked
