"""The memory behind the tensors of this process."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from wandistiller.network import activation_memory


def _memory(t: torch.Tensor) -> tuple[int, int]:
    """Address and bytes; zeros of a tensor that stands for others, as a weight in few bits does."""
    storage = t.untyped_storage()
    try:
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # torch 2.13: an invalid Python storage
        return 0, 0


def count_no_shells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `Live` count what tensors on the meta device take: nothing."""
    storages = activation_memory.storages
    in_memory = lambda tensors: [s for s in storages(tensors) if s.device.type != "meta"]  # noqa: E731
    monkeypatch.setattr(activation_memory, "storages", in_memory)


def tensor_bytes() -> int:
    gc.collect()
    kinds = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    tensors = (o for o in kinds if not isinstance(o, FakeTensor) and o.device.type != "meta")
    return sum(dict(map(_memory, tensors)).values())
