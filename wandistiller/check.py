"""Reads and checks a run as a whole before any weight is loaded: every problem at once, on every rank."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandistiller import checkpoint, deepspeed_json, distributed
from wandistiller.conditioning import Item, read_items
from wandistiller.config import ConfigError, RunConfig, problem, read_json, unknown_keys
from wandistiller.deepspeed_json import BatchSize
from wandistiller.engines import config_problems
from wandistiller.job import Job
from wandistiller.objectives import OBJECTIVES, VelocityMatching, objective_keys
from wandistiller.placement import device_map_problems, read_placement, without_block
from wandistiller.student_config import read_student_config
from wandistiller.student_json import Asked, fill_auto, fill_steps, write_in
from wandistiller.wan import WanFolder, open_wan, top_modules


@dataclass(frozen=True, slots=True)
class Usual:
    """How a teacher is usually sampled; what a run takes where it says nothing."""

    height: int
    width: int
    guidance: tuple[float, float]
    """High-noise and low-noise expert. Source: Wan's own configs, wan/configs/*.py; ours for the embedded teacher."""


WAN21 = Usual(480, 832, (5.0, 5.0))  # one expert
WAN22 = Usual(480, 832, (4.0, 3.0))
EMBEDDED = Usual(64, 64, (2.0, 2.0))


@contextmanager
def _collecting(found: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        found += error.problems


def read_job(run: RunConfig, world: int) -> Job:
    """Check a run against its teacher, data, student and engines. Reads JSON and text files, no weights.

    Raises:
        ConfigError: with every problem found.
    """
    found: list[str] = []
    parts: dict[str, Any] = {}
    with _collecting(found):
        parts["folder"] = open_wan(run.teacher_path, revision=run.teacher_revision)
    with _collecting(found):
        parts["items"] = read_items(run.data_path)
    if "folder" in parts:
        with _collecting(found):
            where, values = ("recipe", run.student_config) if isinstance(run.student_config, dict) else (
                run.student_config, read_json(run.student_config))  # fmt: skip
            parts["student"], parts["student_transformer"] = read_student_config(where, values, parts["folder"])
    with _collecting(found):
        where, ds = _student_json(run, parts, world)
        parts["student_ds"], parts["batch"] = deepspeed_json.student_engine(where, ds, world)
        found += config_problems(where, parts["student_ds"])
    with _collecting(found):
        where, ds = deepspeed_json.load(run.teacher_deepspeed_config)
        parts["teacher_ds"] = deepspeed_json.teacher_engine(where, deepspeed_json.with_dtype(ds, run.teacher_dtype), world)
        found += config_problems(where, without_block(parts["teacher_ds"]))
    with _collecting(found):
        parts["objective"] = _read_objective(run.objective)
    if "folder" in parts:
        folder = parts["folder"]
        run = _complete(run, folder, parts.get("items", []), parts.get("batch"))
        found += _device_map_problems(run, parts)
        found += folder.size_problems(run.height, run.width, run.num_frames)
    found += _block_problems(run, parts) + _folder_problems(run)
    if found:
        raise ConfigError(*found)
    job = Job(run=run, resume_from=checkpoint.find(Path(run.output_dir), run.resume), **parts)
    if job.resume_from:
        checkpoint.check_identity(job.resume_from, job.identity)
    return job


def _student_json(run: RunConfig, parts: dict[str, Any], world: int) -> tuple[str, dict[str, Any]]:
    """The student's DeepSpeed JSON with short flags written in and "auto" filled: (name for messages, content)."""
    where, ds = deepspeed_json.load(run.deepspeed_config)
    asked = Asked(**{f.name: getattr(run, f.name) for f in dataclasses.fields(Asked)})
    config = parts.get("student_transformer") or {"num_attention_heads": 1, "attention_head_dim": 1}  # its fault is said
    ds = fill_auto(write_in(ds, asked), config["num_attention_heads"] * config["attention_head_dim"])
    try:
        total = deepspeed_json.batch_size(where, ds, world).total
    except ConfigError:
        return where, ds  # said when the engine is checked
    return where, fill_steps(ds, _max_steps(run, parts.get("items", []), total))


def _max_steps(run: RunConfig, items: list[Item], global_batch: int) -> int:
    if run.num_epochs:
        return -(-run.num_epochs * len(items) * run.rollouts_per_prompt // global_batch)
    return run.max_steps or 1000


def _read_objective(given: str | dict[str, Any]) -> VelocityMatching:
    settings = {"name": given} if isinstance(given, str) else dict(given)
    name = settings.pop("name", "velocity")
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise ConfigError(problem("recipe", "objective", name, f"Write one of: {', '.join(OBJECTIVES)}."))
    if found := unknown_keys("recipe", settings, objective_keys(name), "objective."):
        raise ConfigError(*found)
    objective = OBJECTIVES[name](**settings)
    if found := objective.problems():
        raise ConfigError(*found)
    return objective


def _complete(run: RunConfig, folder: WanFolder, items: list[Item], batch: BatchSize | None) -> RunConfig:
    """Put the teacher's own values where the run says nothing."""
    usual = EMBEDDED if folder.is_tiny else WAN21 if folder.boundary is None else WAN22
    scale = usual.guidance[0] if run.guidance_scale is None else run.guidance_scale
    default_2 = usual.guidance[1] if run.guidance_scale is None else scale  # as diffusers does
    return dataclasses.replace(
        run,
        guidance_scale=scale,
        guidance_scale_2=run.guidance_scale_2 if run.guidance_scale_2 is not None else default_2,
        shift=run.shift or folder.shift,
        height=run.height or usual.height,
        width=run.width or usual.width,
        max_steps=_max_steps(run, items, batch.total if batch else 1),
        num_epochs=None,
        teacher_dtype=None, batch_size=None, lr=None, mixed_precision=None, gradient_checkpointing=False,  # in the JSONs now
        sample_prompts=run.sample_prompts or [i.prompt for i in items[:: max(1, len(items) // 8)][:8]],
    )


def _device_map_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    ds = parts.get("teacher_ds", {})
    if not ds or distributed.rank() != read_placement(ds).owner_rank:
        return []
    where, _ = deepspeed_json.load(run.teacher_deepspeed_config)
    return device_map_problems(where, ds, top_modules(parts["folder"].config), distributed.number_of_gpus())


def _folder_problems(run: RunConfig) -> list[str]:
    """Folders to write to that cannot be made because a file is in the way."""
    found = []
    for key in ("output_dir", "cache_dir"):
        path = Path(getattr(run, key) or ".").absolute()
        if blocking := next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None):
            found.append(f"`{key}` is {getattr(run, key)}, but {blocking} is a file. Name a folder.")
    return found


def _block_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """Micro-steps must fit into expert blocks, or ranks would need different experts at once."""
    batch, found = parts.get("batch"), []
    if batch and batch.total % (run.expert_blocks * batch.micro * batch.ranks):
        found.append(f"`expert_blocks` is {run.expert_blocks}, but a step has {batch.accumulation} micro-step(s). "
                     "Write a divisor of that, so that a micro-step needs one expert.")  # fmt: skip
    if "student" in parts and parts["student"].experts == "two" and run.expert_blocks != 1:
        found.append(f"`expert_blocks` is {run.expert_blocks}. A student with two experts trains one in a step; write 1.")
    if run.num_frames > 1 and (still := [i for i in parts.get("items", []) if i.media and i.media.suffix.lower() in
                                         (".png", ".jpg", ".jpeg", ".webp", ".bmp")]):  # fmt: skip
        found.append(f"`num_frames` is {run.num_frames}, but {still[0].media} is an image. Write 1, or give videos.")
    return found
