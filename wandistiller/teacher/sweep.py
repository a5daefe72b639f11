"""Forward passes that go through a network's blocks together, so that each block's weights arrive once."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from greenlet import getcurrent, greenlet
from torch import nn

from wandistiller.engine.engine_config import BatchSize
from wandistiller.teacher.placements.base import Placement
from wandistiller.wan.pipeline import WanFolder

T = TypeVar("T")


class CallsTeacher(Protocol):
    """The settings of a run that say how its teacher is called, as in `config.job.Job`."""

    run: Any
    folder: WanFolder
    teacher: Placement
    batch: BatchSize
    size: Any
    buckets: list[Any]


def branches(job: CallsTeacher) -> int:
    """Branches of classifier-free guidance in one call of the teacher: text and null, or text alone."""
    return 2 if {job.run.guidance_scale, job.run.guidance_scale_2} != {1} else 1


def swept(job: CallsTeacher) -> int:
    """Micro-steps whose samples go through the teacher together."""
    placement = job.teacher
    tokens = max(job.folder.tokens(s.height, s.width, s.num_frames) for s in (job.size, *job.buckets))
    samples = job.batch.micro * max(1, branches(job) // placement.guidance_passes)
    nbytes = samples * tokens * job.folder.config.width * placement.engine.dtype.itemsize
    return placement.sweep(job.batch.accumulation, nbytes)


def block_by_block(blocks: Iterable[nn.Module], calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of `calls`, forward passes through `blocks`, none of which enters a block early.

    All of them finish a block before the first enters the next. Each computes what it computes alone, on the
    same shapes. Gradients must be off outside too, as the calls' own contexts end in another order.
    """
    if len(calls) == 1:
        return [calls[0]()]
    running = {i: greenlet(call) for i, call in enumerate(calls)}
    own = set(running.values())

    def pause(*_: Any) -> None:
        if (call := getcurrent()) in own:
            call.parent.switch()

    hooks = [block.register_forward_pre_hook(pause, prepend=True) for block in blocks]
    results: dict[int, T] = {}
    try:
        while running:
            for i, call in list(running.items()):
                result = call.switch()
                if call.dead:
                    results[i] = result
                    del running[i]
    finally:
        for hook in hooks:
            hook.remove()
        for call in running.values():  # after an error; their contexts end too
            call.throw()
    return [results[i] for i in range(len(calls))]


def in_turn(_: Iterable[nn.Module], calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of `calls`, one after the other."""
    return [call() for call in calls]


def only_here(hook: Callable[..., None]) -> Callable[..., None]:
    """Return `hook` for the forward pass that registers it, not for those that go through blocks with it."""
    registered = getcurrent()

    def checked(*args: Any) -> None:
        if getcurrent() is registered:
            hook(*args)

    return checked
