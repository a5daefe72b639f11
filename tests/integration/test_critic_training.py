"""DMD2: equal to a plain PyTorch loop, one loss curve over ranks and stages, resumed bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from plain import PlainDmd2
from ranks import losses, metrics
from recipes import recipe, student_engine, train
from slow_cases import slow_but
from trainers import trainer_of

from wandistiller.objectives.dmd2 import CRITIC

STEPS = 4
DMD2 = {"name": "dmd2", "steps": 2, "critic_updates": 2, "critic_lr": 2e-3}
SHARED = DMD2 | {"shared": True}
CARRIED = SHARED | {"critic_updates": 1, "carried": True}
MIXED = {"projected": True, "compare": "mixed"}
SETTINGS = {"objective": DMD2, "max_steps": STEPS, "save_every": 2}
SETTINGS |= {"guidance_scale": 4.0, "guidance_scale_2": 3.0}


def trained(folder: Path, wan: Path, name: str, ranks: int, **more: Any) -> Path:
    return train(folder, wan, name, ranks=ranks, **SETTINGS | more)


def of_critic(output: Path) -> list[float]:
    return [line["critic"]["loss"] for line in metrics(output)]


def assert_same_curves(output: Path, reference: Path) -> None:
    assert losses(output) == pytest.approx(losses(reference), rel=1e-5)
    assert of_critic(output) == pytest.approx(of_critic(reference), rel=1e-5)


@pytest.mark.parametrize(
    ("objective", "micro"),
    slow_but(
        [(DMD2, 8)],
        [(DMD2, 8), (SHARED, 8), (SHARED | MIXED, 2), (CARRIED, 2), (CARRIED | {"shared": False}, 8)],
    ),
)
def test_losses_and_weights_after_two_steps_of_prompts_alone_equal_those_of_plain_pytorch(
    folder: Path, wan2: Path, one_rank: torch.device, objective: dict[str, Any], micro: int
) -> None:
    more = {"deepspeed_config": student_engine(2, train_micro_batch_size_per_gpu=micro)}
    more |= {"objective": objective, "output_dir": str(folder / "plain"), "cache_dir": str(folder / "own")}
    trainer = trainer_of(recipe(folder, wan2, **SETTINGS | more))
    plain = PlainDmd2(trainer.job)
    for step in range(2):
        result, (loss, critic) = trainer.train_step(step), plain.step(step)
        assert result.loss == pytest.approx(loss, rel=1e-5)
        assert result.others[CRITIC]["loss"] == pytest.approx(critic, rel=1e-5)
    assert max(plain.differences(trainer).values()) < 2e-4
    assert not list((folder / "own" / "latents").rglob("*.safetensors"))  # no rollout is made


@pytest.mark.slow
def test_a_critic_with_fewer_updates_goes_on_where_the_run_is_in_its_schedule(
    folder: Path, wan2: Path
) -> None:
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 2e-3, "warmup_num_steps": 2, "total_num_steps": 8}
    engine = student_engine(2) | {"scheduler": {"type": "WarmupDecayLR", "params": warmup}}
    more = SETTINGS | {"deepspeed_config": engine, "max_steps": 8, "save_every": 4}
    one = more | {"objective": DMD2 | {"critic_updates": 1}}
    before, whole = (train(folder, wan2, n, ranks=1, **g) for n, g in {"two": more, "one": one}.items())
    flags = ["--resume", str(before / "checkpoints" / "step_00000004"), "--allow_changed", "objective"]
    resumed = train(folder, wan2, "two_one", *flags, ranks=1, **one)
    rates = [[line["critic"]["lr"] for line in metrics(output)] for output in (whole, resumed)]
    assert rates[1] == pytest.approx(rates[0][4:]) and rates[0][5] > rates[0][7] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("plain", DMD2),
        ("from_teacher", DMD2 | {"critic_start": "teacher"}),
        ("renoise", DMD2 | {"steps": 3, "sampler": "renoise"}),
        ("critic_follows", DMD2 | {"critic_follows": 0.03}),
        ("shared", SHARED | {"critic_updates": 1, "critic_follows": 0.03}),
        ("path", DMD2 | MIXED | {"compare": "path"}),
        ("mixed", SHARED | MIXED),
        ("mixed_heads", DMD2 | MIXED | {"gan": 0.03}),
        ("shared_heads", SHARED | {"gan": 0.03}),
        ("shared_joint", [SHARED | {"sampler": "renoise"}, {"name": "consistency", "weight": 3}]),
        ("joint", [DMD2 | {"sampler": "renoise"}, {"name": "consistency", "weight": 3}]),
        ("heads", DMD2 | {"gan": 0.03}),
        ("carried", CARRIED | MIXED | {"critic_follows": 0.03, "guidance_share": 0.5}),
        ("carried_heads", DMD2 | {"carried": True, "gan": 0.03, "critic_start": "teacher"}),
        ("carried_joint", [CARRIED | {"sampler": "renoise"}, {"name": "consistency", "weight": 3}]),
    ],
)
def test_its_variants_have_one_loss_curve_and_resume(
    folder: Path, wan2: Path, name: str, objective: Any
) -> None:
    short = {"objective": objective, "max_steps": 2}
    one = trained(folder, wan2, f"{name}_1", 1, save_every=1, **short)
    two = trained(folder, wan2, f"{name}_2", 2, deepspeed_config=student_engine(3), **short)
    assert_same_curves(two, one)
    for ours, theirs in zip(metrics(two), metrics(one), strict=True):
        assert ours["watched"] == pytest.approx(theirs["watched"], rel=1e-4)
    middle = str(one / "checkpoints" / "step_00000001")
    resumed = trained(folder, wan2, f"{name}_3", 1, resume=middle, **short)
    assert losses(resumed) == losses(one)[1:] and of_critic(resumed) == of_critic(one)[1:]


def log(output: Path) -> str:
    return (output / "logs" / "rank_0.log").read_text()


@pytest.mark.parametrize("degree", slow_but([], [1, 2]))
def test_samples_that_go_on_are_dealt_to_other_ranks_and_begin_anew_with_other_settings(
    folder: Path, wan2: Path, degree: int
) -> None:
    """In the middle of their way: the third of four calls."""
    more = {"objective": CARRIED | {"steps": 4}, "save_every": 2, "ema": 0.9}
    name = f"dealt_{degree}"
    two = trained(folder, wan2, f"{name}_2", 2, **more, context_parallel=degree)
    middle = two / "checkpoints" / "step_00000002"
    resumed = trained(folder, wan2, f"{name}_1", 1, resume=str(middle), **more)
    assert losses(resumed) == pytest.approx(losses(two)[2:], rel=1e-5)
    assert len(list((middle / "carried").iterdir())) == 2 // degree
    assert ("carried   samples of 2 ranks go on in 1" in log(resumed)) == (degree == 1)
    flags = "--resume", str(middle), "--allow_changed", "seed", "data"
    anew = train(folder, wan2, f"{name}_3", *flags, ranks=1, **SETTINGS | more, seed=1)
    assert "carried   samples begin from noise: the checkpoint has another data, seed" in log(anew)
    assert len(losses(anew)) == 2
