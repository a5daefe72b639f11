"""Checks of a whole run before any weight is loaded; all problems are raised at once, on every rank."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from wandistiller.batch import PATH
from wandistiller.checkpoint import resume
from wandistiller.config.cross_checks import combined_problems, own_problems, replicas
from wandistiller.config.identity import end_of, resumed
from wandistiller.config.job import Job
from wandistiller.config.run_config import AUTO, DEFAULT_ENGINE, DEFAULT_TEACHER, ZERO, RunConfig
from wandistiller.config.start import Start, read_start
from wandistiller.data.dataset import GIVEN, PromptDataset, read_dataset
from wandistiller.data.lines import clean
from wandistiller.engine.ds_config import load, student_engine
from wandistiller.engine.ds_overrides import EngineOverrides, apply_overrides, fill_auto
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.preflight import config_problems
from wandistiller.network.adapters import Lora
from wandistiller.objectives.registry import read_objective
from wandistiller.student.config import StudentConfig, read_student_config
from wandistiller.teacher.placements.base import Placement
from wandistiller.teacher.quantized import missing_problems
from wandistiller.teacher.strategies import strategies
from wandistiller.teacher.teacher_json import read_placement
from wandistiller.utils.errors import RECIPE, ConfigError, Place, readable
from wandistiller.utils.files import SHIPPED
from wandistiller.wan.added_lora import as_settings, read_added, with_experts
from wandistiller.wan.pipeline import WanFolder, open_wan, usual_for, with_loras
from wandistiller.wan.sampling import noise_problems
from wandistiller.wan.structure import PARTS
from wandistiller.wan.transformer import usual_config
from wandistiller.wan.transformer_config import TransformerConfig

ANY_SIZE = usual_config()
"""For a student that is not known yet."""


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Catch a ConfigError and add its messages to `problems`."""
    try:
        with readable():
            yield
    except ConfigError as error:
        problems += error.problems


@readable()
def read_job(
    run: RunConfig,
    world: int,
    *,
    here: bool = True,
    previous: Job | None = None,
    keeps_path: bool = False,
) -> Job:
    """Check a run against its teacher, data, student and engines before any weight is read.

    First each of them alone; if all are sound, what does not go together.

    Args:
        here: check it against this machine too.
        previous: the run that `student_config` names, which need not have begun.
        keeps_path: another stage follows the teacher's sampling path, from the same cache.

    Raises:
        ConfigError: with every problem of each part, or with every one between them.
    """
    problems: list[str] = []
    given, ranks, folder = run, replicas(run, world), None
    with collecting(problems):
        folder = _read_folder(run)
    with collecting(problems):
        folder, items = _read_data(run, folder)
    with collecting(problems):
        if folder:
            student, transformer, start = _read_student(run, folder, previous)
    with collecting(problems):
        objective = read_objective(run.objective)
    with collecting(problems):  # with what depends on the student and the data left open
        batch = read_engine(run, ranks, ANY_SIZE, steps=1, here=here).batch
    with collecting(problems):
        teacher = read_teacher(run, world, here=here)
    if problems := problems + own_problems(run, here=here):
        raise ConfigError(*problems)
    run = _complete(run, folder, items, samples=batch.total * len(objective.updates))
    engine = read_engine(given, ranks, transformer, steps=run.max_steps, here=here)
    job = Job(
        run=run,
        folder=folder,
        items=items,
        student=student,
        student_transformer=transformer,
        student_engine=engine,
        teacher=teacher,
        objective=objective,
        resume_from=None,
        keeps_path=keeps_path or PATH in objective.kinds,
        start=start,
        previous=previous,
    )
    if problems := combined_problems(job, world, here=here):
        raise ConfigError(*problems)
    job = dataclasses.replace(job, resume_from=resume.find(job.output, run.resume))
    return resumed(job) if job.resume_from else job


def _read_folder(run: RunConfig) -> WanFolder:
    """Read the teacher's configs, with the LoRA files that are added to it; raises ConfigError."""
    folder = open_wan(run.teacher_path, revision=run.teacher_revision)
    if problems := noise_problems(folder):
        raise ConfigError(*problems)
    if run.teacher_lora is None:
        return folder
    added = read_added("recipe", "teacher_lora", run.teacher_lora)
    return with_loras(folder, with_experts(Place(RECIPE, "teacher_lora"), added, folder.configs))


def _read_data(run: RunConfig, folder: WanFolder | None) -> tuple[WanFolder | None, PromptDataset]:
    """Read the data; return the teacher too, for clips that begin with the data's images if it makes such.

    Wan2.2 5B makes clips of text or of a first frame: of pictures in a run of clips it makes the latter.
    """

    def items(**how: bool) -> PromptDataset:
        return read_dataset(run.data_path, thumbnails=run.num_frames == 1, **how)

    if not folder or not (folder.config.takes_image or folder.expands_time and run.num_frames > 1):
        return folder, items()
    found = items(first_frames=True)
    if folder.config.takes_image or found.first(*GIVEN):
        return folder.with_first_frames(), found
    return folder, found


