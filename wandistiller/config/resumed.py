"""A run beside its checkpoints: whether they are of this run, and the start of the run that follows it."""

import json

from wandistiller.batch import STUDENT
from wandistiller.checkpoint import resume
from wandistiller.checkpoint.difference import NAMED
from wandistiller.checkpoint.loading import ENGINE, network_name, read_state
from wandistiller.config.identity import end, recorded
from wandistiller.config.job import Job
from wandistiller.config.start import Start, read_start
from wandistiller.data.media_record import RECORD, replaced_media
from wandistiller.student.config import IMPORTANCE
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json
from wandistiller.wan.transformer import shapes
from wandistiller.wan.transformer_config import TransformerConfig


def resumed(job: Job) -> Job:
    """Return the job with measured layers as in its checkpoint, which must be of this run.

    Raises:
        ConfigError: with every difference.
    """
    kept = read_state(job.resume_from)["facts"].get("keep_layers")
    if job.student.keep_layers == IMPORTANCE and isinstance(kept, list):
        job = job.with_layers(kept)
    allowed = job.run.allow_changed or []
    resume.changed_keys(job.resume_from, recorded(job), allowed)
    problems = _network_problems(job) + ([] if "data" in allowed else _media_problems(job))
    if problems:
        raise ConfigError(*problems)
    return job


def _media_problems(job: Job) -> list[str]:
    """Name the media that were replaced under their names since the checkpoint's run began."""
    names = replaced_media(job.resume_from.absolute().parents[1] / RECORD, job.run.data_path)
    named = ", ".join(names[:NAMED] + ["..."] * (len(names) > NAMED))
    why = f"{len(names)} of the run's media were replaced since it began: {named}."
    remedy = (
        "Put them back, give another --output_dir, --resume never to start anew, or --allow_changed data."
    )
    return [f"{job.resume_from}: {why} {remedy}"] if names else []


def _network_problems(job: Job) -> list[str]:
    """List trained networks that the checkpoint has not, or has in another shape."""
    networks = {network_name(STUDENT, expert): job.student_transformer for expert in job.trained_experts}
    for role, other in job.others.items():
        networks |= {network_name(role, expert): other.transformer for expert in job.trained_experts}
    problems = []
    for name, config in networks.items():
        file = job.resume_from / name / ENGINE
        saved = json.loads(file.read_text())["shapes"] if file.is_file() else {}
        if not saved or _differ(saved, config):
            what = "another" if saved else "no"
            problems.append(
                f"{job.resume_from}: holds {what} network `{name}`, which {job.objective} trains. "
                "Give another --output_dir, whose student begins with this one: "
                f'"student_config": {{"init": "{job.output}"}}.'
            )
    return problems


def _differ(saved: dict[str, list[int]], config: TransformerConfig) -> bool:
    """Return whether a parameter that both have is of two shapes; adapters and heads are in one alone."""
    own = shapes(config)
    return any(own.get(name, shape) != shape for name, shape in saved.items())


def end_of(job: Job) -> Start:
    """Return the start of a run that follows `job`: what a finished one left, or what another will."""
    if job.resume_from and read_state(job.resume_from)["step"] >= job.run.max_steps:
        return read_start(str(job.output)) or end(job)
    if job.student.keep_layers == IMPORTANCE and (file := job.output / "lineage.json").is_file():
        kept = next(iter(read_json(file).values())).get("kept_layers")  # of checkpoints that are gone
        job = job.with_layers(kept) if isinstance(kept, list) else job
    return end(job)
