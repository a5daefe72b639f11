"""Bytes of teacher and student against closed forms and really loaded ones."""

from math import ceil, log2
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from recipes import ADAM
from small_wan import transformer
from tensors import tensor_bytes
from torch import nn

from wandistiller import distributed, planner
from wandistiller.batch import Expert
from wandistiller.config import SHIPPED
from wandistiller.deepspeed_json import student_engine, teacher_engine
from wandistiller.loading import load_sharded, load_shared, load_whole
from wandistiller.machine import GIB, placed
from wandistiller.memory import AVERAGE, DEFAULTS, Bytes, Network, numels, start_bytes, student_parts, teacher_bytes
from wandistiller.student import Student
from wandistiller.teacher import build_teacher
from wandistiller.tuning import tune
from wandistiller.wan import WanFolder, open_wan, velocity
from wandistiller.weights import WeightReader

CPU = torch.device("cpu")
BF16 = {"bf16": {"enabled": True}}
SMALL, LARGE, FIVE, TWO = "1.3B", "14B", "5B", "A14B"
P = 14_288_491_584  # parameters of Wan 14B; all of its tensors have even sizes
WIDTH, LAYERS = 5120, 40
IN_FLOAT32 = 256 * WIDTH + WIDTH + WIDTH**2 + WIDTH + 2 * WIDTH + LAYERS * (6 * WIDTH + 2 * WIDTH)
"""What diffusers keeps in float32: the time embedder, the scale-shift tables, each block's norm2."""
WHOLE = 2 * P + 2 * IN_FLOAT32  # bytes in bf16
UP_TO_10000 = LAYERS * (13 * WIDTH * 2 + 2 * WIDTH * 4) + WIDTH * 2 + 2 * WIDTH * 4 + 2 * WIDTH * 2 + 64 * 2
"""Bytes of the 14B's tensors of at most 10,000 elements: per block 13 in bf16 and norm2's two, then the top's."""


def teacher(folder: WanFolder, name: str, ranks: int = 1, dtype: str = "bfloat16", **zero: Any) -> Bytes:
    return teacher_bytes(folder, teacher_json(name, ranks, dtype, **zero), ranks)


def teacher_json(name: str, ranks: int = 1, dtype: str = "bfloat16", **zero: Any) -> dict[str, Any]:
    ds = placed(name, dtype)
    return teacher_engine(name, ds | {"zero_optimization": ds["zero_optimization"] | zero} if zero else ds, ranks)


# The teacher, in closed forms


def test_a_replicated_14b_in_bf16_takes_what_diffusers_mixed_dtype_takes(wans: dict[str, WanFolder]) -> None:
    assert teacher(wans[LARGE], "replicated") == Bytes(device=WHOLE)
    assert f"{WHOLE / GIB:.2f}" == "26.67"


def test_a_replicated_14b_in_float32_takes_4_bytes_a_parameter(wans: dict[str, WanFolder]) -> None:
    assert teacher(wans[LARGE], "replicated", dtype="float32") == Bytes(device=4 * P)


def test_two_experts_take_twice_as_much(wans: dict[str, WanFolder]) -> None:
    assert teacher(wans[TWO], "replicated").device == 2 * WHOLE


def test_sharded_on_two_ranks_each_keeps_half_and_the_small_parameters(wans: dict[str, WanFolder]) -> None:
    assert teacher(wans[LARGE], "sharded", 2).device == WHOLE // 2 + UP_TO_10000


def test_sharded_on_three_ranks_padding_is_under_three_elements_a_parameter(wans: dict[str, WanFolder]) -> None:
    padding = 3 * (teacher(wans[LARGE], "sharded", 3).device - UP_TO_10000) - WHOLE
    assert 0 < padding < 3 * 4 * len(numels(wans[LARGE].config))


def test_sharded_on_one_rank_is_replicated(wans: dict[str, WanFolder]) -> None:
    assert teacher(wans[LARGE], "sharded") == teacher(wans[LARGE], "replicated")


