"""The keys of a student JSON, and the weights that a student starts from."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from checkpointed import save
from diffusers import WanTransformer3DModel
from engines import engine, learner_of
from ranks import edit_json
from slow_cases import slow_but

from wandistiller.checkpoint import loading
from wandistiller.experts import Expert
from wandistiller.network.network import Network
from wandistiller.student.config import StudentConfig, kept_layers, read_student_config
from wandistiller.student.initialize import start_weights
from wandistiller.utils.errors import ConfigError
from wandistiller.wan import pipeline


def started(
    folder: Path, expert: Expert = Expert.HIGH_NOISE, seed: int = 0, **values: Any
) -> WanTransformer3DModel:
    teacher = pipeline.open_wan(str(folder))
    student, config = read_student_config("s.json", values, teacher)
    weights = start_weights(student, config, teacher, expert, seed)
    return Network.made(config, weights).module.requires_grad_(True)


def refused(folder: Path, **values: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_student_config("s.json", values, pipeline.open_wan(str(folder)))
    return caught.value.problems


def layers_of(folder: Path, **values: Any) -> list[int]:
    teacher = pipeline.open_wan(str(folder))
    return kept_layers(*read_student_config("s.json", values, teacher), teacher)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.float32).state_dict()


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize("values", [{}, {"num_layers": 2}], ids=str)
def test_what_is_left_out_is_the_teacher_s(wan2: Path, values: dict) -> None:
    teacher = pipeline.open_wan(str(wan2))
    student_and_config = read_student_config("s.json", values, teacher)
    assert student_and_config == (StudentConfig(**values), teacher.config.replaced(**values))


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({"num_layers": 1}, [0]),
        ({"num_layers": 2}, [0, 3]),
        ({}, [0, 1, 2, 3]),
        ({"num_layers": 1, "keep_layers": "ends"}, [0]),
        ({"num_layers": 2, "keep_layers": "ends"}, [0, 3]),
        ({"num_layers": 3, "keep_layers": "ends"}, [0, 1, 3]),
        ({"keep_layers": [1, 2]}, [1, 2]),
        ({"keep_layers": [0, 3], "num_layers": 2}, [0, 3]),
    ],
)
def test_the_kept_layers_are_these(wan2: Path, values: dict, layers: list[int]) -> None:
    assert layers_of(wan2, **values) == layers


SHARES = [
    ({"num_layers": 0.5}, {"num_layers": 2}),
    ({"num_layers": 1.0}, {"num_layers": 4}),
    ({"num_layers": 0.01}, {"num_layers": 1}),
    ({"num_attention_heads": 0.5, "ffn_dim": 0.25}, {"num_attention_heads": 1, "ffn_dim": 24}),
    *(({"attention_head_dim": s}, {"attention_head_dim": n}) for s, n in ((0.5, 16), (0.01, 2), (1.0, 32))),
    ({"attention_head_dim": 0.45}, {"attention_head_dim": 14}),  # even
]


@pytest.mark.parametrize(("shares", "sizes"), SHARES)
def test_sizes_may_be_shares_of_the_teacher_s(wan2: Path, shares: dict, sizes: dict) -> None:
    student, config = read_student_config("s.json", shares, pipeline.open_wan(str(wan2)))
    assert config.raw.items() >= sizes.items() and student.num_layers == sizes.get("num_layers")


@pytest.mark.parametrize("how", ["uniform", "ends"])
def test_kept_layers_of_a_30_layer_teacher_rise_and_hold_both_ends(wan2: Path, how: str) -> None:
    teacher = pipeline.open_wan(str(wan2))
    teacher = replace(teacher, configs={Expert.HIGH_NOISE: teacher.config.replaced(num_layers=30)})
    for kept in range(1, 31):
        own = teacher.config.replaced(num_layers=kept)
        layers = kept_layers(StudentConfig(keep_layers=how), own, teacher)
        assert len(layers) == kept and sorted(set(layers)) == layers
        assert layers[0] == 0 and (kept == 1 or layers[-1] == 29)


SOURCES: list[tuple[dict[str, str], Expert, str]] = [
    ({"from_expert": "low_noise"}, Expert.HIGH_NOISE, "transformer_2"),
    ({"from_expert": "high_noise"}, Expert.HIGH_NOISE, "transformer"),
    *(({"experts": "two", **init}, e, e.value) for init in ({}, {"init": "{wan2}"}) for e in Expert),
    *(({"init": f"{{wan2}}/{e.value}", "experts": "one"}, Expert.HIGH_NOISE, e.value) for e in Expert),
]


@pytest.mark.parametrize(("values", "expert", "source"), SOURCES)
def test_a_student_starts_from_the_weights_that_are_named(
    wan1: Path, wan2: Path, values: dict[str, str], expert: Expert, source: str
) -> None:
    values = {key: value.format(wan2=wan2) for key, value in values.items()}
    teacher = wan1 if "init" in values and values["experts"] == "one" else wan2
    assert_equal(started(teacher, expert, **values).state_dict(), weights(wan2 / source))


def test_kept_layers_are_copied_and_all_else_too(wan1: Path) -> None:
    student, teacher = started(wan1, keep_layers=[1, 3]).state_dict(), weights(wan1 / "transformer")
    for name, value in student.items():
        source = name.replace("blocks.1.", "blocks.3.").replace("blocks.0.", "blocks.1.")
        assert torch.equal(value, teacher[source])


def test_a_student_starts_in_float32_with_gradients_on_the_cpu(wan1: Path) -> None:
    for values in ({}, {"init": "random"}, {"init": str(wan1)}):
        kinds = {(p.dtype, p.device.type, p.requires_grad) for p in started(wan1, **values).parameters()}
        assert kinds == {(torch.float32, "cpu", True)}


def test_a_random_student_of_any_size_depends_on_its_seed_alone_and_leaves_torch_s_stream(wan1: Path) -> None:
    sizes = {"num_layers": 6, "num_attention_heads": 3, "attention_head_dim": 16, "ffn_dim": 40}
    models, after = [], []
    for stream, seed in ((5, 1), (6, 1), (6, 2)):
        torch.manual_seed(stream)
        models.append(started(wan1, seed=seed, init="random", **sizes))
        after.append(torch.rand(()))
    torch.manual_seed(5)
    assert torch.rand(()) == after[0]
    assert (len(models[0].blocks), models[0].patch_embedding.out_channels) == (6, 48)
    one, same, other = (model.state_dict() for model in models)
    assert_equal(one, same)
    assert not all(torch.equal(one[n], other[n]) for n in one)


def test_two_experts_need_a_teacher_or_folder_with_two(wan1: Path, wan2: Path) -> None:
    message = f's.json: `experts` is "two". {wan1} has one expert; write "one".'
    assert refused(wan1, experts="two") == [message]
    assert "`init`" in refused(wan2, init=str(wan1), experts="two")[0]


def test_a_folder_of_two_experts_is_refused_for_one_network_until_one_is_named(
    wan1: Path, wan2: Path
) -> None:
    either = f"{wan2 / 'transformer'} or {wan2 / 'transformer_2'}"
    for teacher, values in ((wan1, {"experts": "all"}), (wan2, {})):
        (message,) = refused(teacher, init=str(wan2), **values)
        assert f'It has two experts. Name one of them, {either}, or write "experts": "two"' in message


def test_a_folder_with_other_latent_channels_is_refused(wan1: Path, copy_of: Callable[..., Path]) -> None:
    folder = copy_of(wan1)
    edit_json(folder / "transformer" / "config.json", in_channels=48)
    assert "in_channels" in refused(wan1, init=str(folder))[0]


@pytest.mark.parametrize(
    ("stage", "dtype"),
    slow_but([(2, torch.float32), (3, torch.bfloat16)], product((1, 2, 3), (torch.float32, torch.bfloat16))),
)
@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_gives_back_the_start_weights(
    tmp_path: Path, wan1: Path, stage: int, dtype: torch.dtype
) -> None:
    model = started(wan1, num_layers=1)
    # deepspeed 0.19.8 makes its float32 masters from the weights that it has cast already
    expected = {name: p.detach().to(dtype).float() for name, p in model.named_parameters()}
    student = learner_of(
        model, engine(bf16={"enabled": dtype is torch.bfloat16}, zero_optimization={"stage": stage})
    )
    folder = save(student, tmp_path, 1)
    assert_equal(dict(loading.read_weights(folder, Expert.HIGH_NOISE)), expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_3_neither_moves_a_whole_network_to_the_accelerator_nor_sends_it_before_it_is_cut(
    stage: int, wan1: Path, one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, sent, model = [], [], started(wan1)
    send = deepspeed.comm.broadcast
    monkeypatch.setattr(WanTransformer3DModel, "to", lambda model, *to: moved.append(to) or model)
    monkeypatch.setattr(
        deepspeed.comm, "broadcast", lambda *args, **more: sent.append(args) or send(*args, **more)
    )
    learner_of(model, engine(zero_optimization={"stage": stage}))
    assert bool(moved) == (stage == 2)
    assert len(sent) == len(list(model.parameters()))  # once each: whole, or by the cut
    assert "to" not in vars(model)
