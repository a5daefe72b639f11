"""Opening a pipeline folder, and weights that are bit-equal to diffusers' own loader, whatever engine holds them."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from small_wan import transformer
from torch import Tensor, nn

from wandistiller import deepspeed_json, distributed, wan
from wandistiller.batch import Batch, Expert
from wandistiller.config import SHIPPED, read_json
from wandistiller.loading import load_sharded, load_whole
from wandistiller.noise import keyed_normal
from wandistiller.problems import ConfigError
from wandistiller.student import Student
from wandistiller.teacher import Guidance, GuidedTeacher, LocalTeacher, OwnerTeacher, build_teacher
from wandistiller.weights import WeightReader

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
ZERO_INFERENCE = SHIPPED / "teacher" / "zero_inference_cpu.json"
BF16 = {"bf16": {"enabled": True}}


def edit(file: Path, **changes: object) -> Path:
    """Change keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return file


def refused(folder: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        wan.open_wan(str(folder))
    return "\n".join(caught.value.problems)


def config_of(folder: Path, expert: Expert = Expert.HIGH_NOISE) -> dict:
    return wan.open_wan(str(folder)).configs[expert]


@cache
def by_diffusers(folder: Path, dtype: torch.dtype) -> WanTransformer3DModel:
    return WanTransformer3DModel.from_pretrained(folder, torch_dtype=dtype).eval().requires_grad_(False)


def assert_bit_equal(model: nn.Module, expected: nn.Module) -> None:
    """Parameters and buffers: names, dtypes, values."""
    for kind in ("named_parameters", "named_buffers"):
        found, wanted = (dict(getattr(m, kind)()) for m in (model, expected))
        assert found.keys() == wanted.keys()
        assert [n for n in wanted if found[n].dtype is not wanted[n].dtype] == []
        assert [n for n in wanted if not torch.equal(found[n].cpu(), wanted[n])] == []


def some_batch(expert: Expert, frames: int = 2) -> Batch:
    x0, noise, x_t = (keyed_normal((2, 16, frames, 4, 6), "wan", i) for i in range(3))
    return Batch(x0, noise, x_t, torch.tensor([0.3, 0.95]), keyed_normal((2, 512, 32), "text"), expert)


def test_a_two_expert_folder_has_both_configs_and_their_boundary(wan2: Path) -> None:
    folder = wan.open_wan(str(wan2))
    assert (list(folder.configs), folder.boundary, folder.shift) == (list(Expert), 0.875, 3.0)


def test_a_one_expert_folder_has_no_boundary(wan1: Path) -> None:
    folder = wan.open_wan(str(wan1))
    assert (list(folder.configs), folder.boundary) == ([Expert.HIGH_NOISE], None)


def test_a_boundary_without_a_second_transformer_means_one_expert(wan1: Path, copy_of: Callable[..., Path]) -> None:
    folder = copy_of(wan1)
    edit(folder / "model_index.json", boundary_ratio=0.875)  # as some converted Wan2.1 have it
    assert wan.open_wan(str(folder)).boundary is None


def test_two_transformers_without_a_boundary_are_refused(wan2: Path, copy_of: Callable[..., Path]) -> None:
    folder = copy_of(wan2)
    edit(folder / "model_index.json", boundary_ratio=None)
    assert "`boundary_ratio` is null" in refused(folder)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert "Give a complete diffusers Wan pipeline folder" in refused(tmp_path / "none")


@pytest.mark.parametrize("name", ["./none", "../none", "none", "no-one/no-model"])
def test_a_relative_name_that_is_not_there_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(name).startswith(name)


def test_a_folder_without_model_index_is_refused(tmp_path: Path) -> None:
    assert "model_index.json" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_broken_model_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model_index.json").write_text(text)
    assert "model_index.json" in refused(tmp_path)


def test_another_pipeline_is_refused(wan1: Path, copy_of: Callable[..., Path]) -> None:
    folder = copy_of(wan1)
    edit(folder / "model_index.json", _class_name="WanImageToVideoPipeline")
    assert '`_class_name` is "WanImageToVideoPipeline"' in refused(folder)


@pytest.mark.parametrize("part", ["transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json"])
def test_a_missing_part_is_named(wan1: Path, copy_of: Callable[..., Path], part: str) -> None:
    folder = copy_of(wan1)
    (folder / part).unlink()
    assert part in refused(folder)


@pytest.mark.parametrize(("key", "shift"), [("flow_shift", 5.0), ("shift", 7.0)])
def test_the_shift_is_the_scheduler_s(wan1: Path, copy_of: Callable[..., Path], key: str, shift: float) -> None:
    folder = copy_of(wan1)
    file = folder / "scheduler" / "scheduler_config.json"
    kept = {k: v for k, v in json.loads(file.read_text()).items() if k != "flow_shift"}
    file.write_text(json.dumps(kept | {key: shift}))
    assert wan.open_wan(str(folder)).shift == shift


def test_latents_are_8_times_smaller_and_4_frames_are_one(wan1: Path) -> None:
    folder = wan.open_wan(str(wan1))
    assert folder.latent_shape(480, 832, 81) == (16, 21, 60, 104)
    assert folder.latent_shape(64, 64, 1) == (16, 1, 8, 8)


@pytest.mark.parametrize("size", [(480, 832, 1), (16, 16, 5), (720, 1024, 81)])
def test_a_size_of_whole_patches_has_no_problem(wan1: Path, size: tuple[int, int, int]) -> None:
    assert wan.open_wan(str(wan1)).size_problems(*size) == []


@pytest.mark.parametrize(
    ("size", "said"),
    [((481, 832, 1), "`height` is 481. This teacher needs a multiple of 16, e.g. 480."),
     ((480, 8, 1), "`width` is 8. This teacher needs a multiple of 16, e.g. 16."),
     ((480, 832, 80), "`num_frames` is 80. Write 4k + 1, e.g. 77."),
     ((480, 832, 2), "`num_frames` is 2. Write 4k + 1, e.g. 1.")],
)  # fmt: skip
def test_a_size_that_does_not_divide_names_one_that_does(wan1: Path, size: tuple[int, int, int], said: str) -> None:
    assert wan.open_wan(str(wan1)).size_problems(*size) == [f"{wan1}: {said}"]


def test_parameters_are_counted_without_memory_for_them(wan1: Path) -> None:
    expected = sum(p.numel() for p in by_diffusers(wan1 / "transformer", torch.float32).parameters())
    assert wan.count_parameters(config_of(wan1)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("expert", list(Expert))
def test_load_whole_is_bitwise_diffusers_from_pretrained(wan2: Path, expert: Expert, dtype: torch.dtype) -> None:
    model = load_whole(WeightReader(wan2 / expert.value), config_of(wan2, expert), dtype, CPU)
    assert_bit_equal(model, by_diffusers(wan2 / expert.value, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sharded_safetensors_are_read_as_diffusers_reads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    transformer(3).save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = json.loads((tmp_path / "config.json").read_text())
    assert_bit_equal(load_whole(WeightReader(tmp_path), config, dtype, CPU), by_diffusers(tmp_path, dtype))


def test_a_skeleton_has_no_memory_but_real_rope_tables(wan1: Path) -> None:
    model, whole = wan.skeleton(config_of(wan1)), by_diffusers(wan1 / "transformer", torch.float32)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert torch.equal(model.rope.freqs_cos, whole.rope.freqs_cos) and torch.equal(
        model.rope.freqs_sin, whole.rope.freqs_sin
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_velocity_is_the_model_s_answer_at_time_1000_sigma(wan1: Path, dtype: torch.dtype) -> None:
    model, b = by_diffusers(wan1 / "transformer", dtype), some_batch(Expert.HIGH_NOISE)
    direct = model(b.x_t_BCFHW.to(dtype), torch.tensor([300.0, 950.0]), b.text_BLD.to(dtype), return_dict=False)[0]
    v_BCFHW = wan.velocity(model, b.x_t_BCFHW, b.sigma_B, b.text_BLD)
    assert v_BCFHW.dtype is torch.float32 and torch.equal(v_BCFHW, direct.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("one_rank")
def test_load_sharded_is_bitwise_diffusers_from_pretrained(wan2: Path, dtype: torch.dtype) -> None:
    ds = deepspeed_json.teacher_engine(*deepspeed_json.load(str(ZERO_INFERENCE)))
    ds.pop("bf16")
    folder = wan2 / "transformer_2"
    model = load_sharded(WeightReader(folder), config_of(wan2, Expert.LOW_NOISE), dtype, ds, distributed.device())
    assert {p.numel() for p in model.parameters()} == {0}  # all of it is partitioned
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        assert_bit_equal(model, by_diffusers(folder, dtype))


TEACHERS = {
    "zero_inference_cpu.json": json.loads(ZERO_INFERENCE.read_text()),
    "replicated bf16": BF16,
    "replicated bf16, buffers too": BF16 | {"data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": []}},
    "replicated float32": {},
    "sharded float32": {"zero_optimization": {"stage": 3}},
    "host_cpu bf16": BF16 | {"wandistiller": {"placement": "host_cpu"}},
    "owner bf16": BF16 | {"wandistiller": {"placement": "owner"}},
    "device_map bf16": BF16 | {"wandistiller": {"placement": "device_map"}},
    "device_map bf16, what is over a limit on disk": BF16 | {"wandistiller": {
        "placement": "device_map", "max_memory": {"cpu": "600KiB"}}},
    "device_map bf16, most on disk": BF16 | {"wandistiller": {"placement": "device_map", "device_map": {
        "blocks.1-": "disk", "*": "cpu"}}},
}  # fmt: skip


def module_of(teacher: Any, expert: Expert = Expert.HIGH_NOISE) -> nn.Module:
    return (teacher.inner if isinstance(teacher, OwnerTeacher) else teacher).experts[expert]


@pytest.mark.parametrize("ds", TEACHERS.values(), ids=TEACHERS)
@pytest.mark.usefixtures("one_rank")
def test_every_teacher_engine_answers_bitwise_as_diffusers_models(wan2: Path, ds: dict) -> None:
    teacher = build_teacher(wan.open_wan(str(wan2)), deepspeed_json.teacher_engine("x.json", ds))
    dtype = getattr(torch, deepspeed_json.dtype_name(ds))
    for expert in (*Expert, Expert.HIGH_NOISE):
        b = some_batch(expert)
        expected = wan.velocity(by_diffusers(wan2 / expert.value, dtype), b.x_t_BCFHW, b.sigma_B, b.text_BLD)
        assert torch.equal(teacher.velocity(b), expected)


@pytest.mark.usefixtures("one_rank")
def test_only_the_expert_that_is_asked_is_brought_in(wan2: Path) -> None:
    ds = read_json(ZERO_INFERENCE) | {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    teacher = build_teacher(wan.open_wan(str(wan2)), deepspeed_json.teacher_engine("x.json", ds))
    here = {expert: set() for expert in Expert}
    for expert in Expert:
        for _, module in module_of(teacher, expert).named_modules():
            module.register_forward_pre_hook(lambda m, args, expert=expert: here[expert].update(
                other for other in Expert if any(p.numel() for p in module_of(teacher, other).parameters())))  # fmt: skip
    for expert in (*Expert, *Expert):
        teacher.velocity(some_batch(expert))
    assert here == {expert: {expert} for expert in Expert}


@pytest.mark.usefixtures("one_rank")
def test_a_one_expert_teacher_serves_both_names_with_one_module(wan1: Path) -> None:
    teacher = build_teacher(wan.open_wan(str(wan1)), deepspeed_json.teacher_engine("x.json", {}))
    assert teacher.experts[Expert.HIGH_NOISE] is teacher.experts[Expert.LOW_NOISE]


def tables(model: nn.Module) -> list[Tensor]:
    return [model.rope.freqs_cos.cpu(), model.rope.freqs_sin.cpu()]


@pytest.mark.parametrize("ds", TEACHERS.values(), ids=TEACHERS)
@pytest.mark.usefixtures("one_rank")
def test_rope_tables_survive_every_teacher_engine(wan1: Path, ds: dict) -> None:
    teacher = build_teacher(wan.open_wan(str(wan1)), deepspeed_json.teacher_engine("x.json", ds))
    expected = tables(by_diffusers(wan1 / "transformer", torch.float32))
    for found, wanted in zip(tables(module_of(teacher)), expected, strict=True):
        assert found.dtype is torch.float32 and torch.equal(found, wanted)


BUFFERS_BF16 = {"data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": []}}


@pytest.mark.parametrize("precision", [BF16, BF16 | BUFFERS_BF16, {}], ids=["bf16", "bf16 with its buffers", "float32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.usefixtures("one_rank")
def test_rope_tables_survive_every_engine(wan1: Path, stage: int, precision: dict) -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
    ds = {"train_batch_size": 1, "optimizer": adam, "zero_optimization": {"stage": stage}, **precision}
    student = Student({Expert.HIGH_NOISE: transformer(1)}, deepspeed_json.student_engine("x.json", ds, 1)[0])
    expected = tables(by_diffusers(wan1 / "transformer", torch.float32))
    for found, wanted in zip(tables(student.engine(Expert.LOW_NOISE).module), expected, strict=True):
        assert found.dtype is torch.float32 and torch.equal(found, wanted)


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_guidance_blends_text_and_null_branch(wan1: Path, scale: float) -> None:
    model, b, null_LD = (
        by_diffusers(wan1 / "transformer", torch.float32),
        some_batch(Expert.HIGH_NOISE),
        keyed_normal((512, 32), "null"),
    )
    inner = LocalTeacher(dict.fromkeys(Expert, model))
    null = b.at(text_BLD=null_LD.expand_as(b.text_BLD))
    expected = scale * inner.velocity(b) + (1 - scale) * inner.velocity(null)
    torch.testing.assert_close(
        GuidedTeacher(inner, Guidance(null_LD, dict.fromkeys(Expert, scale))).velocity(b), expected, rtol=0, atol=1e-4
    )


def test_each_expert_has_its_own_guidance_scale(wan1: Path) -> None:
    inner, null_LD = (
        LocalTeacher(dict.fromkeys(Expert, by_diffusers(wan1 / "transformer", torch.float32))),
        torch.zeros(512, 32),
    )
    both = GuidedTeacher(inner, Guidance(null_LD, {Expert.HIGH_NOISE: 4.0, Expert.LOW_NOISE: 3.0}))
    for expert, scale in both.guidance.scales.items():
        only = GuidedTeacher(inner, Guidance(null_LD, dict.fromkeys(Expert, scale)))
        assert torch.equal(both.velocity(some_batch(expert)), only.velocity(some_batch(expert)))


def test_what_a_config_leaves_to_diffusers_is_diffusers_default(wan1: Path, copy_of: Callable[..., Path]) -> None:
    folder = copy_of(wan1)
    for part, keys in (("transformer", ["cross_attn_norm"]), ("vae", ["latents_mean", "latents_std"])):
        file = folder / part / "config.json"
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k not in keys}))
    found = wan.open_wan(str(folder))
    assert found.config["cross_attn_norm"] is True
    assert found.vae["latents_mean"] == AutoencoderKLWan.load_config(wan1 / "vae")["latents_mean"]
