"""Checks of a whole run before any weight is loaded; all problems are raised at once, on every rank."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wandistiller.batch import PATH
from wandistiller.checkpoint import resume
from wandistiller.config.job import Job
from wandistiller.config.nvme_checks import nvme_problems
from wandistiller.config.objective_checks import objective_problems
from wandistiller.config.others import KEY, read_own
from wandistiller.config.resumed import end_of, resumed
from wandistiller.config.run_config import AUTO, DEFAULT_ENGINE, RunConfig
from wandistiller.config.sequence_checks import replicas, sequence_problems
from wandistiller.config.start import read_start
from wandistiller.data.colours import background_problems
from wandistiller.data.dataset import MediaType, PromptDataset, read_dataset
from wandistiller.data.media import video_problem
from wandistiller.distributed import device
from wandistiller.engine import ds_config
from wandistiller.engine.activation_checkpointing import SECTION, recompute_problems, with_number
from wandistiller.engine.ds_overrides import EngineOverrides, apply_overrides, fill_auto, fill_steps
from wandistiller.engine.ds_schema import without_block
from wandistiller.engine.kernels import kernel_problems
from wandistiller.engine.preflight import config_problems
from wandistiller.objectives.objective import read_objective
from wandistiller.student.config import read_student_config
from wandistiller.student.trainable import tuning_problems
from wandistiller.teacher.quantized import missing_problems
from wandistiller.teacher.teacher_json import read_placement, teacher_engine
from wandistiller.utils.errors import ConfigError, folder_problems, inside_problems, problem, readable
from wandistiller.wan.pipeline import WanFolder, open_wan, usual_for
from wandistiller.wan.structure import PARTS
from wandistiller.wan.transformer import top_modules, width


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Catch a ConfigError and add its messages to `problems`."""
    try:
        with readable():
            yield
    except ConfigError as error:
        problems += error.problems


