"""Opening a pipeline folder, and weights that are bit-equal to diffusers' own loader in any engine."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import deepspeed
import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from engines import learner_of
from networks import network_of
from ranks import write_json
from shipped import placement
from slow_cases import slow_but
from small_wan import small_transformer
from states import state
from torch import nn

from wandistiller.batch import Batch, Conditioning
from wandistiller.distributed import collectives
from wandistiller.engine.ds_config import load, student_engine
from wandistiller.experts import Expert
from wandistiller.network.weight_reader import WeightReader
from wandistiller.teacher.base import Guidance, GuidedTeacher, LocalTeacher, local_networks
from wandistiller.teacher.build import build_teacher
from wandistiller.teacher.loading import load_sharded, load_whole
from wandistiller.teacher.teacher_json import read_placement
from wandistiller.utils.files import read_json
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan import pipeline, transformer
from wandistiller.wan.components import decoded, encoded
from wandistiller.wan.loaded_components import load_vae
from wandistiller.wan.transformer_config import TransformerConfig

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
BF16 = {"bf16": {"enabled": True}}


def config_of(folder: Path, expert: Expert = Expert.HIGH_NOISE) -> TransformerConfig:
    return pipeline.open_wan(str(folder)).configs[expert]


@cache
def by_diffusers(folder: Path, dtype: torch.dtype) -> WanTransformer3DModel:
    return WanTransformer3DModel.from_pretrained(folder, torch_dtype=dtype).eval().requires_grad_(False)


def assert_bit_equal(model: nn.Module, expected: nn.Module) -> None:
    """Parameters and buffers: names, dtypes, values."""
    for kind in ("named_parameters", "named_buffers"):
        tensors, originals = (dict(getattr(m, kind)()) for m in (model, expected))
        assert tensors.keys() == originals.keys()
        assert [n for n, t in originals.items() if tensors[n].dtype is not t.dtype] == []
        assert [n for n, t in originals.items() if not torch.equal(tensors[n].cpu(), t)] == []


def assert_tables(model: nn.Module, wan: Path) -> None:
    """RoPE's tables are those of diffusers, in float32 on any device."""
    rope = by_diffusers(wan / "transformer", torch.float32).rope
    for name in ("freqs_cos", "freqs_sin"):
        table, expected = getattr(model.rope, name).cpu(), getattr(rope, name)
        assert table.dtype is expected.dtype and torch.equal(table, expected)


def some_batch(expert: Expert, frames: int = 2) -> Batch:
    x0, noise, x_t = (keyed_normal((2, 16, frames, 4, 6), "wan", i) for i in range(3))
    return state(x_t, torch.tensor([0.3, 0.95]), keyed_normal((2, 512, 32), "text"), expert)