def _read_student(
    run: RunConfig, folder: WanFolder, previous: Job | None
) -> tuple[StudentConfig, TransformerConfig, Start | None]:
    """Read the student's settings, its transformer's config, and the run that it starts from."""
    json = load(run.student_config, _shipped("students"))
    start = end_of(previous) if previous else read_start(json.raw.get("init"))
    if not start:
        return *read_student_config(json.where, json.raw, folder), None
    values = {"experts": start.experts} | json.raw
    student, transformer = read_student_config(json.where, values, folder, start.facts.config)
    if student.experts != start.experts:
        remedy = f"{start.folder} has {start.experts}. Write that, or leave it out."
        raise ConfigError(json.problem("experts", student.experts, remedy))
    return student, transformer, start


def _shipped(folder: str) -> list[str]:
    """List the JSONs of a folder of ds_configs, as recipes name them."""
    return [f"ds_configs/{folder}/{file.name}" for file in sorted((SHIPPED / folder).glob("*.json"))]


def leaves_engine_open(run: RunConfig) -> bool:
    """Return whether `planner.resolve_auto` chooses the student's ZeRO stage and what is offloaded."""
    return run.deepspeed_config == AUTO or load(run.deepspeed_config).raw.get(ZERO) == AUTO


def read_engine(
    run: RunConfig, ranks: int, transformer: TransformerConfig, steps: int, *, here: bool
) -> EngineConfig:
    """Read the student's DeepSpeed JSON, with flags and "auto" resolved.

    Args:
        ranks: those that work on different samples.
        here: check it against this machine too.

    Raises:
        ConfigError: with all problems at once.
    """
    source = DEFAULT_ENGINE if run.deepspeed_config == AUTO else run.deepspeed_config
    json = load(source, [AUTO, *_shipped("student")])
    if json.raw.get(ZERO) == AUTO:
        json = json.replaced(**{ZERO: load(DEFAULT_ENGINE).raw[ZERO]})
    overrides = EngineOverrides(**{f.name: getattr(run, f.name) for f in dataclasses.fields(EngineOverrides)})
    json = apply_overrides(json, overrides)
    if source == DEFAULT_ENGINE:  # its values are defaults
        json = dataclasses.replace(json, overridden=())
    json = fill_auto(json, steps)
    engine = student_engine(json, ranks).with_number_of_checkpoints(transformer.num_layers, PARTS)
    if problems := config_problems(engine, here=here):
        raise ConfigError(*problems)
    return engine


def read_teacher(run: RunConfig, world: int, *, here: bool) -> Placement:
    """Read the teacher's DeepSpeed JSON.

    Args:
        here: check it against this machine too.

    Raises:
        ConfigError: with all problems at once.
    """
    source, dtype = run.teacher_deepspeed_config, run.teacher_dtype
    named = load(source, strategies())
    json = named.in_precision(dtype)
    if source != DEFAULT_TEACHER:
        json = json.noting("teacher_dtype", dtype, named)
    teacher = read_placement(json, world)
    problems = config_problems(teacher.engine, here=here)
    if problems := problems + (missing_problems(teacher.engine, teacher.weights) if here else []):
        raise ConfigError(*problems)
    return teacher


def _complete(run: RunConfig, folder: WanFolder, items: PromptDataset, samples: int) -> RunConfig:
    """Replace None by the teacher's own values; clear settings that are in the JSONs now.

    Args:
        samples: of a step.
    """
    epoch = items.samples(run.rollouts_per_prompt, run.clips_per_video)
    usual = usual_for(folder)
    scale = usual.guidance[0] if run.guidance_scale is None else run.guidance_scale
    default_2 = usual.guidance[1] if run.guidance_scale is None else scale  # as diffusers does
    sample_every = run.sample_every
    if run.sample_interval:
        sample_every = -(-run.sample_interval * epoch // samples)
    return dataclasses.replace(
        run,
        guidance_scale=scale,
        guidance_scale_2=run.guidance_scale_2 if run.guidance_scale_2 is not None else default_2,
        shift=run.shift or folder.shift,
        video_fps=run.video_fps or float(folder.fps),
        height=run.height or usual.height,
        width=run.width or usual.width,
        max_steps=-(-run.num_epochs * epoch // samples) if run.num_epochs else run.max_steps or 1000,
        num_epochs=None,
        sample_every=sample_every,
        prepare_batch=run.prepare_batch or (4 if run.num_frames == 1 else 1),
        sample_interval=None,
        sample_prompts=[*map(clean, run.sample_prompts or ())] or [item.prompt for item in items.spread()],
        teacher_dtype=None,
        teacher_lora=as_settings(folder.added) or None,
        lora=run.lora if run.lora != {} else {"rank": Lora().rank},
        **dataclasses.asdict(EngineOverrides()),
    )
