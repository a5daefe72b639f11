"""The one owner of rank talk: who am I, what do the others say, and one message for all."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops import __compatible_ops__
from torch import Tensor
from torch.distributed import TCPStore

from wandistiller import builds, logs
from wandistiller.logs import log
from wandistiller.phase import doing
from wandistiller.problems import ConfigError, Problems
from wandistiller.stopping import Stopped, stopping
from wandistiller.watch import Notice, Watch, open_store

TIMEOUT_SECONDS = 1800.0
"""Without a sign of life from any rank for so long a run is taken for hung; the recipe key `timeout` says otherwise."""
COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Of the backends, who cannot tell a long phase of another rank from a hang; `watch` can."""
_watch: Watch | None = None
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""Those of some ranks, by these."""


def rank() -> int:
    """This process's number among all ranks; right before `init` too."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process's number among those of its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def device() -> torch.device:
    """The accelerator that belongs to this rank, or the CPU; the same in every thread, each of which has a current one."""
    kind = get_accelerator().device_name()
    return torch.device(kind, local_rank()) if kind == "cuda" else torch.device(kind)


def backend() -> str:
    """What carries what ranks tell each other, with NCCL's version; after `init`."""
    name = dist.get_backend()
    return f"{name} {'.'.join(map(str, torch.cuda.nccl.version()))}" if name == "nccl" else name


def number_of_gpus() -> int:
    """That this process can see."""
    return torch.cuda.device_count() if device().type == "cuda" else 0


def log0(message: str, *args: object, level: int = logging.INFO) -> None:
    """Log on rank 0 only; the others keep it in their files."""
    if rank() == 0:
        log.log(level, message, *args)
    else:
        logs.keep(message % args)


