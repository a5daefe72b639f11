"""Check that a student of another run or stage keeps the latents and texts that it was trained on."""

from pathlib import Path

from wandistiller.config.job import Job
from wandistiller.utils.errors import ConfigError
from wandistiller.wan.pipeline import TINY, WanFolder, open_wan
from wandistiller.wan.same_parts import other_parts


def same_latents_problems(stages: list[Job]) -> list[str]:
    """List the runs whose teacher has another VAE, text encoder or hand-over than their student's."""
    problems = []
    for job in stages:
        if not (before := _before(job)):
            continue
        other = other_parts(before.path, job.folder.path)
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
    """Return the pipeline whose latents and texts the student was trained with, if it is on this machine."""
    if job.previous:
        return job.previous.folder
    name = job.start.facts.teacher_path if job.start else job.student.init
    if name not in TINY and not (Path(name) / "model_index.json").is_file():
        return None
    try:
        return open_wan(name)
    except ConfigError:
        return None
