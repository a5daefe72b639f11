"""Reads and checks a run as a whole before any weight is loaded: every problem at once, on every rank."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wandistiller import deepspeed_json, distributed, resume
from wandistiller.checkpoint import read_state
from wandistiller.config import AUTO, DEFAULT_ENGINE, RunConfig, read_json
from wandistiller.deepspeed_json import BatchSize
from wandistiller.engines import config_problems
from wandistiller.items import Items, Kind, read_items
from wandistiller.job import Job
from wandistiller.latents import path_sigmas
from wandistiller.media import video_problem
from wandistiller.memory import numels
from wandistiller.noise import FlowSchedule
from wandistiller.objectives import PATH, read_objective
from wandistiller.placement import device_map_problems, read_placement, without_block
from wandistiller.problems import ConfigError, folder_problems, problem, readable
from wandistiller.recompute import SECTION, recompute_problems, with_number
from wandistiller.student_config import IMPORTANCE, read_student_config
from wandistiller.student_json import Asked, fill_auto, fill_steps, write_in
from wandistiller.swap import lock_problems, locked_bytes
from wandistiller.tuning import tuning_problems
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


def usual_for(folder: WanFolder) -> Usual:
    """How the teacher in `folder` is usually sampled."""
    return EMBEDDED if folder.is_tiny else WAN21 if folder.boundary is None else WAN22


@contextmanager
def collecting(found: list[str]) -> Iterator[None]:
    """Go on after wrong input, and keep what was said of it."""
    try:
        with readable():
            yield
    except ConfigError as error:
        found += error.problems


@readable()
def read_job(run: RunConfig, world: int, *, here: bool = True) -> Job:
    """Check a run against its teacher, data, student, engines, and, if it is to be `here`, this machine. Reads no weights.

    Raises:
        ConfigError: with every problem found.
    """
    found: list[str] = []
    parts: dict[str, Any] = {}
    with collecting(found):
        parts["folder"] = open_wan(run.teacher_path, revision=run.teacher_revision)
    with collecting(found):
        parts["items"] = read_items(run.data_path)
    if "folder" in parts:
        with collecting(found):
            where, values = ("recipe", run.student_config) if isinstance(run.student_config, dict) else (
                run.student_config, read_json(run.student_config))  # fmt: skip
            parts["student"], parts["student_transformer"] = read_student_config(where, values, parts["folder"])
    with collecting(found):
        where, ds = _student_json(run, parts, world)
        parts["student_ds"], parts["batch"] = deepspeed_json.student_engine(where, ds, world)
        found += config_problems(where, without_block(parts["student_ds"]), here=here)
    with collecting(found):
        where, ds = deepspeed_json.load(run.teacher_deepspeed_config)
        parts["teacher_ds"] = deepspeed_json.teacher_engine(where, deepspeed_json.with_dtype(ds, run.teacher_dtype), world)
        found += config_problems(where, without_block(parts["teacher_ds"]), here=here)
    with collecting(found):
        parts["objective"] = read_objective(run.objective)
        run = dataclasses.replace(run, rollout_path=run.rollout_path or PATH in parts["objective"].states)
    if "folder" in parts:
        folder = parts["folder"]
        run = _complete(run, folder, parts.get("items"), parts.get("batch"))
        found += _device_map_problems(run, parts, distributed.number_of_gpus() if here else world)
        found += folder.size_problems(run.height, run.width, run.num_frames)
        found += _objective_problems(run, parts) if "objective" in parts else []
    if run.profile_memory and run.max_steps and run.profile_memory > run.max_steps:
        found.append(f"`profile_memory` is {run.profile_memory}, but the run ends with step {run.max_steps}. Write a step of it.")
    found += block_problems(run, parts) + _media_problems(run, parts) + _folder_problems(run) + here * _unlockable(parts, world)
    found += [problem("command line", "allow_changed", key, f"Write keys among: {', '.join(resume.CHANGEABLE)}.")
              for key in run.allow_changed or () if key not in resume.CHANGEABLE]  # fmt: skip
    if {"student_transformer", "student_ds"} <= parts.keys():
        found += tuning_problems(run, parts["student_transformer"], parts["student_ds"])
    if found:
        raise ConfigError(*found)
    job = Job(run=run, resume_from=resume.find(Path(run.output_dir), run.resume), **parts)
    return _resumed(job) if job.resume_from else job


def _unlockable(parts: dict[str, Any], world: int) -> list[str]:
    """Buffers of all engines of a rank that are to stay in memory, which not every user may ask for."""
    engines = ((parts.get("teacher_ds"), parts["folder"].config if "folder" in parts else None),
               (parts.get("student_ds"), parts.get("student_transformer")))  # fmt: skip
    locked = [locked_bytes(ds, numels(config).values(), world, getattr(torch, deepspeed_json.dtype_name(ds)).itemsize)
              for ds, config in engines if ds and config]  # fmt: skip
    return lock_problems(sum(locked))


def _resumed(job: Job) -> Job:
    """The run with the layers that its checkpoint's student was found to keep, if that is this run's."""
    recorded = read_state(job.resume_from)["facts"].get("keep_layers")
    if job.student.keep_layers == IMPORTANCE and isinstance(recorded, list):
        job = job.with_layers(recorded)
    resume.changed_keys(job.resume_from, job.identity, job.run.allow_changed or [])
    return job


def _student_json(run: RunConfig, parts: dict[str, Any], world: int) -> tuple[str, dict[str, Any]]:
    """The student's DeepSpeed JSON with short flags written in and "auto" filled: (name for messages, content)."""
    where, ds = deepspeed_json.load(DEFAULT_ENGINE if run.deepspeed_config == AUTO else run.deepspeed_config)
    asked = Asked(**{f.name: getattr(run, f.name) for f in dataclasses.fields(Asked)})
    unknown = {"num_attention_heads": 1, "attention_head_dim": 1, "num_layers": 1}  # its fault is said
    config = parts.get("student_transformer") or unknown
    ds = fill_auto(write_in(ds, asked), config["num_attention_heads"] * config["attention_head_dim"])
    try:
        total = deepspeed_json.batch_size(where, ds, world).total
    except ConfigError:
        return where, ds  # said when the engine is checked
    if isinstance(ds.get(SECTION), dict) and not recompute_problems(where, ds):
        ds = with_number(ds, config["num_layers"])
    return where, fill_steps(ds, _max_steps(run, parts.get("items"), total))


