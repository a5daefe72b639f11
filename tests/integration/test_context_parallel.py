"""Ranks that share sequences train what one rank trains: losses, gradients, pictures, resumed runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_ranks.sequence import SIZE, Curve, curves
from PIL import Image
from ranks import TEACHERS, call, has_async_io, losses, wandistiller
from recipes import recipe_file, student_engine
from slow_cases import slow_but
from small_wan import make_wan

FEATURES = ["velocity", {"name": "feature", "weight": 0.5}]
NARROW = {"init": "random", "num_layers": 2, "attention_head_dim": 16}
JUDGED = {"name": "dmd2", "steps": 2, "critic_updates": 1, "critic_lr": 2e-3, "gan": 0.03}
PLAIN = student_engine(2)
del PLAIN["activation_checkpointing"]
RUNS: dict[str, dict[str, Any]] = {
    "two samples": {"deepspeed_config": student_engine(2, train_batch_size=2)},
    "stage 0": {"deepspeed_config": student_engine(0, offload=False)},
    "stage 2": {"deepspeed_config": student_engine(2)},
    "stage 3": {"deepspeed_config": student_engine(3)},
    "all activations kept": {"deepspeed_config": PLAIN},
    "two experts": {"student_config": {"num_layers": 2, "experts": "two"}},
    "merged padding": {"merge_text_padding": True},
    "features": {"objective": FEATURES, "student_config": NARROW},
    "adapters": {"lora": {"rank": 2, "alpha": 2, "targets": ["to_q", "ffn.net.2"]}},
    "trajectory": {"objective": "trajectory"},
    "consistency": {"objective": {"name": "consistency", "intervals": 8, "edges": 2}},
    "dmd2 with heads": {"objective": JUDGED},
    "shared dmd2 with heads": {"objective": JUDGED | {"shared": True, "carried": True}},
}
"""Settings of a recipe by name."""
QUICK = ["two samples"]


@pytest.fixture(scope="module")
def wan(folder: Path) -> Path:
    """A pipeline of two experts with four heads."""
    return make_wan(folder / "wan", heads=4)


class Curves(dict[str, Curve]):
    """Runs of RUNS by name; those of QUICK, or all others, are made when one of them is asked for."""

    def __init__(self, folder: Path, wan: Path, ranks: int):
        self._files, self._ranks = (folder, wan), ranks

    def __missing__(self, name: str) -> Curve:
        names = [other for other in RUNS if (other in QUICK) == (name in QUICK)]
        runs = {name: RUNS[name] | {"context_parallel": self._ranks} for name in names}
        self |= call(curves, *self._files, runs, ranks=self._ranks)[0]
        return self[name]


@pytest.fixture(scope="module")
def alone(folder: Path, wan: Path) -> Curves:
    """Runs on one rank."""
    return Curves(folder, wan, 1)


@pytest.fixture(scope="module")
def shared(folder: Path, wan: Path) -> Curves:
    """Runs on two ranks that share each sequence."""
    return Curves(folder, wan, 2)


@pytest.mark.parametrize("name", slow_but(QUICK, RUNS))
def test_two_ranks_that_share_sequences_have_the_losses_and_gradients_of_one(
    name: str, alone: dict[str, Curve], shared: dict[str, Curve]
) -> None:
    for what, of_steps in alone[name].items():
        assert shared[name][what] == pytest.approx(of_steps, rel=1e-5), what


@pytest.mark.slow  # the compiler takes minutes
def test_compiled_blocks_share_sequences(folder: Path, wan: Path, alone: dict[str, Curve]) -> None:
    compiled = {"wandistiller": {"compile": True}}
    settings = {
        "context_parallel": 2,
        "deepspeed_config": student_engine(2) | compiled,
        "teacher_deepspeed_config": {"zero_optimization": {"stage": 0}} | compiled,
    }
    found, *_ = call(curves, folder, wan, {"compiled": settings}, ranks=2)
    for what, of_steps in alone["stage 2"].items():
        assert found["compiled"][what] == pytest.approx(of_steps, rel=1e-5), what


@pytest.mark.parametrize("degree", slow_but([], [2, 4]))
def test_four_ranks_in_groups_have_the_losses_and_gradients_of_one(
    degree: int, folder: Path, wan: Path, alone: dict[str, Curve]
) -> None:
    names = ["stage 2", "features"]
    runs = {name: RUNS[name] | {"context_parallel": degree} for name in names}
    found, *_ = call(curves, folder, wan, runs, ranks=4)
    for name in names:
        for what, of_steps in alone[name].items():
            assert found[name][what] == pytest.approx(of_steps, rel=1e-5), (name, what)


@pytest.mark.slow
@pytest.mark.parametrize("teacher", TEACHERS)
def test_every_placement_serves_ranks_that_share_sequences(
    teacher: str, folder: Path, wan: Path, alone: dict[str, Curve]
) -> None:
    if "nvme" in teacher and not has_async_io():
        pytest.skip("no libaio here")
    settings = RUNS["features"] | {"teacher": teacher, "context_parallel": 2}
    found, *_ = call(curves, folder, wan, {teacher: settings}, ranks=2)
    for what, of_steps in alone["features"].items():
        assert found[teacher][what] == pytest.approx(of_steps, rel=1e-5), what


@pytest.fixture(scope="module")
def whole_run(folder: Path, wan: Path) -> Path:
    """Four steps on one rank."""
    return trained(folder, wan, "whole", ranks=1, max_steps=4)


def trained(folder: Path, wan: Path, name: str, *, ranks: int, **settings: Any) -> Path:
    given = {"save_every": 2, "sample_every": 2} | SIZE | settings
    wandistiller("train", "--recipe", recipe_file(folder, wan, name, **given), ranks=ranks)
    return folder / name


@pytest.mark.slow
def test_a_run_goes_on_when_other_numbers_of_ranks_share_its_sequences(
    folder: Path, wan: Path, whole_run: Path
) -> None:
    for ranks, degree, steps in ((2, 2, 2), (4, 2, 3), (1, 1, 4)):
        output = trained(folder, wan, "moved", ranks=ranks, context_parallel=degree, max_steps=steps)
    assert losses(output) == pytest.approx(losses(whole_run), rel=1e-5)


@pytest.mark.slow
def test_ranks_that_share_sequences_sample_the_files_of_one(folder: Path, wan: Path) -> None:
    words = ["sample", "--model", wan, "--prompts", "a red circle", "a blue square", "a green circle"]
    words += ["--height", 32, "--width", 32, "--steps", 2]
    wandistiller(*words, "--output", folder / "one")
    printed = wandistiller(
        *words, "--output", folder / "two", "--context_parallel", 2, ranks=2
    ).stdout.splitlines()
    assert [Path(line).name for line in printed] == ["0000.png", "0001.png", "0002.png", "grid.png"]
    for file in (folder / "one").glob("*.png"):
        pictures = (np.asarray(Image.open(run / file.name), int) for run in (folder / "one", folder / "two"))
        first, second = pictures
        assert np.abs(first - second).max() <= 1