def test_a_two_expert_folder_has_both_configs_and_their_boundary_and_a_one_expert_folder_none(
    wan1: Path, wan2: Path
) -> None:
    one, two = pipeline.open_wan(str(wan1)), pipeline.open_wan(str(wan2))
    assert (list(two.configs), two.boundary, two.shift) == (list(Expert), 0.875, 3.0)
    assert (list(one.configs), one.boundary) == ([Expert.HIGH_NOISE], None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("expert", list(Expert))
def test_load_whole_is_bitwise_diffusers_from_pretrained(
    wan2: Path, expert: Expert, dtype: torch.dtype
) -> None:
    model = load_whole(WeightReader(wan2 / expert.value), config_of(wan2, expert), dtype, CPU)
    assert_bit_equal(model, by_diffusers(wan2 / expert.value, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sharded_safetensors_are_read_as_diffusers_reads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    small_transformer(3).save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = TransformerConfig.of(read_json(tmp_path / "config.json"))
    assert_bit_equal(load_whole(WeightReader(tmp_path), config, dtype, CPU), by_diffusers(tmp_path, dtype))


def test_a_meta_transformer_has_all_parameters_without_memory_and_real_rope_tables(wan1: Path) -> None:
    config, whole = config_of(wan1), by_diffusers(wan1 / "transformer", torch.float32)
    model = config.meta()
    assert config.numel == sum(p.numel() for p in whole.parameters())
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert_tables(model, wan1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_velocity_is_the_model_s_output_at_time_1000_sigma(wan1: Path, dtype: torch.dtype) -> None:
    model, b = by_diffusers(wan1 / "transformer", dtype), some_batch(Expert.HIGH_NOISE)
    direct = model(
        b.x_t_BCFHW.to(dtype), torch.tensor([300.0, 950.0]), b.conditioning.text_BLD.to(dtype)
    ).sample
    v_BCFHW = transformer.velocity(model, b)
    assert v_BCFHW.dtype is torch.float32 and torch.equal(v_BCFHW, direct.float())
    low_B = b.sigma_B.bfloat16()
    both = (transformer.velocity(model, replace(b, sigma_B=sigma_B)) for sigma_B in (low_B, low_B.float()))
    assert torch.equal(*both)  # 1000 sigma is computed in float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("one_rank")
def test_load_sharded_is_bitwise_diffusers_from_pretrained(wan2: Path, dtype: torch.dtype) -> None:
    engine = placement("zero_inference_cpu", "float32").engine
    folder, config = wan2 / "transformer_2", config_of(wan2, Expert.LOW_NOISE)
    model = load_sharded(WeightReader(folder), config, dtype, engine, collectives.device())
    assert {p.numel() for p in model.parameters()} == {0}  # all of it is partitioned
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        assert_bit_equal(model, by_diffusers(folder, dtype))


LIMITED = {"placement": "device_map", "max_memory": {"cpu": "600KiB"}}
ON_DISK = {"placement": "device_map", "device_map": {"blocks.1-": "disk", "*": "cpu"}}
TEACHERS = {
    "sharded float32": {"zero_optimization": {"stage": 3}},
    "device_map bf16, with a limit": BF16 | {"wandistiller": LIMITED},
    "device_map bf16, most on disk": BF16 | {"wandistiller": ON_DISK},
}
"""Engines that no shipped JSON has; test_placements.py has those."""


@pytest.mark.parametrize("ds", TEACHERS.values(), ids=TEACHERS)
@pytest.mark.usefixtures("one_rank")
def test_every_teacher_engine_predicts_bitwise_as_diffusers_models_with_whole_rope_tables(
    wan2: Path, ds: dict
) -> None:
    teacher = build_teacher(pipeline.open_wan(str(wan2)), read_placement(load(ds)))
    assert_tables(local_networks(teacher)[Expert.HIGH_NOISE].module, wan2)
    for expert in (*Expert, Expert.HIGH_NOISE):
        b, model = some_batch(expert), by_diffusers(wan2 / expert.value, load(ds).dtype)
        expected = transformer.velocity(model, b)
        assert torch.equal(teacher.velocity(b), expected)


@pytest.mark.usefixtures("one_rank")
def test_only_the_expert_of_the_batch_is_gathered(wan2: Path) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    placed = read_placement(load(BF16 | {"zero_optimization": zero}))
    teacher = build_teacher(pipeline.open_wan(str(wan2)), placed)
    gathered = {expert: set() for expert in Expert}

    def note(expert: Expert) -> None:
        networks = teacher.experts.items()
        gathered[expert] |= {
            e for e, network in networks if any(p.numel() for p in network.module.parameters())
        }

    for expert in Expert:
        for module in teacher.experts[expert].module.modules():
            module.register_forward_pre_hook(lambda *_, expert=expert: note(expert))
    for expert in (*Expert, *Expert):
        teacher.velocity(some_batch(expert))
    assert gathered == {expert: {expert} for expert in Expert}


@pytest.mark.usefixtures("one_rank")
def test_a_one_expert_teacher_serves_both_names_with_one_module(wan1: Path) -> None:
    teacher = build_teacher(pipeline.open_wan(str(wan1)), read_placement(load({})))
    assert teacher.experts[Expert.HIGH_NOISE] is teacher.experts[Expert.LOW_NOISE]


PRECISIONS = {"bf16": BF16, "float32": {}}


@pytest.mark.parametrize(
    ("stage", "precision"),
    slow_but([(2, "bf16"), (3, "bf16")], product((1, 2, 3), PRECISIONS)),
)
@pytest.mark.usefixtures("one_rank")
def test_rope_tables_survive_every_engine(wan1: Path, stage: int, precision: str) -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
    ds = {"train_batch_size": 1, "optimizer": adam, "zero_optimization": {"stage": stage}}
    ds |= PRECISIONS[precision]
    student = learner_of(small_transformer(1), student_engine(load(ds), 1))
    assert_tables(student.engine(Expert.LOW_NOISE).module, wan1)


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_guidance_blends_text_and_null_branch(wan1: Path, scale: float) -> None:
    b, null_LD = some_batch(Expert.HIGH_NOISE), keyed_normal((512, 32), "null")
    inner = LocalTeacher(dict.fromkeys(Expert, network_of(by_diffusers(wan1 / "transformer", torch.float32))))
    null = replace(b, conditioning=Conditioning(null_LD.expand_as(b.conditioning.text_BLD)))
    expected = scale * inner.velocity(b) + (1 - scale) * inner.velocity(null)
    guided = GuidedTeacher(inner, Guidance(null_LD, dict.fromkeys(Expert, scale)))
    torch.testing.assert_close(guided.velocity(b), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("guided", [[2.0, 0.0, 0.5], [0.0, 0.0, 0.0]])
def test_guidance_of_some_samples_moves_these_alone_by_so_much_more(
    wan1: Path, passes: int, guided: list[float]
) -> None:
    """The other samples have no null branch; but where that is a call of its own, all ranks make it."""
    text_BLD, null_LD = keyed_normal((3, 512, 32), "text"), keyed_normal((512, 32), "null")
    b = state(keyed_normal((3, 16, 1, 4, 4), "x"), torch.rand(3), text_BLD, Expert.HIGH_NOISE)
    network = network_of(by_diffusers(wan1 / "transformer", torch.float32))
    inner, calls = LocalTeacher(dict.fromkeys(Expert, network)), []
    text, null = (
        inner.velocity(replace(b, conditioning=Conditioning(t_BLD)))
        for t_BLD in (text_BLD, null_LD.expand(3, -1, -1))
    )
    network.module.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(len((*args, *kwargs.values())[0])), with_kwargs=True
    )
    guidance, guided_B = Guidance(null_LD, dict.fromkeys(Expert, 4.0)), torch.tensor(guided)
    v = GuidedTeacher(inner, guidance, passes).velocity(replace(b, guided_B=guided_B))
    expected = text + 3 * guided_B.view(-1, 1, 1, 1, 1) * (text - null)
    torch.testing.assert_close(v, expected, rtol=0, atol=1e-4)
    some = int(guided_B.count_nonzero())
    assert calls == ([3 + some] if passes == 1 else [3, max(1, some)])


def test_what_a_config_leaves_to_diffusers_is_diffusers_default(
    wan1: Path, copy_of: Callable[..., Path]
) -> None:
    folder = copy_of(wan1)
    for part, keys in (("transformer", ["cross_attn_norm"]), ("vae", ["latents_mean", "latents_std"])):
        file = folder / part / "config.json"
        write_json(file, {k: v for k, v in json.loads(file.read_text()).items() if k not in keys})
    opened = pipeline.open_wan(str(folder))
    assert opened.config.cross_attn_norm is True
    assert opened.vae["latents_mean"] == AutoencoderKLWan.load_config(wan1 / "vae")["latents_mean"]


@torch.no_grad()
def test_a_vae_takes_one_sample_of_a_batch_at_a_time(wan1: Path) -> None:
    vae, seen = load_vae(wan1 / "vae"), []
    for part in (vae.encoder.conv_in, vae.decoder.conv_in):
        part.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    decoded(vae, encoded(vae, torch.zeros(3, 3, 1, 16, 16)))
    assert seen == [1] * 6