def _max_steps(run: RunConfig, items: Items | None, global_batch: int) -> int:
    return _steps_of(run.num_epochs, run, items, global_batch) if run.num_epochs else run.max_steps or 1000


def _steps_of(epochs: int, run: RunConfig, items: Items | None, global_batch: int) -> int:
    samples = items.samples(run.rollouts_per_prompt) if items else 1  # what is wrong with the data is said elsewhere
    return -(-epochs * samples // global_batch)


def _objective_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """Blocks and cached paths that the objective needs and the run does not have."""
    objective, folder, found = parts["objective"], parts["folder"], []
    if (term := objective.feature_term) and "student_transformer" in parts:
        networks = {"blocks": parts["student_transformer"], "teacher_blocks": folder.config}
        for key, layers in ((key, config["num_layers"]) for key, config in networks.items()):
            if wrong := [k for k in getattr(term, key) or [] if not 0 <= k < layers]:
                found.append(problem("recipe", f"objective.{key}", wrong, f"Write block numbers from 0 to {layers - 1}."))
    if PATH in objective.states:
        if "items" in parts and (given := parts["items"].first(Kind.IMAGE, Kind.VIDEO, Kind.GIF)):
            found.append(f"`objective` has trajectory, which follows the teacher's own path, but {given.media} has none. "
                         "Take the media out of the data, or trajectory out of the objective.")  # fmt: skip
        schedule = FlowSchedule(run.shift, folder.boundary, run.seed, global_batch=1)
        sigmas = path_sigmas(folder, run.shift, run.rollout_steps)
        if any(not schedule.segments(expert, sigmas) for expert in folder.configs):
            found.append(f"`rollout_steps` is {run.rollout_steps}: no step of the teacher's path begins below its boundary "
                         f"{folder.boundary}, so trajectory cannot train there. Write a larger number.")  # fmt: skip
    return found


def _complete(run: RunConfig, folder: WanFolder, items: Items | None, batch: BatchSize | None) -> RunConfig:
    """Put the teacher's own values where the run says nothing."""
    usual = usual_for(folder)
    scale = usual.guidance[0] if run.guidance_scale is None else run.guidance_scale
    default_2 = usual.guidance[1] if run.guidance_scale is None else scale  # as diffusers does
    total = batch.total if batch else 1
    return dataclasses.replace(
        run,
        guidance_scale=scale,
        guidance_scale_2=run.guidance_scale_2 if run.guidance_scale_2 is not None else default_2,
        shift=run.shift or folder.shift,
        video_fps=run.video_fps or float(folder.fps),
        height=run.height or usual.height,
        width=run.width or usual.width,
        max_steps=_max_steps(run, items, total),
        num_epochs=None,
        sample_every=_steps_of(run.sample_interval, run, items, total) if run.sample_interval else run.sample_every,
        sample_interval=None,
        teacher_dtype=None, batch_size=None, lr=None, mixed_precision=None, gradient_checkpointing=False,  # in the JSONs now
        sample_prompts=run.sample_prompts or _spread(items),
    )


def _device_map_problems(run: RunConfig, parts: dict[str, Any], gpus: int) -> list[str]:
    ds = parts.get("teacher_ds", {})
    if not ds or distributed.local_rank() != read_placement(ds).owner_rank or not isinstance(read_placement(ds).device_map, dict):
        return []
    where, _ = deepspeed_json.load(run.teacher_deepspeed_config)
    return device_map_problems(where, ds, top_modules(parts["folder"].config), gpus)


def _folder_problems(run: RunConfig) -> list[str]:
    """Folders to write to that cannot be."""
    keys = ("output_dir", "cache_dir", "sample_dir")
    return [p for key in keys if getattr(run, key) for p in folder_problems(key, getattr(run, key))]


def block_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """Micro-steps must fit into expert blocks, or ranks would need different experts at once."""
    batch, found = parts.get("batch"), []
    if batch and batch.total % (run.expert_blocks * batch.micro * batch.ranks):
        found.append(f"`expert_blocks` is {run.expert_blocks}, but a step has {batch.accumulation} micro-step(s). "
                     "Write a divisor of that, so that a micro-step needs one expert.")  # fmt: skip
    if "student" in parts and parts["student"].experts == "two" and run.expert_blocks != 1:
        found.append(f"`expert_blocks` is {run.expert_blocks}. A student with two experts trains one in a step; write 1.")
    return found


def _spread(items: Items | None) -> list[str]:
    """Up to 8 prompts, from all over the data."""
    return [items[i].prompt for i in range(0, len(items), max(1, len(items) // 8))][:8] if items else []


def _media_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """Media that do not fit the run's frames or this machine, and buckets that do not fit the teacher."""
    found = []
    if run.num_frames > 1 and "items" in parts and (still := parts["items"].first(Kind.IMAGE)):
        found.append(f"`num_frames` is {run.num_frames}, but {still.media} is an image. Write 1, or give videos.")
    if "items" in parts and (video := parts["items"].first(Kind.VIDEO)):
        found += filter(None, [video_problem(video.media)])
    for bucket in [] if isinstance(run.buckets, bool) else run.buckets:
        if len(bucket) != 2 or min(bucket) < 1:
            found.append(problem("recipe", "buckets", bucket, "Write [height, width], in pixels, for each."))
        elif "folder" in parts:
            found += parts["folder"].size_problems(*bucket, run.num_frames)
    return found