@pytest.mark.parametrize("ranks", [1, 2])
def test_offloaded_to_cpu_the_parts_are_in_host_memory(wans: dict[str, WanFolder], ranks: int) -> None:
    there = teacher(wans[LARGE], "zero_inference_cpu", ranks)
    assert (there.host, there.device, there.disk) == (WHOLE // ranks, UP_TO_10000, 0)


def test_on_nvme_the_host_has_buffers_for_the_largest_part_and_what_is_not_swapped(wans: dict[str, WanFolder]) -> None:
    there = teacher(wans[LARGE], "zero_inference_nvme")
    largest = 2 * 6 * WIDTH * WIDTH  # time_proj
    under_1_mib = LAYERS * (13 * WIDTH + 13824) + 16 * 4 * WIDTH + WIDTH + 6 * WIDTH + 2 * WIDTH + 64 * WIDTH + 64
    kept = 4 * IN_FLOAT32 + 2 * under_1_mib
    assert (there.host, there.disk) == (8 * largest + kept, WHOLE - kept)


def test_each_expert_on_nvme_has_its_own_buffers(wans: dict[str, WanFolder]) -> None:
    one, two = (teacher(wans[name], "zero_inference_nvme") for name in (LARGE, TWO))
    assert (two.host, two.disk, two.live) == (2 * one.host, 2 * one.disk, one.live)


@pytest.mark.parametrize("ranks", [1, 4])
def test_one_copy_a_node_is_the_node_s(wans: dict[str, WanFolder], ranks: int) -> None:
    assert teacher(wans[LARGE], "host_cpu", ranks) == Bytes(node=WHOLE)


def test_an_owner_s_rank_takes_the_whole(wans: dict[str, WanFolder]) -> None:
    assert teacher(wans[LARGE], "owner", 4) == Bytes(device=WHOLE)


def test_what_comes_and_goes_in_a_call_is_at_least_the_largest_module_and_at_most_two_copies(wans: dict[str, WanFolder]) -> None:
    time_proj = 2 * (6 * WIDTH * WIDTH + 6 * WIDTH)
    assert time_proj <= teacher(wans[LARGE], "zero_inference_cpu").live < 2 * time_proj
    unbounded = teacher(wans[LARGE], "sharded", 2, stage3_max_live_parameters=10**12, stage3_prefetch_bucket_size=10**12)
    assert unbounded.live == 2 * (WHOLE - UP_TO_10000)


def test_auto_has_no_bytes_before_it_is_decided(wans: dict[str, WanFolder]) -> None:
    with pytest.raises(ValueError, match="choose it first"):
        teacher(wans[SMALL], "auto")


@pytest.mark.parametrize("name", sorted(f.stem for f in (SHIPPED / "teacher").glob("*.json") if f.stem != "auto"))
def test_every_shipped_teacher_json_takes_memory_somewhere(wans: dict[str, WanFolder], name: str) -> None:
    there = teacher(wans[SMALL], name, 2)
    assert there.device + 2 * there.host + there.node + 2 * there.disk > 10**9


def test_deepspeed_s_own_numbers_stand_in_for_what_a_json_leaves_out() -> None:
    theirs = {f.alias or name: getattr(DeepSpeedZeroConfig(), name) for name, f in DeepSpeedZeroConfig.model_fields.items()}
    assert DEFAULTS == {key: theirs[key] for key in DEFAULTS}


# The teacher, really loaded


def held(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["sharded", "zero_inference_cpu"])
def test_the_parts_of_a_loaded_teacher_have_the_bytes_that_were_said(
    one_rank: torch.device, wan2: Path, name: str, dtype: str
) -> None:
    folder, ds = open_wan(str(wan2)), teacher_json(name, dtype=dtype)
    found = 0
    for expert, config in folder.configs.items():
        reader = WeightReader(wan2 / expert.value)
        engine_ds = {k: v for k, v in ds.items() if k != "bf16"}
        model = load_sharded(reader, config, getattr(torch, dtype), engine_ds, one_rank)
        found += sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in model.parameters())
    said = teacher_bytes(folder, ds, 1)
    assert (said.host, said.device)[name == "sharded"] == found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_teacher_has_the_bytes_that_were_said(one_rank: torch.device, wan1: Path, dtype: str) -> None:
    folder, reader = open_wan(str(wan1)), WeightReader(wan1 / "transformer")
    whole = load_whole(reader, folder.config, getattr(torch, dtype), CPU)
    shared = load_shared(reader, folder.config, getattr(torch, dtype), distributed.node_peers())
    assert held(whole) == held(shared) == teacher(folder, "replicated", dtype=dtype).device
    assert held(shared) == teacher(folder, "host_cpu", dtype=dtype).node