def init(log_level: str = "info") -> None:
    """Join the other ranks; without a launcher be the only one. Collective."""
    global _watch
    logs.start(log_level)
    # deepspeed 0.19.8 would compile an op here that leaves 69 MB per rank and port in /dev/shm; gloo does without
    __compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone | {"MASTER_PORT": _free_port()})
    cuda = torch.cuda.is_available()
    if cuda:
        if torch.cuda.device_count() == 1:  # srun may show each task its own GPU alone; DeepSpeed reads the variable too
            os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if local_rank() == 0:
        builds.forget_killed_builds()
    if not dist.is_initialized():
        doing(f"waiting for all {world_size()} ranks at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
        _watch = Watch(rank(), world_size(), TIMEOUT_SECONDS)
        _watch.start()
        if not cuda:  # torch 2.13 keeps 2,000 of gloo's collectives too, in MiB that only a dump of NCCL's would show
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        for default in ("default_pg_timeout", "default_pg_nccl_timeout"):  # of DeepSpeed's groups, which takes no other (0.19.8)
            setattr(dist.distributed_c10d, default, COLLECTIVE_TIMEOUT)
        deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", verbose=False, timeout=COLLECTIVE_TIMEOUT)
        if world_size() > 1:
            _watch.join(_common_store())


def _common_store() -> TCPStore:
    """This rank's way to the store of all watches, which rank 0 keeps. Collective."""
    host = os.environ["MASTER_ADDR"]
    kept = open_store(0, world_size(), host, 0) if rank() == 0 else None
    port = from_rank_0(kept.port if kept else None)
    return kept or open_store(rank(), world_size(), host, port)


def set_timeout(seconds: float) -> None:
    """What the recipe says of `TIMEOUT_SECONDS`."""
    if _watch:
        _watch.timeout = seconds


def leave(code: int, text: str) -> None:
    """Tell the other ranks that this one fails, and why, before its process ends; they end too. No collective."""
    if _watch:
        _watch.leave(code, text)


def explain(more: Callable[[Notice], str]) -> None:
    """What this rank adds when another has failed."""
    if _watch:
        _watch.explain = more


def followed(notice: Notice) -> str:
    """That this rank ends because another does, in words."""
    return _watch.followed(notice) if _watch else notice.text


def who_failed() -> Notice | None:
    """After a collective broke: the rank because of which. No collective."""
    return _watch.who_failed() if _watch else None


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def agree_on_problems(problems: list[str]) -> list[str]:
    """What is wrong on any rank, each problem once, on every rank. Collective, if there are others."""
    if world_size() == 1:
        return problems
    if not dist.is_initialized():
        init("warning")
    return list(dict.fromkeys(p for theirs in gather_objects(problems) for p in theirs))


@contextmanager
def same_problems(kind: type[Problems] = ConfigError) -> Iterator[None]:
    """What is wrong on any rank stops them all, with one message, after they have all been through. Collective."""
    problems: list[str] = []
    try:
        yield
    except kind as error:
        problems = error.problems
    if problems := agree_on_problems(problems):
        raise kind(*problems)


def total(value: float) -> float:
    """The sum of all ranks' numbers, on every rank. Collective."""
    found = torch.tensor(value, dtype=torch.float64, device=device())
    dist.all_reduce(found)
    return found.item()


def barrier() -> None:
    dist.barrier()


def finish() -> None:
    """Leave the group in order, so that no rank reports a closed connection. Collective."""
    global _watch
    if dist.is_initialized():
        dist.barrier()
        if _watch:
            _watch.stop()
        dist.barrier()  # rank 0 keeps the store of all watches
        dist.destroy_process_group()
        _groups.clear()
        _watch = None


def stop_if_asked(when: str) -> None:
    """End the run here if any rank was asked to stop. Collective.

    Raises:
        Stopped: on all ranks.
    """
    if any(gather_objects(stopping.reason)):
        raise Stopped(when)


def from_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank. Collective."""
    return from_rank(0, value)


def from_rank(source: int, value: Any) -> Any:
    """The value that the rank `source` has, on every rank. Collective."""
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's value in rank order, on every rank. Collective, if there are others."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def node_peers() -> list[int]:
    """The ranks that run on this machine and see its processes, in order. Collective."""
    here = (Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid"))
    return [rank for rank, there in enumerate(gather_objects(here)) if there == here]


def group(peers: list[int]) -> dist.ProcessGroup:
    """The group of `peers`, for each rank those that it is one of. Collective, and made once."""
    every = sorted({tuple(theirs) for theirs in gather_objects(peers)})
    for ranks in every:
        if ranks not in _groups:
            _groups[ranks] = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT)
    return _groups[tuple(peers)]


def gather_tensor(value_B: Tensor, within: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate equal-shaped tensors in rank order, on every rank, or on those of a group. Collective."""
    parts = [torch.empty_like(value_B) for _ in range(dist.get_world_size(within))]
    dist.all_gather(parts, value_B.contiguous(), within)
    return torch.cat(parts)


def exchange(
    owner: int, peers: list[int], mine: list[Tensor], answer: Callable[[list[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Ask the rank `owner` for what, of `peers`, it alone can compute; the inputs' first dimension may differ. Collective.

    Args:
        peers: ranks that ask the same owner, this one among them.
        mine: this rank's inputs, equal in number, dtype and all but the first dimension on every rank.
        answer: what the owner does with one rank's inputs; tensors of any number, shape and dtype on the inputs' device.
    Returns:
        The answer to this rank's inputs.
    """
    lengths = gather_tensor(torch.tensor([len(t) for t in mine], device=mine[0].device)).view(-1, len(mine)).tolist()
    if rank() != owner:
        for t in mine:
            dist.send(t.contiguous(), owner)
        header: list[Any] = [None]
        dist.recv_object_list(header, owner)
        results = [torch.empty(shape, dtype=dtype, device=mine[0].device) for shape, dtype in header[0]]
        for t in results:
            dist.recv(t, owner)
        return results
    for other in peers:
        if other == owner:
            results = answer(mine)
            continue
        theirs = [t.new_empty(n, *t.shape[1:]) for t, n in zip(mine, lengths[other], strict=True)]
        for t in theirs:
            dist.recv(t, other)
        answered = answer(theirs)
        dist.send_object_list([[(tuple(t.shape), t.dtype) for t in answered]], other)
        for t in answered:
            dist.send(t.contiguous(), other)
    return results
