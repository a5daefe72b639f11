"""Stages that train the two experts of one student: for one few-step sampler, or refused with both stages."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT
from recipes import recipe

from wandistiller.config.run_config import RunConfig
from wandistiller.config.same_sampler import same_sampler_problems
from wandistiller.config.stages import placing, read_jobs, read_runs, runs_of
from wandistiller.config.validate import read_job
from wandistiller.objectives.registry import read_objective
from wandistiller.utils.errors import ConfigError

MATCH = {"name": "match", "student_config": {"num_layers": 2, "experts": "two"}}
BOTH = {"name": "both", "objective": {"name": "consistency", "edges": 4}}


def stage(expert: str, steps: int, name: str = "", **more: Any) -> dict[str, Any]:
    objective = {"name": "dmd2", "steps": steps, "expert": f"{expert}_noise"}
    return {"name": name or expert, "objective": objective} | more


def problems(folder: Path, wan: Path, *stages: dict[str, Any]) -> list[str]:
    given = {"teacher_path": str(wan), "data_path": "tiny", "output_dir": str(folder / "out"), "height": 64}
    given |= {"width": 64, "max_steps": 2, "shift": 7.0, "stages": [MATCH, *stages]}
    try:
        with placing("r.json", {}):
            read_jobs(runs_of(given, {}, "r.json"), 1, here=False)
    except ConfigError as error:
        return error.problems
    return []


def test_experts_for_different_numbers_of_steps_are_refused_with_both_stages(
    tmp_path: Path, wan2: Path
) -> None:
    assert problems(tmp_path, wan2, stage("high", 4), stage("low", 2)) == [
        "stage low: r.json: `objective` trains the low-noise expert for 2 steps (euler, shift 7), "
        "but stage high the high-noise expert for 4 steps (euler, shift 7). One sampler draws with "
        "both: write the same steps, sampler and shift in both stages.",
    ]


def test_experts_for_different_shifts_are_refused(tmp_path: Path, wan2: Path) -> None:
    (found,) = problems(tmp_path, wan2, stage("high", 4), stage("low", 4, shift=8.0))
    assert "4 steps (euler, shift 8), but stage high" in found


def test_the_last_expert_that_is_refined_must_agree_with_the_other_s(tmp_path: Path, wan2: Path) -> None:
    (found,) = problems(tmp_path, wan2, stage("high", 4), stage("low", 4), stage("high", 2, "again"))
    assert found.startswith("stage again: ") and "but stage low the low-noise expert for 4 steps" in found


@pytest.mark.parametrize(
    "stages",
    [
        [stage("high", 4), stage("low", 4)],
        [BOTH, stage("high", 2), stage("low", 2)],
        [stage("high", 4), stage("high", 2, "high_2"), stage("low", 2)],
        [stage("high", 4), stage("low", 4), stage("high", 2, "high_2"), stage("low", 2, "low_2")],
    ],
    ids=["one sampler", "after consistency", "one refined", "both refined"],
)
def test_experts_may_be_refined_for_fewer_steps_one_after_the_other(
    stages: list[dict[str, Any]], tmp_path: Path, wan2: Path
) -> None:
    assert problems(tmp_path, wan2, *stages) == []


def after_run(folder: Path, wan: Path, *runs: dict[str, Any]) -> list[str]:
    """The problems of the second of two recipes, whose student begins as the first one's ends."""
    job = None
    for number, run in enumerate(runs):
        given = recipe(folder, wan, student_config=MATCH["student_config"], shift=7.0)
        given |= {k: v for k, v in run.items() if k != "name"} | {"output_dir": str(folder / f"{number}")}
        given |= {"student_config": {"init": str(job.output)}} if job else {}
        job = read_job(RunConfig(**given), 1, here=False, previous=job)
    return [*same_sampler_problems([job])]


def test_an_expert_that_an_earlier_run_trained_for_another_sampler_is_named_with_that_run(
    tmp_path: Path, wan2: Path
) -> None:
    (found,) = after_run(tmp_path, wan2, stage("high", 2), stage("low", 4))
    assert found == (
        "`objective` trains the low-noise expert for 4 steps (euler, shift 7), but the run "
        f"{tmp_path / '0'}, which `init` names, the high-noise expert for 2 steps (euler, shift 7). One "
        "sampler draws with both: write the same steps, sampler and shift."
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (stage("high", 4), stage("low", 4)),
        (stage("high", 4), stage("high", 2)),
        ({"objective": "velocity", "shift": 3.0}, stage("low", 4)),
    ],
    ids=["one sampler", "the same expert", "any steps"],
)
def test_a_run_may_follow_one_with_its_sampler_or_of_the_same_expert_or_of_any_steps(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path, wan2: Path
) -> None:
    assert after_run(tmp_path, wan2, before, after) == []


def test_the_command_of_the_page_makes_every_stage_of_four_steps_one_of_two(tmp_path: Path) -> None:
    (command,) = re.findall(r"`(sed .*?)`", (ROOT / "docs" / "few_steps.md").read_text())
    command, _, file = command.partition(" > ")
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    (tmp_path / file).write_text(done.stdout)
    runs = read_runs(str(tmp_path / file), {})
    steps = {name: read_objective(run.objective).sampling_steps for name, run in runs.items()}
    assert steps == {"match": None, "consistency": 2, "high": 2, "low": 2}