def test_a_call_has_no_more_whole_parameters_at_once_than_was_said(one_rank: torch.device, wan1: Path) -> None:
    small, seen = 100, [0]
    ds = teacher_json("zero_inference_cpu", stage3_max_live_parameters=5000, stage3_prefetch_bucket_size=2000,
                      stage3_param_persistence_threshold=small)  # fmt: skip
    folder = open_wan(str(wan1))
    model = build_teacher(folder, ds).experts[Expert.HIGH_NOISE]

    def count(*_: object) -> None:
        there = [p for p in model.parameters() if p.ds_numel > small and p.ds_status != ZeroParamStatus.NOT_AVAILABLE]
        seen.append(sum(p.ds_numel * p.element_size() for p in there))

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(count)
    for _ in range(3):  # from the second on, the order is known and parameters are fetched ahead
        inputs = torch.zeros(1, 16, 1, 4, 4), torch.ones(1), torch.zeros(1, 8, 32)
        with torch.no_grad():
            velocity(model, *(t.to(one_rank) for t in inputs))
    assert 0 < max(seen) <= teacher_bytes(folder, ds, 1).live < teacher_bytes(folder, ds, 1).host / 4


# The student


def student_json(stage: int, *, offload: str = "none", bf16: bool = True, accumulation: int = 1, **zero: Any) -> dict[str, Any]:
    ds = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation,
          "optimizer": ADAM | {"params": {"lr": 1e-3, "torch_adam": True}}, "zero_force_ds_cpu_optimizer": False,
          "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **zero}}  # fmt: skip
    if offload != "none":
        ds["zero_optimization"]["offload_optimizer"] = {"device": offload}
    return ds | (BF16 if bf16 else {})


def student(folder: WanFolder, ds: dict[str, Any], ranks: int = 1, experts: int = 1, accelerator: bool = False) -> Bytes:
    checked, _ = student_engine("s.json", ds, ranks)
    return sum(student_parts(Network(numels(folder.config)), experts, checked, ranks, accelerator=accelerator).values(), Bytes())


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "float32"])
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), *((s, home) for s in (1, 2, 3) for home in ("none", "cpu"))])
def test_a_student_s_engine_keeps_the_bytes_that_were_said(
    one_rank: torch.device, stage: int, offload: str, bf16: bool
) -> None:
    sizes = {"num_attention_heads": 4, "attention_head_dim": 64, "ffn_dim": 512}
    ds, _ = student_engine("s.json", student_json(stage, offload=offload, bf16=bf16), 1)
    before = tensor_bytes()
    made = Student({Expert.HIGH_NOISE: transformer(0, 2, **sizes)}, ds)
    engine = made.engine(Expert.HIGH_NOISE)
    inputs = torch.zeros(1, 16, 1, 4, 4), torch.ones(1), torch.zeros(1, 8, 32)
    loss = velocity(engine, *(t.to(one_rank) for t in inputs)).square().mean()
    engine.backward(loss)
    engine.step()
    del loss
    said = sum(student_parts(Network(numels(dict(engine.module.config))), 1, ds, 1, accelerator=False).values(), Bytes())
    assert tensor_bytes() - before == pytest.approx(said.device + said.host, rel=0.01)


@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (2, "none"), (2, "cpu"), (3, "cpu")])
@pytest.mark.parametrize("tuned", ["frozen", "lora"])
def test_frozen_weights_have_no_optimizer_and_an_average_takes_4_bytes(
    one_rank: torch.device, stage: int, offload: str, tuned: str
) -> None:
    frozen, lora = (["blocks.0", "ffn"], None) if tuned == "frozen" else (None, {"rank": 4, "targets": ["to_q", "ffn"]})
    ds, _ = student_engine("s.json", student_json(stage, offload=offload), 1)
    model = transformer(0, 2, num_attention_heads=4, attention_head_dim=64, ffn_dim=512)
    config, before = dict(model.config), tensor_bytes()
    model = model.requires_grad_(True)
    tune(model, frozen, lora, seed=0)
    sizes = [{n: p.numel() for n, p in model.named_parameters() if p.requires_grad is trained} for trained in (True, False)]
    assert planner._network(config, frozen, lora, (), 256) == Network(*sizes)
    before -= sum(p.nbytes for p in model.parameters())  # of a network that the engine takes over
    made = Student({Expert.HIGH_NOISE: model}, ds, ema=0.9)
    engine = made.engine(Expert.HIGH_NOISE)
    inputs = torch.zeros(1, 16, 1, 4, 4), torch.ones(1), torch.zeros(1, 8, 32)
    engine.backward(velocity(engine, *(t.to(one_rank) for t in inputs)).square().mean())
    engine.step()
    parts = student_parts(Network(*sizes), 1, ds, 1, accelerator=False, ema=True)
    assert parts[AVERAGE].device + parts[AVERAGE].host == 4 * sum(sizes[0].values())
    said = sum(parts.values(), Bytes())
    assert tensor_bytes() - before == pytest.approx(said.device + said.host, rel=0.02)