@readable()
def read_job(run: RunConfig, world: int, *, here: bool = True, previous: Job | None = None) -> Job:
    """Check a run against its teacher, data, student and engines before any weight is read.

    Args:
        here: check it against this machine too.
        previous: the run that `student_config` names, which need not have begun.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[str] = []
    parts = _read_parts(run, world, here, previous, problems)
    with collecting(problems):
        parts["objective"] = read_objective(run.objective)
        run = dataclasses.replace(run, rollout_path=run.rollout_path or PATH in parts["objective"].kinds)
    if "folder" in parts:
        run = _complete(run, parts["folder"], parts.get("items"), _samples_of_a_step(parts))
    if run.critic_deepspeed_config is not None:
        with collecting(problems):
            parts["others_ds"] = _read_other(run, parts, here)
    if problems := problems + _combined_problems(run, parts, world, here):
        raise ConfigError(*problems)
    resume_from = resume.find(Path(run.output_dir), run.resume)
    job = Job(run=run, resume_from=resume_from, previous=previous, **parts)
    return resumed(job) if job.resume_from else job


def _read_parts(
    run: RunConfig, world: int, here: bool, previous: Job | None, problems: list[str]
) -> dict[str, Any]:
    """Read what the run names, as fields of Job; add the problems of those that are left out."""
    parts: dict[str, Any] = {}
    with collecting(problems):
        parts["folder"] = open_wan(run.teacher_path, revision=run.teacher_revision)
    with collecting(problems):
        parts["items"] = read_dataset(run.data_path, thumbnails=run.num_frames == 1)
    if "folder" in parts:
        with collecting(problems):
            parts |= _read_student(run, parts["folder"], previous)
    with collecting(problems):
        where, ds = _student_json(run, parts, replicas(run, world))
        parts["student_ds"], parts["batch"] = ds_config.student_engine(where, ds, replicas(run, world))
        problems += config_problems(where, without_block(parts["student_ds"]), here=here)
        problems += kernel_problems(where, parts["student_ds"], here=here)
    with collecting(problems):
        where, ds = ds_config.load(run.teacher_deepspeed_config)
        parts["teacher_ds"] = teacher_engine(where, ds_config.with_dtype(ds, run.teacher_dtype), world)
        problems += config_problems(where, without_block(parts["teacher_ds"]), here=here)
        problems += kernel_problems(where, parts["teacher_ds"], here=here)
        problems += missing_problems(where, parts["teacher_ds"], here=here)
    return parts


def _read_student(run: RunConfig, folder: WanFolder, previous: Job | None) -> dict[str, Any]:
    """Read the student and the run that it starts from, as fields of Job."""
    where, values = ds_config.load(run.student_config)
    start = end_of(previous) if previous else read_start(values.get("init"))
    if not start:
        student, transformer = read_student_config(where, values, folder)
    else:
        student, transformer = read_student_config(
            where, {"experts": start.experts} | values, folder, start.transformer
        )
        if student.experts != start.experts:
            remedy = f"{start.folder} has {start.experts}. Write that, or leave it out."
            raise ConfigError(problem(where, "experts", student.experts, remedy))
    return {"student": student, "student_transformer": transformer, "start": start}


def _read_other(run: RunConfig, parts: dict[str, Any], here: bool) -> dict[str, Any] | None:
    """Read the JSON of a network that is trained beside the student, once all that it depends on is known."""
    if not {"objective", "batch", "student_transformer", "folder"} <= parts.keys():
        return None
    if not (roles := parts["objective"].others.values()):
        remedy = "Only dmd2 has a critic. Leave it out."
        raise ConfigError(f"`{KEY}` is given, but `objective` is {parts['objective']}. {remedy}")
    (role,) = roles
    config = role.origin(parts["student_transformer"], parts["folder"].config)
    named = run.critic_deepspeed_config
    return read_own(named, role, parts["batch"], width(config), run.max_steps, here=here)


def _combined_problems(run: RunConfig, parts: dict[str, Any], world: int, here: bool) -> list[str]:
    """List settings that do not fit each other, or this machine if the run is to be `here`."""
    problems: list[str] = []
    if "folder" in parts:
        gpus = device.count() if here else world
        problems += _placement_problems(run, parts, gpus) if "teacher_ds" in parts else []
        problems += parts["folder"].size_problems(run.height, run.width, run.num_frames)
        problems += objective_problems(run, parts) if "objective" in parts else []
    problems += sequence_problems(run, parts, world)
    problems += _profile_problems(run, here) if run.profile_memory else []
    problems += block_problems(run, parts) + _media_problems(run, parts)
    problems += _written_problems(run, parts)
    problems += nvme_problems(parts, world) if here else []
    remedy = f"Write keys among: {', '.join(resume.CHANGEABLE)}."
    unknown = [key for key in run.allow_changed or () if key not in resume.CHANGEABLE]
    problems += [problem("command line", "allow_changed", key, remedy) for key in unknown]
    if {"student_transformer", "student_ds"} <= parts.keys():
        problems += tuning_problems(run, parts["student_transformer"], parts["student_ds"])
    return problems


def _written_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """List folders that cannot be written to, or whose files would be mixed with the data or the teacher."""
    out, problems, inputs = Path(run.output_dir), [], {"data_path": run.data_path}
    if "folder" in parts:
        inputs["teacher_path"] = parts["folder"].path
    given = {key: getattr(run, key) for key in ("output_dir", "cache_dir", "sample_dir")}
    for key, folder in given.items():
        if folder:
            problems += folder_problems(key, folder) or inside_problems(key, folder, inputs)
    own = {"student": True, "checkpoints": True, "cache": not run.cache_dir, "samples": not run.sample_dir}
    own = [out / name for name, is_used in own.items() if is_used]
    return problems or [p for folder in own for p in inside_problems("output_dir", folder, inputs)]


def _profile_problems(run: RunConfig, here: bool) -> list[str]:
    """List the problems of `profile_memory`: no such step, or no GPU if the run is to be `here`."""
    problems = []
    if run.max_steps and run.profile_memory > run.max_steps:
        problems.append(
            f"`profile_memory` is {run.profile_memory}, but the run ends with step {run.max_steps}. "
            "Write a step of it."
        )
    if here and not device.can_record_allocations():
        problems.append(
            "`profile_memory` records the memory of a GPU, and there is none here. Leave it out; "
            "OUTPUT/memory.json has the peaks of CPU memory by phase."
        )
    return problems


def _student_json(run: RunConfig, parts: dict[str, Any], world: int) -> tuple[str, dict[str, Any]]:
    """Return the student's DeepSpeed JSON with flags and "auto" resolved: (name for messages, content)."""
    where, ds = ds_config.load(DEFAULT_ENGINE if run.deepspeed_config == AUTO else run.deepspeed_config)
    overrides = EngineOverrides(**{f.name: getattr(run, f.name) for f in dataclasses.fields(EngineOverrides)})
    unknown = {"num_attention_heads": 1, "attention_head_dim": 1, "num_layers": 1}  # its error is reported
    config = parts.get("student_transformer") or unknown
    ds = fill_auto(apply_overrides(ds, overrides), width(config))
    try:
        total = ds_config.batch_size(where, ds, world).total
    except ConfigError:
        return where, fill_steps(ds, 1)  # reported when the engine is checked
    if isinstance(ds.get(SECTION), dict) and not recompute_problems(where, ds):
        ds = with_number(ds, config["num_layers"], PARTS)
    return where, fill_steps(ds, _max_steps(run, parts.get("items"), total))


