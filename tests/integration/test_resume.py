"""A run that goes on with another setting: refused, unless that is allowed."""

from pathlib import Path

import pytest
from ranks import metrics, wandistiller
from recipes import student_engine, train


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