@pytest.mark.parametrize(("stage", "kept"), [(1, 2 * P + 12 * P // 2), (2, 2 * P + 12 * P // 2), (3, 16 * P // 2 + 2 * 1000)])
def test_without_offloading_a_student_on_two_ranks_keeps(wans: dict[str, WanFolder], stage: int, kept: int) -> None:
    assert student(wans[LARGE], student_json(stage, stage3_param_persistence_threshold=0), 2).device == kept  # 3: and a bucket


@pytest.mark.parametrize(("bf16", "each"), [(True, 4), (False, 0)])
def test_only_below_float32_stage_0_copies_its_gradients(wans: dict[str, WanFolder], *, bf16: bool, each: int) -> None:
    assert planner.cast_bytes(Network(numels(wans[LARGE].config)), student_json(0, bf16=bf16)) == each * P


def test_zero_2_s_own_gradients_are_there_three_times_in_a_step(wans: dict[str, WanFolder]) -> None:
    assert student(wans[LARGE], student_json(2), 4).live == (2 + 2 + 4) * P // 4


def test_zero_1_keeps_all_gradients_until_the_step(wans: dict[str, WanFolder]) -> None:
    assert student(wans[LARGE], student_json(1, accumulation=4), 8).live == 2 * P + 2 * 1000


def test_zero_2_offloaded_leaves_the_weights_and_a_buffer_on_the_device(wans: dict[str, WanFolder]) -> None:
    there = student(wans[LARGE], student_json(2, offload="cpu", accumulation=4), 2)
    largest = 2 * 6 * WIDTH * WIDTH
    assert (there.device, there.host) == (2 * P + largest, (4 + 8 + 4 + 2 + 2) * P // 2 + largest)


def test_zero_3_offloaded_leaves_a_part_of_the_weights_on_the_device(wans: dict[str, WanFolder]) -> None:
    there = student(wans[LARGE], student_json(3, offload="cpu", stage3_param_persistence_threshold=0), 2)
    assert (there.device, there.host) == (2 * P // 2 + 2 * 1000, (4 + 8 + 4 + 2) * P // 2)


def test_zero_3_with_all_offloaded_leaves_only_the_bucket(wans: dict[str, WanFolder]) -> None:
    ds = student_json(3, offload="cpu", stage3_param_persistence_threshold=0, offload_param={"device": "cpu"})
    there = student(wans[LARGE], ds, 2)
    assert (there.device, there.host) == (2 * 1000, (4 + 8 + 4 + 2 + 2) * P // 2)


def test_zero_3_holds_all_weights_in_the_backward_pass_unless_blocks_are_computed_anew(wans: dict[str, WanFolder]) -> None:
    ds = student_json(3, offload="cpu", stage3_max_live_parameters=0, stage3_max_reuse_distance=0)
    anew = ds | {"activation_checkpointing": {"partition_activations": False}}
    assert student(wans[LARGE], ds, 2).live - student(wans[LARGE], anew, 2).live > 2 * P * 0.9


def test_large_page_locked_memory_takes_what_it_needs(wans: dict[str, WanFolder]) -> None:
    free, locked = (student(wans[LARGE], student_json(2, offload="cpu"), 2, accelerator=gpu) for gpu in (False, True))
    assert locked.host == free.host and free.pinned == 0
    assert locked.pinned == free.host - 8 * P // 2  # all but the optimizer's moments


def test_small_page_locked_memory_comes_in_powers_of_two() -> None:
    config = dict(transformer(0, 1).config)
    sizes = numels(config).values()
    part = -(-sum(sizes) // 2) * 2
    pieces = (2 * part, 4 * part, 4 * part, 2 * max(sizes))  # weights, masters, gradients, a tensor on its way
    assert max(pieces) < 2**20
    ds, _ = student_engine("s.json", student_json(2, offload="cpu"), 1)
    pinned = sum(p.pinned for p in student_parts(Network(numels(config)), 1, ds, 1, accelerator=True).values())
    assert pinned == sum(2 ** ceil(log2(n)) for n in pieces)


def test_a_rank_starts_from_all_weights_in_float32(wans: dict[str, WanFolder]) -> None:
    assert start_bytes(wans[SMALL].config, 2) == 2 * 4 * 1_418_996_800


def test_two_engines_keep_twice_as_much_but_work_one_at_a_time(wans: dict[str, WanFolder]) -> None:
    one, two = (student(wans[TWO], student_json(2), 2, experts) for experts in (1, 2))
    assert (two.device, two.live) == (2 * one.device, one.live)
