"""Frozen parts, learning-rate factors, moving averages and LoRA in real engines against plain PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import saved
from on_ranks.tuning import (
    PARTLY,
    batch,
    build,
    checkpoints,
    engine,
    learn,
    masters,
    round_robin_at_the_start,
)
from ranks import call, wandistiller
from recipes import recipe, student_engine, train
from safetensors.torch import load_file
from slow_cases import slow_but
from small_wan import small_transformer
from torch import Tensor

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.experts import Expert
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.parameter_patterns import factor, names_part

LORA = RunConfig(lora={"rank": 2, "alpha": 4, "targets": ["attn1", "blocks.1-.ffn"]})


@pytest.mark.parametrize(
    ("pattern", "named", "not_named"),
    [
        ("blocks.0-3", "blocks.3.attn1.to_q.weight", "blocks.4.attn1.to_q.weight"),
        ("blocks.20-", "blocks.31.ffn.net.2.bias", "blocks.19.ffn.net.2.bias"),
        ("blocks.1", "blocks.1.norm2.weight", "blocks.10.norm2.weight"),
        ("to_q", "blocks.7.attn2.to_q.weight", "blocks.7.attn2.norm_q.weight"),
        ("blocks.*.attn1.norm_q", "blocks.7.attn1.norm_q.weight", "blocks.7.attn2.norm_q.weight"),
        ("bias", "proj_out.bias", "proj_out.weight"),
        ("norm*", "blocks.0.attn1.norm_k.weight", "blocks.0.attn1.to_k.weight"),
    ],
)
def test_a_pattern_names_parts_by_words_and_spans(pattern: str, named: str, not_named: str) -> None:
    assert names_part(pattern, named) and not names_part(pattern, not_named)


def test_the_last_factor_that_names_a_part_counts_and_a_star_is_the_rest() -> None:
    factors = {"blocks": 0.5, "blocks.2-": 0.1, "*": 3.0}
    assert [factor(factors, f"{n}.weight") for n in ("blocks.1", "blocks.2", "proj_out")] == [0.5, 0.1, 3.0]
    assert factor({"blocks": 0.5}, "proj_out.weight") == 1.0


def problems(folder: Path, wan1: Path, **more: Any) -> list[str]:
    try:
        read_job(RunConfig(**recipe(folder, wan1, output_dir=str(folder / "run"), **more)), 1, here=False)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    "given",
    [
        {"lora": {"targets": ["ffn"]}, "learning_rates": {"ffn": 2, "blocks.0": 3, "*": 4}},
        {
            "student_config": {"num_layers": 2, "num_attention_heads": 1},
            "objective": ["velocity", "feature"],
            "learning_rates": {"feature_projections": 2},
        },
    ],
    ids=["adapters", "projections"],
)
def test_trained_parts_may_have_rates_of_their_own(given: dict, tmp_path: Path, wan1: Path) -> None:
    assert problems(tmp_path, wan1, **given) == []


def test_an_average_of_weights_on_nvme_is_refused(tmp_path: Path, wan1: Path) -> None:
    ds = student_engine(3, train_micro_batch_size_per_gpu=8)
    ds["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    messages = problems(tmp_path, wan1, ema=0.9, deepspeed_config=ds)
    assert any("The weights that it averages are on NVMe." in message for message in messages)


def test_lora_without_peft_is_reported_before_weights_are_loaded(
    tmp_path: Path, wan1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wandistiller.network.adapters.find_spec", lambda name: None)
    assert problems(tmp_path, wan1, lora={}) == ["recipe: `lora` needs peft. Run: pip install peft"]


SCHEDULES: list[dict[str, Any]] = [
    {},
    {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 3}},
    {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 3}},
    {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_num_steps": 3, "warmup_max_lr": 1e-3}},
    {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 5, "warmup_num_steps": 3, "warmup_min_ratio": 0.1},
    },
]


@pytest.mark.parametrize("schedule", slow_but(SCHEDULES[3:4], SCHEDULES))
def test_a_factor_holds_at_every_step_of_a_schedule(schedule: dict, one_rank: torch.device) -> None:
    config = engine(2, **({"scheduler": schedule} if schedule else {}))
    runs = []
    for tuned in (RunConfig(), RunConfig(learning_rates={"blocks.0": 0.25, "proj_out": 2.0})):
        trained = build(tuned, config).engine(Expert.HIGH_NOISE)
        rates = [trained.get_lr()]
        for _ in range(5 if schedule else 0):
            trained.lr_scheduler.step()
            rates.append(trained.get_lr())
        runs.append(rates)
    plain, tuned_rates = runs
    assert tuned_rates == [pytest.approx([lr, 0.25 * lr, 2.0 * lr], rel=1e-12) for (lr,) in plain]


@pytest.mark.parametrize("stage", slow_but([3], [2, 3]))
def test_adams_first_update_is_the_learning_rate_times_the_factor(stage: int, one_rank: torch.device) -> None:
    still = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-12, "weight_decay": 0.0}}
    student = build(PARTLY, engine(stage, optimizer=still))
    before = masters(student)
    learn(student, 0)
    after = masters(student)
    rates = {"condition_embedder.time_proj": 1e-3, "blocks.1.attn1.to_q": 1e-3}
    for name, rate in (rates | {"blocks.2.attn1.to_q": 1e-4, "proj_out": 4e-3}).items():
        change = after[f"{name}.weight"] - before[f"{name}.weight"]
        assert change.abs().median().item() == pytest.approx(rate, rel=1e-3)


def test_a_checkpoint_of_two_ranks_has_the_weights_of_plain_pytorch(tmp_path: Path) -> None:
    for differences in call(checkpoints, tmp_path, ranks=2)[0]:
        assert differences.pop("averaged") < 1e-6 and differences.pop("moved") > 1e-3
        assert set(differences.values()) == {0}


def test_round_robin_gradients_leave_each_weight_under_its_name(tmp_path: Path) -> None:
    assert call(round_robin_at_the_start, tmp_path, ranks=2)[0] == [0, 0]


@pytest.mark.parametrize("stage", slow_but([2], [2, 3]))
def test_a_lora_student_starts_as_its_base_and_only_adapters_change(
    stage: int, one_rank: torch.device
) -> None:
    curves = []
    for recompute in (True, False):  # with all before it frozen, a checkpointed block still has its gradient
        config = engine(stage) if recompute else engine(stage).without_recompute
        student, base, b = build(LORA, config), small_transformer(1, layers=3), batch(0)
        with torch.no_grad():
            v_BCFHW = base(b.x_t_BCFHW, 1000 * b.sigma_B, b.conditioning.text_BLD).sample
            assert torch.equal(student.velocity(b), v_BCFHW)
        curves.append([learn(student, step) for step in range(3)])
        assert all("lora_" in name for name in masters(student))
        assert min(v.abs().max() for n, v in masters(student).items() if "lora_B" in n) > 1e-4
    assert curves[0] == pytest.approx(curves[1], rel=1e-6) and len(set(curves[0])) == 3


def test_adapters_start_equal_whatever_was_drawn_before(one_rank: torch.device) -> None:
    first = masters(build(LORA, engine(2)))
    torch.rand(7)
    second = masters(build(LORA, engine(2)))
    assert all(torch.equal(first[name], value) for name, value in second.items()) and len(first) == 32


def exported(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.mark.slow
def test_a_tuned_run_exports_its_average_and_is_resumed_bitwise(tmp_path: Path, wan1: Path) -> None:
    more = {"ema": 0.9, "frozen": ["blocks.0"], "learning_rates": {"proj_out": 2}, "save_every": 2}
    more["deepspeed_config"] = student_engine(3, bf16={"enabled": True})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for output, steps in ((whole, 4), (cut, 2), (cut, 4)):
        train(tmp_path, wan1, output.name, max_steps=steps, **more)
    for name, flag in (("average", "--ema"), ("last", "--no-ema")):
        wandistiller("export", "--checkpoint", cut, "--output", tmp_path / name, flag)
    weights, other = exported(whole / "student"), exported(cut / "student")
    average, last, base = exported(tmp_path / "average"), exported(tmp_path / "last"), exported(wan1)
    assert all(torch.equal(weights[n], other[n]) and torch.equal(weights[n], average[n]) for n in weights)
    frozen = [saved(cut, step) / "frozen" / "transformer.safetensors" for step in (2, 4)]
    assert frozen[0].samefile(frozen[1])  # one file, however many checkpoints
    moved = [n for n in weights if not torch.equal(weights[n], last[n])]
    assert moved and not [n for n in moved if n.startswith("blocks.0.")]
    assert all(torch.equal(w, base[n].to(w.dtype)) for n, w in weights.items() if n.startswith("blocks.0."))
