"""Memory of the teacher against closed forms and loaded models."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from recipes import recipe
from safetensors.torch import load_file, save_file
from shipped import placement
from slow_cases import slow_but
from states import state
from styles import style
from tensors import count_no_shells
from torch import nn
from trainers import job_of

from wandistiller.distributed import collectives
from wandistiller.engine.zero_memory import Bytes
from wandistiller.experts import Expert
from wandistiller.network.activation_memory import Live
from wandistiller.network.weight_reader import WeightReader
from wandistiller.planner.teacher_memory import added_parts, teacher_bytes
from wandistiller.teacher.build import build_teacher
from wandistiller.teacher.loading import load_sharded, load_shared, load_whole
from wandistiller.teacher.strategies import teacher_jsons
from wandistiller.utils.files import TINY
from wandistiller.utils.system_memory import GIB
from wandistiller.wan.added_lora import read_added
from wandistiller.wan.folder import WanFolder
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.transformer import velocity

CPU = torch.device("cpu")
SMALL, LARGE, TWO = "1.3B", "14B", "A14B"
P = 14_288_491_584  # parameters of Wan 14B; all of its tensors have even sizes
WIDTH, LAYERS = 5120, 40
IN_FLOAT32 = 256 * WIDTH + WIDTH + WIDTH**2 + WIDTH + 2 * WIDTH + LAYERS * (6 * WIDTH + 2 * WIDTH)
"""Elements that diffusers keeps in float32: the time embedder, the scale-shift tables, each block's norm2."""
WHOLE = 2 * P + 2 * IN_FLOAT32  # bytes in bf16
UP_TO_10000 = LAYERS * (13 * WIDTH * 2 + 2 * WIDTH * 4) + WIDTH * 2 + 2 * WIDTH * 4 + 2 * WIDTH * 2 + 64 * 2
"""Bytes of the 14B's tensors of at most 10,000 elements: per block 13 in bf16 and norm2's two, others."""


def teacher(folder: WanFolder, name: str, ranks: int = 1, dtype: str = "bfloat16", **zero: Any) -> Bytes:
    return teacher_bytes(folder, placement(name, dtype, zero=zero), ranks)


# The teacher, in closed forms


@pytest.mark.parametrize(
    ("wan", "name", "ranks", "dtype", "expected"),
    [
        (LARGE, "replicated", 1, "bfloat16", Bytes(device=WHOLE)),  # diffusers' mixed precision, 26.67 GiB
        (LARGE, "replicated", 1, "float32", Bytes(device=4 * P)),
        (TWO, "replicated", 1, "bfloat16", Bytes(device=2 * WHOLE)),
        (LARGE, "sharded", 1, "bfloat16", Bytes(device=WHOLE)),
        (LARGE, "owner", 4, "bfloat16", Bytes(device=WHOLE)),
        (LARGE, "host_cpu", 1, "bfloat16", Bytes(node=WHOLE)),
        (LARGE, "host_cpu", 4, "bfloat16", Bytes(node=WHOLE)),
    ],
)
def test_a_whole_copy_takes_its_weights_on_each_rank_or_once_a_node(
    wans: dict[str, WanFolder], wan: str, name: str, ranks: int, dtype: str, expected: Bytes
) -> None:
    assert teacher(wans[wan], name, ranks, dtype) == expected


def test_sharded_on_two_ranks_each_keeps_half_and_the_small_parameters(wans: dict[str, WanFolder]) -> None:
    assert teacher(wans[LARGE], "sharded", 2).device == WHOLE // 2 + UP_TO_10000


def test_on_three_ranks_padding_is_under_three_elements_a_parameter(wans: dict[str, WanFolder]) -> None:
    padding = 3 * (teacher(wans[LARGE], "sharded", 3).device - UP_TO_10000) - WHOLE
    assert 0 < padding < 3 * 4 * len(wans[LARGE].config.numels)