def _max_steps(run: RunConfig, items: PromptDataset | None, global_batch: int) -> int:
    return _steps_of(run.num_epochs, run, items, global_batch) if run.num_epochs else run.max_steps or 1000


def _steps_of(epochs: int, run: RunConfig, items: PromptDataset | None, global_batch: int) -> int:
    repeats = run.rollouts_per_prompt, run.clips_per_video
    samples = items.samples(*repeats) if items else 1  # wrong data is reported elsewhere
    return -(-epochs * samples // global_batch)


def _samples_of_a_step(parts: dict[str, Any]) -> int:
    """Return the samples of all updates of a step; 1 if what they depend on is wrong, which is reported."""
    updates = len(parts["objective"].updates) if "objective" in parts else 1
    return parts["batch"].total * updates if "batch" in parts else 1


def _complete(run: RunConfig, folder: WanFolder, items: PromptDataset | None, total: int) -> RunConfig:
    """Replace None by the teacher's own values; clear settings that are in the JSONs now.

    Args:
        total: samples of a step.
    """
    usual = usual_for(folder)
    scale = usual.guidance[0] if run.guidance_scale is None else run.guidance_scale
    default_2 = usual.guidance[1] if run.guidance_scale is None else scale  # as diffusers does
    sample_every = run.sample_every
    if run.sample_interval:
        sample_every = _steps_of(run.sample_interval, run, items, total)
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
        sample_every=sample_every,
        prepare_batch=run.prepare_batch or (4 if run.num_frames == 1 else 1),
        sample_interval=None,
        sample_prompts=run.sample_prompts or (items.spread() if items else []),
        teacher_dtype=None,
        **dataclasses.asdict(EngineOverrides()),
    )


def _placement_problems(run: RunConfig, parts: dict[str, Any], gpus: int) -> list[str]:
    """List misfits of the teacher's placement with its modules and this rank's GPUs."""
    where, modules = ds_config.load(run.teacher_deepspeed_config)[0], top_modules(parts["folder"].config)
    return read_placement(parts["teacher_ds"]).teacher_problems(where, modules, gpus)


def block_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """List misfits of expert blocks and micro-steps: ranks would need different experts at once."""
    batch, problems = parts.get("batch"), []
    if batch and batch.total % (run.expert_blocks * batch.micro * batch.ranks):
        problems.append(
            f"`expert_blocks` is {run.expert_blocks}, but a step has {batch.accumulation} micro-step(s). "
            "Write a divisor of that, so that a micro-step needs one expert."
        )
    if "student" in parts and parts["student"].experts == "two" and run.expert_blocks != 1:
        problems.append(
            f"`expert_blocks` is {run.expert_blocks}. A student with two experts trains one in a step; "
            "write 1."
        )
    return problems


def _media_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """List media that do not fit the run's frames or this machine, and buckets not fit for the teacher."""
    problems = background_problems(run.background)
    if run.strict and "items" in parts and (unknown := parts["items"].unknown):
        problems.append(
            f"`strict` is true, and {len(unknown)} file(s) with a prompt beside them have an ending that is "
            f"not known: {', '.join(map(str, unknown[:3]))}. Convert them, or take them out."
        )
    if run.num_frames > 1 and "items" in parts and (still := parts["items"].first(MediaType.IMAGE)):
        remedy = "Write 1, or give videos."
        problems.append(f"`num_frames` is {run.num_frames}, but {still.media} is an image. {remedy}")
    if "items" in parts and (video := parts["items"].first(MediaType.VIDEO)):
        problems += filter(None, [video_problem(video.media)])
    for size in run.buckets if isinstance(run.buckets, list) and "folder" in parts else []:
        problems += parts["folder"].size_problems(*size, run.num_frames)
    return problems
