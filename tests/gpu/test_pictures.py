"""Samples and scores drawn on a GPU, to which accelerate moves the pipelines. Never run by the authors."""

from pathlib import Path

import pytest
from gpu import KIND, on_gpu
from ranks import wandistiller

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory, wan2: Path) -> Path:
    return on_gpu(tmp_path_factory.mktemp("gpu"), wan2, max_steps=2) / "student"


def test_a_student_draws_on_a_gpu(student: Path, tmp_path: Path) -> None:
    words = ["--prompts", "a red circle", "a blue square", "--steps", "2", "--output", tmp_path]
    wandistiller("sample", "--model", student, *words, accelerator=KIND)
    assert len(list(tmp_path.rglob("*.png"))) >= 2


def test_teacher_and_student_are_compared_on_a_gpu(student: Path, tmp_path: Path) -> None:
    words = ["--num_prompts", "2", "--steps", "2", "--output", tmp_path]
    wandistiller("evaluate", "--student", student, *words, accelerator=KIND)
    assert (tmp_path / "evaluation.png").is_file()
