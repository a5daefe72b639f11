"""What a student JSON may say, and the weights that a student starts from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from diffusers import WanTransformer3DModel

from wandistiller import checkpoint, wan
from wandistiller.batch import Expert
from wandistiller.deepspeed_json import student_engine
from wandistiller.problems import ConfigError
from wandistiller.start import start_model
from wandistiller.student import Student
from wandistiller.student_config import StudentConfig, kept_layers, lineage, read_student_config

LAYERS = 4  # of the small teacher; its width is 2 heads x 32


def started(folder: Path, expert: Expert = Expert.HIGH_NOISE, seed: int = 0, **values: Any) -> WanTransformer3DModel:
    teacher = wan.open_wan(str(folder))
    student, config = read_student_config("s.json", values, teacher)
    return start_model(student, config, teacher, expert, seed)


def refused(folder: Path, **values: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_student_config("s.json", values, wan.open_wan(str(folder)))
    return caught.value.problems


def layers_of(folder: Path, **values: Any) -> list[int]:
    teacher = wan.open_wan(str(folder))
    return kept_layers(*read_student_config("s.json", values, teacher), teacher)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.float32).state_dict()


def test_an_empty_json_means_the_teacher_itself(wan2: Path) -> None:
    teacher = wan.open_wan(str(wan2))
    assert read_student_config("s.json", {}, teacher) == (StudentConfig(), teacher.config)


def test_what_is_left_out_is_the_teacher_s(wan2: Path) -> None:
    teacher = wan.open_wan(str(wan2))
    _, config = read_student_config("s.json", {"num_layers": 2}, teacher)
    assert config == teacher.config | {"num_layers": 2}


@pytest.mark.parametrize(
    ("values", "layers"),
    [({"num_layers": 1}, [0]), ({"num_layers": 2}, [0, 3]), ({"num_layers": 4}, [0, 1, 2, 3]), ({}, [0, 1, 2, 3]),
     ({"num_layers": 1, "keep_layers": "ends"}, [0]), ({"num_layers": 2, "keep_layers": "ends"}, [0, 3]),
     ({"num_layers": 3, "keep_layers": "ends"}, [0, 1, 3]), ({"keep_layers": [1, 2]}, [1, 2]),
     ({"keep_layers": [0, 3], "num_layers": 2}, [0, 3])],
)  # fmt: skip
def test_the_kept_layers_are_these(wan2: Path, values: dict, layers: list[int]) -> None:
    assert layers_of(wan2, **values) == layers


@pytest.mark.parametrize(("share", "layers"), [(0.5, 2), (1.0, 4), (0.01, 1)])
def test_layers_may_be_a_share_of_the_teacher_s(wan2: Path, share: float, layers: int) -> None:
    student, config = read_student_config("s.json", {"num_layers": share}, wan.open_wan(str(wan2)))
    assert student.num_layers == config["num_layers"] == layers


@pytest.mark.parametrize("kept", range(1, 31))
@pytest.mark.parametrize("how", ["uniform", "ends"])
def test_kept_layers_of_a_30_layer_teacher_rise_and_hold_both_ends(wan2: Path, how: str, kept: int) -> None:
    teacher = wan.open_wan(str(wan2))
    teacher.config["num_layers"] = 30
    layers = kept_layers(StudentConfig(keep_layers=how), teacher.config | {"num_layers": kept}, teacher)
    assert len(layers) == kept and sorted(set(layers)) == layers
    assert layers[0] == 0 and (kept == 1 or layers[-1] == 29)


@pytest.mark.parametrize("source", ["low_noise", "high_noise"])
def test_a_one_expert_student_starts_from_the_expert_that_is_named(wan2: Path, source: str) -> None:
    folder = {"low_noise": "transformer_2", "high_noise": "transformer"}[source]
    found, teacher = started(wan2, from_expert=source).state_dict(), weights(wan2 / folder)
    assert found.keys() == teacher.keys() and all(torch.equal(found[name], teacher[name]) for name in teacher)


@pytest.mark.parametrize("expert", list(Expert))
def test_each_of_two_experts_starts_from_its_own_teacher(wan2: Path, expert: Expert) -> None:
    found, teacher = started(wan2, expert, experts="two").state_dict(), weights(wan2 / expert.value)
    assert all(torch.equal(found[name], teacher[name]) for name in teacher)


def test_kept_layers_are_copied_and_all_else_too(wan1: Path) -> None:
    found, teacher = started(wan1, keep_layers=[1, 3]).state_dict(), weights(wan1 / "transformer")
    for name, value in found.items():
        source = name.replace("blocks.1.", "blocks.3.").replace("blocks.0.", "blocks.1.")
        assert torch.equal(value, teacher[source])


def test_a_student_starts_in_float32_with_gradients_on_the_cpu(wan1: Path) -> None:
    for values in ({}, {"init": "random"}, {"init": str(wan1)}):
        assert {(p.dtype, p.device.type, p.requires_grad) for p in started(wan1, **values).parameters()} == {
            (torch.float32, "cpu", True)
        }


def test_a_random_start_depends_on_the_seed_alone(wan1: Path) -> None:
    values = {"init": "random", "num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 16, "ffn_dim": 8}
    torch.manual_seed(5)
    one = started(wan1, seed=1, **values).state_dict()
    torch.manual_seed(6)
    same, other = (started(wan1, seed=seed, **values).state_dict() for seed in (1, 2))
    assert all(torch.equal(one[n], same[n]) for n in one) and not all(torch.equal(one[n], other[n]) for n in one)


def test_a_random_start_leaves_torch_s_own_stream_alone(wan1: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    started(wan1, init="random")
    assert torch.rand(()) == expected


def test_a_random_student_may_have_any_width(wan1: Path) -> None:
    values = {"init": "random", "num_layers": 6, "num_attention_heads": 3, "attention_head_dim": 16, "ffn_dim": 40}
    model = started(wan1, **values)
    assert (len(model.blocks), model.patch_embedding.out_channels) == (6, 48)


@pytest.mark.parametrize("inside", ["", "transformer"])
def test_a_student_starts_from_a_pipeline_or_transformer_folder(wan1: Path, wan2: Path, inside: str) -> None:
    found, expected = started(wan1, init=str(wan2 / inside)).state_dict(), weights(wan2 / "transformer")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_two_experts_start_from_a_folder_s_two(wan2: Path) -> None:
    found = started(wan2, Expert.LOW_NOISE, init=str(wan2), experts="two").state_dict()
    expected = weights(wan2 / "transformer_2")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("values", "said"),
    [({"num_heads": 2}, "`num_heads` is 2. There is no such key. Did you mean `num_attention_heads`?"),
     ({"num_layers": 5}, '`num_layers` is 5. {teacher} has 4. Write at most that, or "init": "random".'),
     ({"num_layers": 0}, "`num_layers` is 0. Write a positive integer"),
     ({"num_layers": "2"}, '`num_layers` is "2". Write a positive integer'),
     ({"num_layers": 1.5}, "`num_layers` is 1.5. Write a positive integer"),
     ({"num_layers": True}, "`num_layers` is true. Write a positive integer"),
     ({"experts": "three"}, '`experts` is "three". Write one or two.'),
     ({"from_expert": "low"}, '`from_expert` is "low". Write low_noise or high_noise or average.'),
     ({"keep_layers": "first"}, '`keep_layers` is "first". Write uniform, ends, importance, or a list of layer numbers.'),
     ({"keep_layers": [0, 4]}, "`keep_layers` is [0, 4]. Write rising layer numbers from 0 to 3."),
     ({"keep_layers": [1, 0]}, "`keep_layers` is [1, 0]. Write rising layer numbers from 0 to 3."),
     ({"keep_layers": []}, "`keep_layers` is []. Write rising layer numbers from 0 to 3."),
     ({"keep_layers": [0, "1"]}, '`keep_layers` is [0, "1"]. Write rising layer numbers from 0 to 3.'),
     ({"keep_layers": [0, 1], "num_layers": 3}, "`num_layers` is 3. keep_layers names 2; leave one of the two keys out."),
     ({"init": "random", "attention_head_dim": 15}, "`attention_head_dim` is 15. Write an even integer from 2 to 1024."),
     ({"init": "nowhere"}, '`init` is "nowhere". Write teacher, random, or a folder with a Wan transformer.')],
)  # fmt: skip
def test_a_wrong_value_says_what_to_write(wan2: Path, values: dict, said: str) -> None:
    (problem,) = refused(wan2, **values)
    assert problem.startswith(f"s.json: {said}".replace("{teacher}", str(wan2)))


def test_heads_that_do_not_divide_the_teacher_s_are_refused_of_a_random_student(wan2: Path) -> None:
    assert any("does not divide the teacher's 2" in p for p in refused(wan2, init="random", num_attention_heads=3))


@pytest.mark.parametrize("key", ["num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim"])
def test_a_student_from_the_teacher_cannot_be_larger(wan2: Path, key: str) -> None:
    has = wan.open_wan(str(wan2)).config[key]
    (said,) = refused(wan2, **{key: has + 2})
    assert f"`{key}` is {has + 2}. {wan2} has {has}. Write at most that" in said


@pytest.mark.parametrize(("share", "head_dim"), [(0.5, 16), (0.45, 14), (0.01, 2), (1.0, 32)])
def test_a_share_of_a_head_is_even(wan2: Path, share: float, head_dim: int) -> None:
    _, config = read_student_config("s.json", {"attention_head_dim": share}, wan.open_wan(str(wan2)))
    assert config["attention_head_dim"] == head_dim


def test_shares_fit_any_teacher(wan2: Path) -> None:
    _, config = read_student_config("s.json", {"num_attention_heads": 0.5, "ffn_dim": 0.25}, wan.open_wan(str(wan2)))
    assert (config["num_attention_heads"], config["ffn_dim"]) == (1, 24)


@pytest.mark.parametrize(
    ("values", "said"),
    [({"width_basis": "principal"}, "`width_basis` is \"principal\". The hidden width is the teacher's"),
     ({"ffn_units": "weight"}, "`ffn_units` is \"weight\". ffn_dim is the teacher's"),
     ({"experts": "two", "from_expert": "average"}, "`from_expert` is \"average\". Each of two experts starts from its own"),
     ({"init": "random", "from_expert": "average"}, "`from_expert` is \"average\". It chooses what is kept of the teacher"),
     ({"init": "random", "keep_layers": "importance"}, "`keep_layers` is \"importance\". It chooses what is kept"),
     ({"width_basis": "pca"}, "`width_basis` is \"pca\". Write channels or principal or truncate."),
     ({"ffn_units": "size"}, "`ffn_units` is \"size\". Write activation or weight."),
     ({"attention_head_dim": 15}, "`attention_head_dim` is 15. Write an even integer from 2 to 1024.")],
)  # fmt: skip
def test_keys_that_contradict_are_refused(wan2: Path, values: dict, said: str) -> None:
    assert any(p.startswith(f"s.json: {said}") for p in refused(wan2, **values))


def test_all_contradictions_are_reported_at_once(wan2: Path) -> None:
    assert len(refused(wan2, num_attention_heads=4, ffn_dim=200, num_layers=9)) == 3


def test_a_student_of_the_average_has_the_mean_of_both_experts_weights(wan2: Path) -> None:
    found = started(wan2, from_expert="average").state_dict()
    high, low = weights(wan2 / "transformer"), weights(wan2 / "transformer_2")
    assert all(torch.equal(found[name], torch.stack([high[name], low[name]]).mean(0)) for name in high)


def test_an_unpruned_copy_answers_bit_for_bit_as_the_teacher(wan2: Path) -> None:
    teacher = WanTransformer3DModel.from_pretrained(wan2 / "transformer_2", torch_dtype=torch.float32).eval()
    x_BCFHW, sigma_B, text_BLD = torch.randn(2, 16, 1, 4, 4), torch.tensor([0.3, 0.8]), torch.randn(2, 512, 32)
    with torch.no_grad():
        found, expected = (wan.velocity(m, x_BCFHW, sigma_B, text_BLD) for m in (started(wan2).eval(), teacher))
    assert torch.equal(found, expected)


def test_blocks_stand_for_all_up_to_the_next_one_kept(wan2: Path) -> None:
    teacher = wan.open_wan(str(wan2))
    student, config = read_student_config("s.json", {"keep_layers": [0, 2]}, teacher)
    assert lineage(student, config, teacher) == {Expert.HIGH_NOISE: [1, 3]}


def test_two_experts_need_a_teacher_with_two(wan1: Path) -> None:
    assert refused(wan1, experts="two") == [f's.json: `experts` is "two". {wan1} has one expert; write "one".']


def test_sizes_beside_a_folder_are_refused(wan1: Path) -> None:
    assert "Leave the sizes out" in refused(wan1, init=str(wan1), num_layers=2)[0]


@pytest.mark.parametrize("init", [5, None, ["teacher"]])
def test_a_start_that_is_no_text_is_refused(wan1: Path, init: Any) -> None:
    assert "`init`" in refused(wan1, init=init)[0]


def test_an_unknown_key_and_a_wrong_value_are_reported_at_once(wan1: Path) -> None:
    assert len(refused(wan1, num_heads=2, num_layers=-1)) == 2


def test_two_experts_from_a_one_expert_folder_are_refused(wan1: Path, wan2: Path) -> None:
    assert "`init`" in refused(wan2, init=str(wan1), experts="two")[0]


def test_a_folder_with_other_latent_channels_is_refused(wan1: Path, copy_of: Callable[..., Path]) -> None:
    folder = copy_of(wan1)
    file = folder / "transformer" / "config.json"
    file.write_text(file.read_text().replace('"in_channels": 16', '"in_channels": 48'))
    assert "in_channels" in refused(wan1, init=str(folder))[0]


ADAM = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_gives_back_the_start_weights(tmp_path: Path, wan1: Path, stage: int, dtype: torch.dtype) -> None:
    ds = {"train_batch_size": 1, "optimizer": ADAM, "zero_optimization": {"stage": stage}}
    try:
        ds, _ = student_engine("x.json", ds | {"bf16": {"enabled": dtype is torch.bfloat16}}, 1)
    except ConfigError:
        pytest.skip("a stage that is refused needs no export")
    model = started(wan1, num_layers=1)
    # deepspeed 0.19.8 makes its float32 masters from the weights that it has cast already
    expected = {name: p.detach().to(dtype).float() for name, p in model.named_parameters()}
    student = Student({Expert.HIGH_NOISE: model}, ds)
    found = dict(checkpoint.weights(checkpoint.save(student, tmp_path, 1, {}, keep=1), Expert.HIGH_NOISE))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_3_neither_moves_a_whole_network_to_the_accelerator_nor_sends_it_before_it_is_cut(
    stage: int, wan1: Path, one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, sent = [], []
    send = deepspeed.comm.broadcast
    monkeypatch.setattr(WanTransformer3DModel, "to", lambda model, *to: moved.append(to) or model)
    monkeypatch.setattr(deepspeed.comm, "broadcast", lambda t, *more, **named: sent.append(t) or send(t, *more, **named))
    model = started(wan1)
    ds, _ = student_engine("", {"train_batch_size": 1, "optimizer": ADAM, "zero_optimization": {"stage": stage}}, 1)
    Student({Expert.HIGH_NOISE: model}, ds)
    assert bool(moved) == (stage == 2)
    assert len(sent) == len(list(model.parameters()))  # once each: whole, or by the cut
    assert "to" not in vars(model)
