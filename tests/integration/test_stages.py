"""Stages of one recipe are runs of their own: each starts from the float32 weights of the one before."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import equal
from ranks import losses, metrics, wandistiller, write_json
from recipes import recipe, train

from wandistiller.checkpoint import loading
from wandistiller.checkpoint.facts import Facts
from wandistiller.cli.main import main
from wandistiller.experts import Expert
from wandistiller.utils.files import FACTS

MATCH = {"name": "match", "max_steps": 3, "ema": 0.5}
CONSISTENCY = {"name": "consistency", "max_steps": 2, "objective": {"name": "consistency", "edges": 2}}
DMD2 = {"name": "dmd2", "max_steps": 2, "objective": {"name": "dmd2", "steps": 2, "critic_updates": 1}}
STAGES = [MATCH, CONSISTENCY, DMD2]
FOLDERS = ("1_match", "2_consistency", "3_dmd2")


def staged(folder: Path, wan: Path, name: str, **more: Any) -> Path:
    """Write a recipe of three stages; return its file."""
    usual = {"output_dir": str(folder / name), "stages": STAGES, "save_every": 1, "sample_prompts": []}
    given = recipe(folder, wan, **usual | more)
    del given["max_steps"]
    return write_json(folder / f"{name}.json", given)


def weights(run: Path, step: int, *, averaged: bool = False) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step_{step:08d}"
    return {k: v.clone() for k, v in loading.read_weights(folder, Expert.HIGH_NOISE, averaged)}


@pytest.fixture(scope="module")
def whole(folder: Path, wan2: Path) -> Path:
    """The output of three stages on one rank."""
    wandistiller("train", "--recipe", staged(folder, wan2, "whole"))
    return folder / "whole"


def test_each_stage_is_a_run_folder_and_the_student_is_the_last_one_s(whole: Path) -> None:
    for name in FOLDERS:
        assert {"DONE", "metrics.jsonl", "checkpoints", "student", "logs"} <= {
            file.name for file in (whole / name).iterdir()
        }
    last, student = (whole / name / "student" for name in ("3_dmd2", "."))
    names = {str(file.relative_to(last)) for file in last.rglob("*") if file.is_file()}
    assert all((last / name).read_bytes() == (student / name).read_bytes() for name in names)
    assert Facts.read(student / FACTS).steps == 2 and json.loads((whole / "DONE").read_text())["stages"]


@pytest.mark.slow
def test_a_stage_equals_a_run_of_its_own_that_starts_from_the_folder_of_the_one_before(
    folder: Path, wan2: Path, whole: Path
) -> None:
    own = {key: value for key, value in CONSISTENCY.items() if key != "name"}
    alone = train(folder, wan2, "alone", ranks=1, student_config={"init": str(whole / FOLDERS[0])}, **own)
    assert losses(alone) == losses(whole / FOLDERS[1])
    assert equal(weights(alone, 2), weights(whole / FOLDERS[1], 2))


@pytest.mark.slow
def test_a_stage_starts_from_the_average_of_the_one_before_in_float32(
    folder: Path, wan2: Path, whole: Path
) -> None:
    given = staged(folder, wan2, "slow", stages=[MATCH, CONSISTENCY | {"max_steps": 1, "lr": 1e-30}])
    text = given.read_text().replace('"lr": 0.001', '"lr": "auto"')
    given.write_text(text.replace('"name": "match"', '"name": "match", "lr": 0.001'))
    wandistiller("train", "--recipe", given)
    before = weights(folder / "slow" / FOLDERS[0], 3, averaged=True)
    assert equal(weights(folder / "slow" / FOLDERS[1], 1), before)
    assert not equal(weights(folder / "slow" / FOLDERS[0], 3), before)


def test_a_finished_recipe_trains_no_step_again(folder: Path, wan2: Path, whole: Path) -> None:
    before = [metrics(whole / name) for name in FOLDERS]
    done = wandistiller("train", "--recipe", folder / "whole.json")
    assert done.stderr.count("steps are done") == 3
    command = f"wandistiller evaluate --student_path {whole / 'student'} --prompts {folder / 'prompts.txt'}"
    assert f"next      {command}\n" in done.stderr
    assert [metrics(whole / name) for name in FOLDERS] == before


@pytest.mark.slow
def test_a_later_stage_takes_a_changed_rate_that_a_finished_one_was_not_trained_with(
    folder: Path, wan2: Path, whole: Path
) -> None:
    text = (folder / "whole.json").read_text().replace('"lr": 0.001', '"lr": 0.002')
    (folder / "faster.json").write_text(text)
    words = ["train", "--recipe", folder / "faster.json", "--dry_run"]
    wandistiller(*words, "--allow_changed", "optimizer")
    assert "holds a run with another optimizer" in wandistiller(*words, code=2).stderr


@pytest.mark.slow
def test_the_settings_as_they_ran_are_a_recipe_of_the_same_stages(folder: Path, whole: Path) -> None:
    written = whole / "resolved" / "run.json"
    assert [stage["name"] for stage in json.loads(written.read_text())["stages"]] == [
        s["name"] for s in STAGES
    ]
    assert wandistiller("train", "--recipe", written).stderr.count("steps are done") == 3
    alone = whole / FOLDERS[1] / "resolved" / "run.json"
    assert "steps are done" in wandistiller("train", "--recipe", alone).stderr


@pytest.mark.slow
def test_never_starts_all_stages_anew(folder: Path, wan2: Path) -> None:
    file = staged(folder, wan2, "anew", stages=[MATCH, CONSISTENCY])
    wandistiller("train", "--recipe", file)
    wandistiller("train", "--recipe", file, "--resume", "never")
    assert all((folder / "anew" / name / "checkpoints.old1").is_dir() for name in FOLDERS[:2])


@pytest.mark.slow
def test_prepare_fills_one_cache_for_all_stages(folder: Path, wan2: Path) -> None:
    own = folder / "own_cache"
    file = staged(folder, wan2, "prepared", cache_dir=str(own))
    wandistiller("prepare", "--recipe", file)

    def files() -> dict[Path, int]:
        found = (path for path in own.rglob("*.safetensors") if "measured" not in path.parts)
        return {path: path.stat().st_mtime_ns for path in found}

    before = files()
    assert before and not (folder / "prepared" / FOLDERS[0] / "metrics.jsonl").exists()
    wandistiller("train", "--recipe", file)
    assert files() == before


def test_a_changed_earlier_stage_is_refused_before_anything_runs(
    folder: Path, wan2: Path, whole: Path
) -> None:
    changed = staged(
        folder, wan2, "changed", output_dir=str(whole), stages=[MATCH | {"max_steps": 4}, *STAGES[1:]]
    )
    error = wandistiller("train", "--recipe", changed, code=2).stderr
    assert "stage consistency" in error and "another student" in error
    assert len(losses(whole / FOLDERS[0])) == 3


@pytest.mark.slow
def test_a_report_has_all_stages_on_one_page(whole: Path) -> None:
    assert main(["report", str(whole)]) == 0
    page = (whole / "report" / "index.html").read_text()
    places = [page.index(f"Stage {number}: {stage['name']}") for number, stage in enumerate(STAGES, 1)]
    assert places == sorted(places) and page.count('alt="gradient norm"') == len(STAGES)


def copied(whole: Path, target: Path) -> Path:
    """A copy of the three stages, and the recipe for it."""
    shutil.copytree(whole, target / "copy")
    return write_json(
        target / "copy.json",
        json.loads((whole.parent / "whole.json").read_text()) | {"output_dir": str(target / "copy")},
    )


@pytest.mark.slow
def test_a_stage_whose_checkpoints_were_deleted_after_the_next_began_is_not_trained_again(
    tmp_path: Path, whole: Path
) -> None:
    recipe, first = copied(whole, tmp_path), tmp_path / "copy" / FOLDERS[0]
    shutil.rmtree(first / "checkpoints")
    text = recipe.read_text().replace('"name": "dmd2", "max_steps": 2', '"name": "dmd2", "max_steps": 3')
    recipe.write_text(text)
    done = wandistiller("train", "--recipe", recipe)
    assert "stage     match is done" in done.stderr and not (first / "checkpoints").exists()
    assert (first / "DONE").is_file() and (first / "student").is_dir()
    assert len(losses(tmp_path / "copy" / FOLDERS[2])) == 3


@pytest.mark.usefixtures("one_rank", "quiet_logging")
def test_a_finished_stage_without_checkpoints_that_is_needed_is_an_error_that_says_what_to_do(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe, output = copied(whole, tmp_path), tmp_path / "copy"
    for name in FOLDERS[1:]:
        shutil.rmtree(output / name / "checkpoints")
    assert main(["train", "--recipe", str(recipe), "--dry_run"]) == 2
    error = capsys.readouterr().err
    for name, stage in zip(FOLDERS[1:], STAGES[1:], strict=True):
        assert f"stage {stage['name']}: {output / name}: this run is done (the file DONE)" in error
        assert f'{{"init": "{output / name / "student"}"}}' in error
    assert main(["train", "--recipe", str(recipe), "--dry_run", "--resume", "never"]) == 0


@pytest.mark.usefixtures("one_rank", "quiet_logging")
def test_a_recipe_of_other_stages_or_of_none_does_not_replace_the_student(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture
) -> None:
    given = json.loads((whole.parent / "whole.json").read_text())
    del given["stages"]
    plain, renamed = (given | more for more in ({"max_steps": 2}, {"stages": [STAGES[1], STAGES[0]]}))
    for number, other in enumerate((plain, renamed)):
        assert (
            main(["train", "--recipe", str(write_json(tmp_path / f"{number}.json", other)), "--dry_run"]) == 2
        )
        error = capsys.readouterr().err
        assert f"`output_dir` is {whole}, where " in error and "1_match, 2_consistency" in error
    staged_there = given | {"output_dir": str(whole / FOLDERS[0]), "stages": STAGES}
    assert main(["train", "--recipe", str(write_json(tmp_path / "2.json", staged_there)), "--dry_run"]) == 2
    assert "where a recipe without stages ran" in capsys.readouterr().err
