"""GPUs that do not start, or that are too few: one message that says what to do."""

import pytest
import torch
import torch.distributed as dist

from wandistiller.distributed import collectives, device
from wandistiller.utils.errors import ConfigError


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int, error: str = "") -> None:
    def start(*_: int) -> None:
        if error:
            raise RuntimeError(f"{error}\nmore")

    monkeypatch.setattr(device, "kind", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    for name in ("set_device_index", "get_memory_info"):
        monkeypatch.setattr(torch.accelerator, name, start)


def test_a_driver_that_is_too_old_is_named_with_torch_s_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with_gpus(monkeypatch, 1, "The NVIDIA driver on your system is too old (found version 12040).")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError) as raised:
        device.take_gpu()
    (text,) = raised.value.problems
    assert text.startswith(
        "CUDA does not start: The NVIDIA driver on your system is too old (found version 12040)"
    )
    assert "is built for CUDA 13.0. Update the driver" in text and "more" not in text


def test_more_ranks_than_gpus_on_a_node_are_refused_before_cuda_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpus(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    device.take_gpu()
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="Rank 2 of this node has no GPU of its own: 2 can be seen"):
        device.take_gpu()


def test_a_rank_that_could_not_join_the_others_does_not_join_again_to_say_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def refuse() -> None:
        tried.append(1)
        raise ConfigError("too few GPUs")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(collectives, "take_gpu", refuse)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # other tests of this process have joined
    with pytest.raises(ConfigError, match="too few GPUs"), collectives.raise_on_all_ranks():
        collectives.on_any_rank(True)
    assert len(tried) == 1  # the others have left, and a second rendezvous would wait for them for ever
