"""The only module that talks to other ranks: their numbers, collectives, and errors raised on all of them."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops import __compatible_ops__
from deepspeed.utils import groups
from torch import Tensor
from torch.distributed import Store

from wandistiller.distributed.device import default_backend, device, nccl_version, on_accelerator, take_gpu
from wandistiller.distributed.meeting import Meeting
from wandistiller.distributed.shutdown import Stopped, stopping
from wandistiller.distributed.watchdog import Watchdog, open_store
from wandistiller.utils.errors import ConfigError, Problems
from wandistiller.utils.logging import current, log, log_to_file, set_activity, setup_logging, write_result

COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Timeout of the backends, which cannot tell a long phase of another rank from a hang; the watchdog can."""
watchdog = Watchdog()
"""This rank's watch over the others; idle until `init`."""
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""Process groups by their ranks."""


def rank() -> int:
    """Return this process's number among all ranks; before `init` too."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_here() -> int:
    """Return how many ranks this machine has, as the launcher says, without communication."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # torchrun's, deepspeed's
    return int(next(filter(None, map(os.environ.get, names)), world_size()))


def backend() -> str:
    """Return the name of the communication backend, with NCCL's version; after `init`."""
    name = dist.get_backend()
    return f"{name} {nccl_version()}" if name == "nccl" else name


def log0(message: str, *args: object, level: int = logging.INFO) -> None:
    """Log on rank 0; on the others to their files alone."""
    if rank() == 0:
        log.log(level, message, *args)
    else:
        log_to_file(message % args if args else message)  # as logging does


def show(*lines: object) -> None:
    """Print results on stdout, on rank 0; progress and log go to stderr."""
    if rank() == 0:
        write_result("\n".join(map(str, lines)))


def init(log_level: str = "info") -> None:
    """Join the other ranks; without a launcher be the only one. Collective."""
    global watchdog
    setup_logging(log_level)
    # deepspeed 0.19.8 would compile an op here that leaves 69 MB per rank and port in /dev/shm
    __compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone)
    if world_size() == 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        os.environ["MASTER_PORT"] = "0"  # any that is free, also beside another run that `deepspeed` started
    take_gpu()
    if not dist.is_initialized():
        watchdog = Watchdog(rank(), world_size())
        watchdog.start()
        meeting = Meeting(watchdog)
        set_activity(f"waiting for all {world_size()} ranks at {meeting.address}")
        _init_backend(meeting.attend())
        set_activity("starting")


def _init_backend(store: Store) -> None:
    store.set_timeout(COLLECTIVE_TIMEOUT)
    if world_size() > 1:  # before the backend, in which a rank may be lost too
        host = os.environ["MASTER_ADDR"]
        port = 0 if rank() == 0 else int(store.get("watchdog"))
        watchdogs = open_store(rank(), world_size(), host, port)  # rank 0 has it, at any free port
        if rank() == 0:
            store.set("watchdog", f"{watchdogs.port}")
        watchdog.join(watchdogs)
    name = default_backend()
    if name == "gloo":  # torch 2.13 records its last 2,000 collectives too, which only NCCL's dump shows
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    # DeepSpeed's groups take no other timeout (0.19.8)
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, default, COLLECTIVE_TIMEOUT)
    dist.init_process_group(
        name,
        store=dist.PrefixStore("default_pg", store),
        rank=rank(),
        world_size=world_size(),
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device() if on_accelerator() else None,
    )
    deepspeed.init_distributed(dist_backend=name, verbose=False, timeout=COLLECTIVE_TIMEOUT)
    # the engines' own group, now: NCCL allocates for it, and cannot use what torch holds of a full GPU
    groups._get_data_parallel_group()


def gather_problems(problems: list[str]) -> list[str]:
    """Gather the problems of all ranks, each once, on every rank. Collective, if there are others."""
    if world_size() == 1:
        return problems
    _join()
    return list(dict.fromkeys(p for theirs in gather_objects(problems) for p in theirs))


def on_any_rank(condition: bool) -> bool:
    """Return whether it holds on any rank, on every rank. Collective, if there are others."""
    return bool(gather_problems(["yes"] if condition else []))


