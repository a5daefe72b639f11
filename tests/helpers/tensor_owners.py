"""The live tensors of this process by owner: what is resident, and for whom."""

import gc
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wandistiller.student.learner import Learner
from wandistiller.teacher.base import Teacher

OWNERS = (
    "teacher's weights",
    "student's weights",
    "optimizer and float32 weights",
    "gradients",
    "buffers",
    "activations",
    "batches and others",
)
TEACHER, STUDENT, OPTIMIZER, GRADIENTS, BUFFERS, ACTIVATIONS, OTHERS = OWNERS
CONTAINERS = (dict, list, tuple, set, deque, Tensor, nn.Module)
PACKAGES = ("wandistiller", "deepspeed", "accelerate")
"""Whose objects are looked into."""
KEPT_WEIGHTS = ("param_buffer_of_bit16_for_cpu_offload_groups",)
KEPT_GRADIENTS = (
    "averaged_gradients",
    "all_grad_tensors",
    "accumulated_grads_in_cpu",
    "grads_in_partition",
    "grad_partitions_flat_buffer",
)
"""Names of these tensors in DeepSpeed's optimizers (0.19.8)."""


class Storage(NamedTuple):
    """The memory behind a tensor and all views of it."""

    owner: str
    place: str
    """cpu, or cuda."""
    nbytes: int


def tensor_owners(teacher: Teacher | None, student: Learner) -> dict[int, Storage]:
    """Return every storage with memory of its own, by address. Of several claims the first counts, in order:
    teacher's weights, student's weights, gradients, optimizer, buffers, activations, others.

    Runs on the main thread; computes, unpacks and frees nothing. Storages that only C++ knows are missing,
    except those that autograd keeps behind tensors that Python knows.
    """
    found: dict[int, Storage] = {}
    for owner, tensors in _claims(teacher, student):
        for t in tensors:
            if (
                t.device.type != "meta"
                and t.layout == torch.strided
                and (nbytes := t.untyped_storage().nbytes())
            ):
                found.setdefault(t.untyped_storage().data_ptr(), Storage(owner, t.device.type, nbytes))
    return found


def by_owner(storages: Iterable[Storage], place: str) -> dict[str, int]:
    """Bytes of each owner in one kind of memory."""
    total = Counter({owner: 0 for owner in OWNERS})
    for s in storages:
        total[s.owner] += s.nbytes * (s.place == place)
    return dict(total)


def _claims(teacher: Teacher | None, student: Learner) -> Iterator[tuple[str, Iterable[Tensor]]]:
    networks = [o for o in _behind(teacher) if isinstance(o, nn.Module)]
    buffers = {id(b) for network in networks for b in network._buffers.values()}  # rope tables
    yield TEACHER, (t for t in _tensors(networks) if id(t) not in buffers)
    engines, trained = list(student.engines.values()), list(student.trained.values())
    wrappers = [vars(engine.optimizer) for engine in engines]
    parameters = [p for engine in engines for p in engine.module.parameters()]
    yield STUDENT, parameters
    yield STUDENT, _tensors([[vars(p).get("ds_tensor") for p in parameters], _named(KEPT_WEIGHTS, wrappers)])
    masters = [flat.key for t in trained for flat in t.flats]
    gradients = [p.grad for p in (*parameters, *masters)] + [vars(p).get("grad_accum") for p in parameters]
    yield GRADIENTS, _tensors([gradients, _named(KEPT_GRADIENTS, wrappers)])
    yield OPTIMIZER, _tensors([[t.tensors(flat) for t in trained for flat in t.flats], student.averages])
    yield BUFFERS, _tensors([teacher, student])
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    everything = [o for o in objects if type(o) in kinds]
    del objects
    yield ACTIVATIONS, _saved(everything)
    yield OTHERS, everything


def _named(names: tuple[str, ...], objects: list[dict[str, Any]]) -> list[Any]:
    return [attributes.get(name) for attributes in objects for name in names]


def _tensors(root: Any) -> Iterator[Tensor]:
    return (o for o in _behind(root) if isinstance(o, Tensor))


def _behind(root: Any) -> Iterator[Any]:
    """Yield `root` and all objects behind it, through containers, networks and engines; each once."""
    seen: dict[int, Any] = {}  # alive, so that no other gets its number
    waiting = [root]
    while waiting:
        o = waiting.pop()
        if id(o) in seen or isinstance(o, type):
            continue
        if isinstance(o, CONTAINERS) or type(o).__module__.partition(".")[0] in PACKAGES:
            seen[id(o)] = o
            yield o
            waiting += gc.get_referents(o)


def _saved(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that autograd keeps, unpacked by nobody: that would recompute checkpointed blocks."""
    seen: set[Any] = set()
    waiting: list[Any] = []
    for t in tensors:
        with suppress(RuntimeError):  # a view whose base was changed in place
            if t.grad_fn is not None:
                waiting.append(t.grad_fn)
                yield t
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        for name in (name for name in dir(node) if name.startswith("_raw_saved")):
            with suppress(RuntimeError):  # it was freed
                kept = getattr(node, name)
                parts = kept if isinstance(kept, tuple | list) else [kept]
                yield from (data for part in parts if isinstance(data := part.data, Tensor))
        yield from _tensors(getattr(node, "__dict__", None))
