"""Errors as a user meets them: all at once, and once each."""

from collections.abc import Callable
from pathlib import Path

import pytest
from wrong_input.cases import Case, outcome

from wandistiller.teacher.placements import device_map
from wandistiller.utils.errors import ConfigError, nearest


@pytest.fixture
def errors(tmp_path: Path, wan2: Path, one_rank: object, quiet_logging: None) -> Callable[[Case], list[str]]:
    """A function that runs a case in this process, and returns the messages."""

    def refused(case: Case) -> list[str]:
        result = outcome(case.write(tmp_path / "case", wan2), tmp_path / "case")
        assert (result.code, result.wrote) == (2, [])
        return [error.removeprefix("error: ") for error in result.errors]

    return refused


def test_everything_wrong_in_every_file_is_reported_at_once(errors: Callable[[Case], list[str]]) -> None:
    files = {"student.json": {"a": 1}, "engine.json": {"b": 1}, "placement.json": {"c": 1}}
    problems = errors(Case("", (), files, {"data_path": "none.txt", "height": 100, "objective": "x"}))
    assert len(problems) == len(set(problems)) == 7  # the student's engine lacks batch and optimizer too


def test_all_that_does_not_go_together_is_reported_at_once(errors: Callable[[Case], list[str]]) -> None:
    misfits = {"height": 100, "frozen": ["block.0"], "cache_dir": "/proc/cache"}
    assert len(errors(Case("", (), recipe=misfits))) == len(misfits)


def test_a_teacher_without_weights(
    wan2: Path, errors: Callable[[Case], list[str]], copy_of: Callable[..., Path]
) -> None:
    teacher = copy_of(wan2)  # the JSON files alone
    parts = ("transformer", "transformer_2", "vae", "text_encoder")
    lines = [f"{teacher}: no .safetensors file in {part}/. Give the whole pipeline." for part in parts]
    assert errors(Case("", (), recipe={"teacher_path": str(teacher)})) == lines


def test_a_teacher_on_nvme_without_async_io(
    errors: Callable[[Case], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/bin/false")  # as where no compiler or no libaio is
    file = "ds_configs/teacher/zero_inference_nvme.json"
    (error,) = errors(Case("", (), flags=("--teacher_deepspeed_config", file)))
    key = "zero_optimization.offload_param.device"
    assert error.startswith(f'{file}: `{key}` is "nvme". DeepSpeed\'s async_io cannot')


def test_a_device_map_without_accelerate(
    errors: Callable[[Case], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_map, "find_spec", lambda name: None)
    (error,) = errors(Case("", (), flags=("--teacher_device_strategy", "sequential")))
    assert error.endswith("the placement device_map needs accelerate. Run: pip install accelerate")


def test_what_is_no_text_resembles_no_name() -> None:
    assert nearest(None, ["Muon"]) == nearest(3, ["3x"]) == "" and nearest("muom", ["Muon"])


def test_a_problem_that_is_found_twice_is_said_once() -> None:
    error = ConfigError("one", "two", "one")
    assert error.problems == ["one", "two"] and str(error) == "one\ntwo"