@contextmanager
def raise_on_all_ranks(kind: type[Problems] = ConfigError) -> Iterator[None]:
    """Gather the errors of all ranks at the end of the block and raise them on all. Collective."""
    _join()  # outside of `try`: ranks that could not join cannot gather why
    problems: list[str] = []
    try:
        yield
    except kind as error:
        problems = error.problems
    if problems := gather_problems(problems):
        raise kind(*problems)


def _join() -> None:
    if world_size() > 1 and not dist.is_initialized():
        init()


def all_reduce_sum(value: float) -> float:
    """Sum a number over all ranks, on every rank. Collective."""
    total = torch.tensor(value, dtype=torch.float64, device=device())
    dist.all_reduce(total)
    return total.item()


def barrier() -> None:
    dist.barrier()


def destroy() -> None:
    """Leave the group in order, so that no rank reports a closed connection. Collective."""
    global watchdog
    if dist.is_initialized():
        dist.barrier()
        watchdog.stop()
        dist.barrier()  # rank 0 has the store of all watchdogs
        dist.destroy_process_group()
        _groups.clear()
        watchdog = Watchdog()


def raise_if_stop_requested(when: str = "") -> None:
    """End the run here if any rank received a request to stop. Collective, if there are others.

    Args:
        when: words for the message; left out: what this rank does.

    Raises:
        Stopped: on all ranks.
    """
    asked = float(stopping.reason is not None)
    if asked if world_size() == 1 else all_reduce_sum(asked):
        raise Stopped(when or f"in: {current.activity} (what was finished is kept)")


def broadcast_object(value: Any, source: int = 0) -> Any:
    """Return the value of the rank `source`, on every rank. Collective."""
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's value in rank order, on every rank. Collective, if there are others."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def node_peers() -> list[int]:
    """List the ranks that run on this machine and see its processes, in order. Collective."""
    here = (Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid"))
    return [rank for rank, there in enumerate(gather_objects(here)) if there == here]


def group(peers: list[int]) -> dist.ProcessGroup:
    """Return this rank's group of `peers`, made once. Collective: other ranks may have other peers."""
    for ranks in sorted({tuple(theirs) for theirs in gather_objects(peers)}):
        if ranks not in _groups:
            _groups[ranks] = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT)
    return _groups[tuple(peers)]


def gather_tensor(value_B: Tensor, within: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate equal-shaped tensors in rank order, on every rank, or on those of a group. Collective."""
    parts = [torch.empty_like(value_B) for _ in range(dist.get_world_size(within))]
    dist.all_gather(parts, value_B.contiguous(), within)
    return torch.cat(parts)


def call_owner(
    owner: int,
    peers: list[int],
    inputs: list[Tensor],
    compute: Callable[[list[Tensor]], list[Tensor]],
    sharers: Callable[[int], int],
) -> list[Tensor]:
    """Compute on the rank `owner` what it alone can, for each of `peers`. Collective.

    Args:
        peers: ranks with the same owner, this one among them.
        inputs: this rank's, equal in number, dtype and dimensions on every rank, but not in their sizes.
        compute: maps one rank's inputs to tensors of any number, shape and dtype on the inputs' device.
        sharers: the number of a rank's group, whose ranks have equal inputs; they are consecutive in `peers`.

    Returns:
        The outputs for this rank's inputs.
    """
    device = inputs[0].device
    own_sizes = torch.tensor([size for t in inputs for size in t.shape], device=device)
    sizes = gather_tensor(own_sizes).view(-1, len(own_sizes)).tolist()
    if rank() != owner:
        _send(inputs, owner)
        header: list[Any] = [None]
        dist.recv_object_list(header, owner)
        outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in header[0]]
        return _received(outputs, owner)
    computed, for_owner = None, []
    for other in peers:
        size, theirs = iter(sizes[other]), inputs
        if other != owner:
            theirs = _received([t.new_empty([next(size) for _ in t.shape]) for t in inputs], other)
        if sharers(other) != computed:
            computed, outputs = sharers(other), compute(theirs)
        if other == owner:
            for_owner = outputs
            continue
        dist.send_object_list([[(tuple(t.shape), t.dtype) for t in outputs]], other)
        _send(outputs, other)
    return for_owner


def _send(tensors: list[Tensor], target: int) -> None:
    for t in tensors:
        dist.send(t.contiguous(), target)


def _received(tensors: list[Tensor], source: int) -> list[Tensor]:
    for t in tensors:
        dist.recv(t, source)
    return tensors
