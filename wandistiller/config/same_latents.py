"""Check that a student of another run or stage keeps the latents and texts that it was trained on."""

from pathlib import Path

from wandistiller.config.job import Job
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import ends_of_files
from wandistiller.wan.components import VERSIONS, known_config
from wandistiller.wan.pipeline import TINY, WanFolder, open_wan

OF_FILE = (*VERSIONS, "dtype", "torch_dtype", "transformers_version", "architectures")
"""Keys of a config that say how its weights are stored, and by whom."""


def same_latents_problems(stages: list[Job]) -> list[str]:
    """List the runs whose teacher has another VAE, text encoder or hand-over than their student's."""
    problems = []
    for job in stages:
        if not (before := _before(job)):
            continue
        other = _other_parts(before.path, job.folder.path)
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


def _other_parts(first: Path, second: Path) -> list[str]:
    """List in words the parts in which two pipelines differ: by settings, and the VAE also by its files.

    Text encoders are published in several forms of one network. What is not on this machine is left out.
    """
    words = {"vae": "VAE", "text_encoder": "text encoder"}
    other = [word for part, word in words.items() if _other_settings(first / part, second / part)]
    weights = [
        [ends for name, *ends in ends_of_files([folder / "vae"]) if name.endswith(".safetensors")]
        for folder in (first, second)
    ]
    is_other = all(weights) and weights[0] != weights[1]
    return [*dict.fromkeys(["VAE"] * is_other + other)]


def _other_settings(*folders: Path) -> bool:
    try:
        one, other = (known_config(folder / "config.json") for folder in folders)
    except ConfigError:
        return False  # reported where it is read
    return any(one[key] != other[key] for key in one.keys() & other.keys() if key not in OF_FILE)
