"""A run that was cut and started again ends as one that was not."""

import json
from pathlib import Path

import pytest
from ranks import metrics, wandistiller
from recipes import recipe_file, student_engine, train
from slow_cases import slow_but

from wandistiller.cli.main import main


@pytest.mark.slow
def test_a_changed_learning_rate_is_refused_and_goes_on_when_it_is_allowed(
    tmp_path: Path, wan2: Path
) -> None:
    engine = student_engine(2, optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    output = train(tmp_path, wan2, ranks=1, max_steps=2, deepspeed_config=engine, lr=1e-3)
    file, more = tmp_path / "run.json", ("--max_steps", "4", "--lr", "5e-4")
    error = wandistiller("train", "--recipe", file, *more, code=2).stderr
    assert "another optimizer: " in error and "--allow_changed optimizer to go on all the same" in error
    wandistiller("train", "--recipe", file, *more, "--allow_changed", "optimizer")
    assert [line["lr"] for line in metrics(output)] == [1e-3, 1e-3, 5e-4, 5e-4]


DIFFERENCES = [
    ("seed", 7, "seed"),
    ("student_config", {"num_layers": 3}, "student"),
    ("guidance_scale", 2.5, "guidance"),
    ("objective", "feature", "objective"),
    ("teacher_deepspeed_config", {"bf16": {"enabled": True}}, "teacher_dtype"),
]


@pytest.mark.parametrize(("key", "value", "name"), slow_but(DIFFERENCES[:1], DIFFERENCES))
@pytest.mark.usefixtures("one_rank", "quiet_logging")
def test_the_difference_is_named(
    key: str, value: object, name: str, trained: Path, wan2: Path, capsys: pytest.CaptureFixture
) -> None:
    more = {"output_dir": str(trained / "run"), "max_steps": 4, key: value}
    assert main(["train", "--recipe", str(recipe_file(trained, wan2, name, **more))]) == 2
    assert f"holds a run with another {name}: " in capsys.readouterr().err
    assert json.loads((trained / "run" / "resolved" / "run.json").read_text())["seed"] == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, wan2: Path) -> Path:
    """A folder with a run of two steps in it."""
    return train(tmp_path_factory.mktemp("trained"), wan2, ranks=1, max_steps=2).parent


def test_metrics_cut_off_in_the_middle_of_a_line_are_mended(trained: Path) -> None:
    file = trained / "run" / "metrics.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"step": 3, "lo')  # a kill while it was written
    wandistiller("train", "--recipe", trained / "run.json", "--max_steps", "3")
    assert file.read_text().startswith(whole)
    assert [line["step"] for line in metrics(trained / "run")] == [1, 2, 3]
