"""Check that a student of another run or stage keeps the latents that it was trained on."""

from pathlib import Path

from wandistiller.config.job import Job
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import ends_of_files
from wandistiller.wan.pipeline import TINY, WanFolder, open_wan


def same_latents_problems(stages: list[Job]) -> list[str]:
    """List the runs whose teacher has another VAE or hand-over than their student's."""
    problems = []
    for job in stages:
        if not (before := _before(job)):
            continue
        other = _other_vaes(before.path, job.folder.path)
        if job.student.experts == "two" and before.boundary not in (None, job.folder.boundary):
            other.append(f"boundary_ratio ({before.boundary}, here {job.folder.boundary})")
        if other:
            stage = f"stage {job.stage}: " if job.stage else ""
            problems.append(
                f"{stage}`teacher_path` is {job.folder.name}, but the student that it starts from was made "
                f"with {before.name}, which has another {', '.join(other)}. A student cannot change these: "
                f"give a teacher that has them too, such as {before.name}."
            )
    return problems


def _before(job: Job) -> WanFolder | None:
    """Return the pipeline whose latents the student was trained with, if it is on this machine."""
    if job.previous:
        return job.previous.folder
    name = job.start.facts.teacher_path if job.start else job.student.init
    if name not in TINY and not (Path(name) / "model_index.json").is_file():
        return None
    try:
        return open_wan(name)
    except ConfigError:
        return None


def _other_vaes(first: Path, second: Path) -> list[str]:
    """Return ["VAE"] if that of two pipelines differs by its files; [] too if one is not on this machine."""
    weights = [
        [ends for name, *ends in ends_of_files([folder / "vae"]) if name.endswith(".safetensors")]
        for folder in (first, second)
    ]
    return ["VAE"] * (all(weights) and weights[0] != weights[1])
