"""Teacher and student are drawn by one sampler."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import write_json
from styles import style

from wandistiller.cli.evaluate import evaluate, read_evaluation
from wandistiller.cli.parser import read
from wandistiller.evaluation.metrics import METRICS, Metric
from wandistiller.network.folder import Folder
from wandistiller.teacher.base import Teacher
from wandistiller.teacher.build import build_teacher
from wandistiller.utils.files import read_json
from wandistiller.wan.pipeline import open_wan


@pytest.mark.usefixtures("one_rank")
def test_a_teacher_draws_at_the_shift_of_the_student_s_run(
    wan2: Path, copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    student = copy_of(wan2, weights=True)  # is its teacher, but for the shift that its run had
    file = student / "scheduler" / "scheduler_config.json"
    write_json(file, read_json(file) | {"flow_shift": 9.0})
    write_json(student / "wandistiller.json", {"teacher_path": str(wan2), "shift": 9.0})
    words = ["evaluate", "--student", student, "--output", tmp_path, "--prompts", "a red circle", "a square"]
    words += ["--height", "32", "--width", "32", "--steps", "2", "--guidance_scale", "1", "--quick"]
    result = evaluate(read_evaluation(read([*map(str, words)])[1], 1))
    assert result["frechet"]["latent"]["same_seeds"]["value"] < 1e-7
    assert result["shift"] == result["teacher_shift"] == 9 != open_wan(str(wan2)).shift
    text = (tmp_path / "evaluation.md").read_text(encoding="utf-8")
    assert re.search(r"timestep shift +\| 9 +\| 9 ", text)


@pytest.mark.usefixtures("one_rank")
def test_a_student_of_adapters_has_the_weights_of_its_teacher_which_are_read_once(
    wan2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read_folders = style(wan2, tmp_path / "lora.safetensors", "to_q"), []

    def counted(folder: Folder, *more: Any, **options: Any) -> Teacher:
        read_folders.append(folder)
        return build_teacher(folder, *more, **options)

    monkeypatch.setattr("wandistiller.evaluation.pipelines.build_teacher", counted)
    words = ["evaluate", "--lora", f"both={file}", "--strength", "1e-30", "--student", wan2, "--quick"]
    words += ["--teacher_path", wan2, "--output", tmp_path, "--prompts", "a red circle", "a square"]
    words += "--height 32 --width 32 --steps 2 --guidance_scale 1 --teacher_deepspeed_config stream".split()
    result = evaluate(read_evaluation(read([*map(str, words), "--dtype", "float32"])[1], 1))
    assert result["relative_velocity_error"]["all"]["value"] < 1e-12 and len(read_folders) == 1
    assert all(result[side]["peak_memory_gib"]["host"] > 0 for side in ("teacher", "student"))


@pytest.mark.usefixtures("one_rank")
def test_a_metric_that_is_added_to_the_list_is_in_the_figures_and_in_the_table(
    wan1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = Metric(name="half", label="a half", compute=lambda drawn: torch.full((len(drawn.prompts),), 0.5))
    for module in ("evaluator", "report"):
        monkeypatch.setattr(f"wandistiller.evaluation.{module}.METRICS", [*METRICS, halves])
    words = ["evaluate", "--student", wan1, "--teacher_path", wan1, "--output", tmp_path, "--quick"]
    words += "--prompts a b --height 32 --width 32 --steps 1 --guidance_scale 1".split()
    result = evaluate(read_evaluation(read([*map(str, words)])[1], 1))
    assert [result[side]["half"]["value"] for side in ("teacher", "student", "ratio")] == [0.5, 0.5, 1.0]
    assert re.search(r"\| a half +\| 0\.5", (tmp_path / "evaluation.md").read_text(encoding="utf-8"))