@pytest.mark.parametrize("ranks", [1, 2])
def test_offloaded_to_cpu_the_parts_are_in_host_memory(wans: dict[str, WanFolder], ranks: int) -> None:
    memory = teacher(wans[LARGE], "zero_inference_cpu", ranks)
    assert (memory.host, memory.device, memory.disk) == (WHOLE // ranks, UP_TO_10000, 0)


def test_on_nvme_the_host_has_buffers_for_the_largest_part_and_what_is_not_swapped(
    wans: dict[str, WanFolder],
) -> None:
    memory = teacher(wans[LARGE], "zero_inference_nvme")
    largest = 2 * 6 * WIDTH * WIDTH  # time_proj
    under_1_mib = LAYERS * (13 * WIDTH + 13824) + (16 * 4 + 1 + 6 + 2 + 64) * WIDTH + 64
    kept = 4 * IN_FLOAT32 + 2 * under_1_mib
    assert (memory.host, memory.disk) == (8 * largest + kept, WHOLE - kept)


@pytest.mark.parametrize("ranks", [1, 4])
def test_from_its_files_each_rank_has_three_blocks_and_the_rest_and_a_node_no_copy(
    wans: dict[str, WanFolder], ranks: int
) -> None:
    one, two = (teacher(wans[name], "files", ranks) for name in (LARGE, TWO))
    blocks = teacher(wans[LARGE], "streamed").node
    assert one == Bytes(device=WHOLE - blocks + 3 * blocks // LAYERS)
    assert two == Bytes(device=2 * (WHOLE - blocks) + 3 * blocks // LAYERS)
    assert one.device < 2.5 * GIB


@pytest.mark.parametrize("ranks", [1, 4])
def test_streamed_a_node_has_the_blocks_and_a_rank_two_of_them_and_the_rest(
    wans: dict[str, WanFolder], ranks: int
) -> None:
    one, two = (teacher(wans[name], "streamed", ranks) for name in (LARGE, TWO))
    blocks, others = one.node, WHOLE - one.node
    assert one == Bytes(device=others + 2 * blocks // LAYERS, node=blocks)
    assert two == Bytes(device=2 * others + 2 * blocks // LAYERS, node=2 * blocks)
    assert 0.97 * WHOLE < blocks < WHOLE


def test_what_comes_and_goes_in_a_call_is_at_least_a_block_and_at_most_two_copies(
    wans: dict[str, WanFolder],
) -> None:
    matrices = 2 * (8 * WIDTH * WIDTH + 2 * WIDTH * 13824)
    assert matrices <= teacher(wans[LARGE], "zero_inference_cpu").transient < 1.1 * matrices
    limits = {"stage3_max_live_parameters": 10**12, "stage3_prefetch_bucket_size": 10**12}
    unbounded = teacher(wans[LARGE], "sharded", 2, **limits)
    assert unbounded.transient == 2 * (WHOLE - UP_TO_10000)


@pytest.mark.parametrize("name", [name for name in teacher_jsons() if name != "auto"])
def test_every_shipped_teacher_json_takes_memory_somewhere(wans: dict[str, WanFolder], name: str) -> None:
    memory = teacher(wans[SMALL], name, 2)
    assert memory.device + 2 * memory.host + memory.node + 2 * memory.disk > 3 * 10**8


# The teacher, really loaded


def held(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["sharded", "zero_inference_cpu"])
def test_the_parts_of_a_loaded_teacher_have_the_planned_bytes(
    one_rank: torch.device, wan2: Path, name: str, dtype: str
) -> None:
    folder, placed, loaded = open_wan(str(wan2)), placement(name, dtype), 0
    for expert, config in folder.configs.items():
        reader = WeightReader(wan2 / expert.value)
        own = placed.engine.without("bf16")
        model = load_sharded(reader, config, getattr(torch, dtype), own, one_rank)
        loaded += sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in model.parameters())
    planned = teacher_bytes(folder, placed, 1)
    assert (planned.host, planned.device)[name == "sharded"] == loaded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_teacher_has_the_planned_bytes(one_rank: torch.device, wan1: Path, dtype: str) -> None:
    folder, reader = open_wan(str(wan1)), WeightReader(wan1 / "transformer")
    whole = load_whole(reader, folder.config, getattr(torch, dtype), CPU)
    shared = load_shared(reader, folder.config, getattr(torch, dtype), collectives.node_peers())
    assert held(whole) == held(shared) == teacher(folder, "replicated", dtype=dtype).device
    assert held(shared) == teacher(folder, "host_cpu", dtype=dtype).node


def test_a_teacher_that_stays_in_its_files_holds_three_blocks_and_the_rest(
    one_rank: torch.device, wan1: Path
) -> None:
    folder, placed, seen = open_wan(str(wan1)), placement("files"), {}
    model = build_teacher(folder, placed).experts[Expert.HIGH_NOISE].module

    def see(*_: object) -> None:
        seen.update({p.data_ptr(): p.nbytes for p in model.parameters()})

    for block in model.blocks:
        block.register_forward_hook(see)
    inputs = torch.zeros(1, 16, 1, 4, 4), torch.ones(1), torch.zeros(1, 8, 32)
    with torch.no_grad():
        first, second = (velocity(model, state(*(t.to(one_rank) for t in inputs))) for _ in range(2))
    assert torch.equal(first, second) and len(model.blocks) > 3
    assert sum(seen.values()) == pytest.approx(teacher_bytes(folder, placed, 1).device, rel=0.02)


@pytest.mark.parametrize(
    ("name", "keeps"), slow_but([("streamed", False)], [("streamed", False), ("files", True)])
)
def test_loras_added_to_the_embedded_teacher_take_the_planned_memory_while_its_weights_are_read(
    one_rank: torch.device, tmp_path: Path, name: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And to the end where its files are read at each call; their factors, a weight and its change."""
    count_no_shells(monkeypatch)
    plain, file = open_wan("tiny"), style(TINY["tiny"], tmp_path / "style.safetensors", "to_q", "ffn")
    save_file({key: value.bfloat16() for key, value in load_file(file).items()}, file)
    added, most, now = [f"both={file}", f"low_noise={file}"], [], []
    for folder in (plain, plain.with_loras(read_added("recipe", "teacher_lora", added))):
        with Live() as live:
            built = build_teacher(folder, placement(name, "float32"))
            gc.collect()
            now.append(live.now)
        most.append(live.most)
        del built
    given = recipe(tmp_path, Path("tiny"), teacher_lora=added)
    factors, weight = (part.host for part in added_parts(job_of(given).folder).values())
    assert weight == 2 * 4 * 1024 * 128
    assert now[1] - now[0] == (factors if keeps else 0)
    assert most[1] - most[0] == pytest.approx(factors + weight, rel=0.05)


def test_a_call_has_no_more_whole_parameters_at_once_than_planned(one_rank: torch.device, wan1: Path) -> None:
    small, seen = 100, [0]
    zero = {
        "stage3_param_persistence_threshold": small,
        "stage3_max_live_parameters": 5000,
        "stage3_prefetch_bucket_size": 2000,
    }
    folder, placed = open_wan(str(wan1)), placement("zero_inference_cpu", zero=zero)
    model = build_teacher(folder, placed).experts[Expert.HIGH_NOISE].module

    def count(*_: object) -> None:
        whole = (p for p in model.parameters() if p.ds_status != ZeroParamStatus.NOT_AVAILABLE)
        seen.append(sum(p.ds_numel * p.element_size() for p in whole if p.ds_numel > small))

    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_hook(count)
    for _ in range(3):  # from the second on, the order is known and parameters are fetched ahead
        inputs = torch.zeros(1, 16, 1, 4, 4), torch.ones(1), torch.zeros(1, 8, 32)
        with torch.no_grad():
            velocity(model, state(*(t.to(one_rank) for t in inputs)))
    planned = teacher_bytes(folder, placed, 1)
    assert 0 < max(seen) <= planned.transient < planned.host / 4
