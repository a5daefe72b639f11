"""What the error before training is kept under in the cache."""

from collections.abc import Callable
from pathlib import Path

from recipes import recipe
from safetensors.torch import load_file, save_file

from wandistiller.config.identity import identity, start_identity
from wandistiller.config.job import Job
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job


def job_of(folder: Path, wan: Path, **student: str) -> Job:
    return read_job(RunConfig(**recipe(folder, wan, student_config=student, output_dir="out")), 1)


def test_a_student_of_a_folder_has_another_start_once_the_folder_s_weights_change(
    wan1: Path, copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    init = copy_of(wan1, weights=True)
    job = job_of(tmp_path, wan1, init=str(init))
    before, of_run = start_identity(job), identity(job)
    assert start_identity(job_of(tmp_path, wan1, init=str(init))) == before
    (file,) = (init / "transformer").glob("*.safetensors")
    save_file({name: value * 2 for name, value in load_file(file).items()}, file, {"format": "pt"})
    changed = job_of(tmp_path, wan1, init=str(init))
    assert start_identity(changed) != before and identity(changed) == of_run


def test_the_start_of_a_student_of_its_teacher_is_known_by_the_run_alone(wan1: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path, wan1)
    assert start_identity(job) == identity(job)
