"""Lean loading: each rank reads the bytes that it keeps, and a node that shares a copy holds one."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from on_ranks import loading
from ranks import call, has_async_io
from shipped import placement
from small_wan import small_transformer
from tensors import count_no_shells

from wandistiller.distributed import device
from wandistiller.engine.workarounds import release_module_references
from wandistiller.experts import Expert
from wandistiller.network.activation_memory import Live
from wandistiller.network.weight_reader import CHUNK_BYTES, WeightReader
from wandistiller.teacher.base import local_modules
from wandistiller.teacher.build import build_teacher
from wandistiller.teacher.loading import ALIGNED, Arena, InitWithoutBroadcast, load_sharded, load_whole
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.transformer_config import TransformerConfig

MIB = 2**20
SHARES = {
    "replicated": [1, 1],
    "sharded": [0.5, 0.5],
    "zero_inference_cpu": [0.5, 0.5],
    "zero_inference_nvme": [0.5, 0.5],
    "host_cpu": [0.5, 0.5],
    "owner": [1, 0],
}
"""Placement -> the share of the weights that each of two ranks keeps."""


@pytest.fixture(scope="module")
def loaded(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = [n for n in (*SHARES, "streamed") if n != "zero_inference_nvme" or has_async_io()]
    first, second = call(loading.loaded, wide, tmp_path_factory.mktemp("loading"), names, ranks=2)
    return {n: {key: [first[n][key], second[n][key]] for key in first[n]} for n in names}


@pytest.fixture(scope="module")
def stored(wide: Path) -> int:
    """Bytes of both experts."""
    files = [*wide.glob("transformer/*.safetensors"), *wide.glob("transformer_2/*.safetensors")]
    return sum(file.stat().st_size for file in files)


@pytest.mark.parametrize(("name", "shares"), SHARES.items())
def test_a_rank_reads_what_it_keeps_and_no_more(
    loaded: dict[str, Any], stored: int, name: str, shares: list[float]
) -> None:
    if name not in loaded:
        pytest.skip("no libaio here")
    # headers, modules that Python imports at the first call, and the async_io library come on top
    assert loaded[name]["read"] == [pytest.approx(share * stored, abs=10 * MIB) for share in shares]


def test_only_host_cpu_and_streamed_have_one_copy_for_both_ranks(loaded: dict[str, Any]) -> None:
    shared = "host_cpu", "streamed"
    for name in shared:
        first, second = loaded[name]["shared"]
        assert first == second and len(first) == 2  # one block of memory per expert
    assert all(others["shared"] == [[], []] for name, others in loaded.items() if name not in shared)


def test_each_rank_reads_half_of_a_streamed_teacher_s_blocks_and_all_of_the_rest(
    loaded: dict[str, Any], stored: int
) -> None:
    first, second = loaded["streamed"]["read"]
    assert stored / 2 < first < stored and first == pytest.approx(second, abs=MIB)


def test_a_rank_never_holds_much_more_than_the_weights_in_their_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files in float32, which would be twice as much as weights in bf16."""
    small_transformer(0, 20, ffn_dim=512, num_attention_heads=4).save_pretrained(tmp_path)
    config = TransformerConfig.of(WanTransformer3DModel.load_config(tmp_path))
    reader = WeightReader(tmp_path)
    count_no_shells(monkeypatch)
    with Live() as live:
        model = load_whole(reader, config, torch.bfloat16, torch.device("cpu"))
    held, slack = sum(p.nbytes for p in model.parameters()), CHUNK_BYTES + 4 * 512 * 128
    assert held <= live.most < held + slack < 0.75 * sum(4 * p.numel() for p in model.parameters())


def test_an_arena_s_tensors_are_aligned_apart_and_zero() -> None:
    arena = Arena(4 * ALIGNED)
    likes = torch.empty(3), torch.empty(5, dtype=torch.bfloat16), torch.empty(32, dtype=torch.int16)
    first, second, third = (arena.take(like) for like in likes)
    first.fill_(1)
    assert second.count_nonzero() == 0 and second.dtype is torch.bfloat16
    assert [t.data_ptr() % ALIGNED for t in (first, second, third)] == [0, 0, 0]


def test_parameters_whose_parts_are_in_cpu_memory_are_gathered_on_the_accelerator(
    wan1: Path, one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed gathers a parameter that is its module's only one to where its empty shell is."""
    engine = placement("zero_inference_cpu", zero={"stage3_param_persistence_threshold": 0}).engine
    elsewhere = torch.device("meta")  # the one other kind of device that is everywhere
    local_device = property(lambda _: elsewhere, lambda *_: None)
    monkeypatch.setattr(InitWithoutBroadcast, "local_device", local_device, raising=False)
    folder = open_wan(str(wan1))
    model = load_sharded(
        WeightReader(folder.path / "transformer"), folder.config, torch.float32, engine, one_rank
    )
    assert {p.device for p in model.parameters()} == {elsewhere}
    assert {p.ds_tensor.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.usefixtures("one_rank")
def test_a_teacher_that_is_forgotten_leaves_no_network(wan1: Path) -> None:
    teacher = build_teacher(open_wan(str(wan1)), placement("zero_inference_cpu"))
    network = weakref.ref(teacher.experts[Expert.HIGH_NOISE].module)
    release_module_references(local_modules(teacher))
    del teacher
    gc.collect()
    assert network() is None


def test_pages_are_unlocked_after_a_wait_when_the_last_tensor_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    driver = SimpleNamespace(
        cudaHostRegister=lambda address, *_: calls.append(("lock", address)) or 0,
        cudaHostUnregister=lambda address: calls.append(("unlock", address)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(device, "kind", lambda: "cuda")
    arena = Arena(4 * ALIGNED)
    arena.lock()
    kept = arena.take(torch.ones(3))
    address = kept.data_ptr()
    del arena
    assert calls == [("lock", address)]
    del kept
    assert calls == [("lock", address), "wait", ("unlock", address)]
