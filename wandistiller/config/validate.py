"""Checks of a whole run before any weight is loaded; all problems are raised at once, on every rank."""

import dataclasses
from pathlib import Path

from wandistiller.batch import PATH
from wandistiller.checkpoint import resume
from wandistiller.config.cross_checks import combined_problems, own_problems
from wandistiller.config.identity import end_of, resumed
from wandistiller.config.job import Job
from wandistiller.config.recipe import ENGINE, STUDENT, TEACHER
from wandistiller.config.run_config import AUTO, DEFAULT_ENGINE, DEFAULT_TEACHER, ZERO, AutoOf, RunConfig
from wandistiller.config.start import Start, read_start
from wandistiller.data.dataset import WITH_IMAGES, PromptDataset, read_dataset
from wandistiller.data.hub_prompts import HUB, fetch_prompts
from wandistiller.data.lines import clean
from wandistiller.engine.ds_config import load, shipped_json, student_engine
from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.engine.ds_overrides import OVERRIDES, apply_overrides, fill_auto
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.preflight import config_problems
from wandistiller.flow import FLOW_MAP
from wandistiller.network.adapters import Lora
from wandistiller.network.folder import Folder
from wandistiller.objectives.objective import read_objective
from wandistiller.student.config import StudentConfig, read_student_config
from wandistiller.teacher.placements.base import Placement
from wandistiller.teacher.quantized import missing_problems
from wandistiller.teacher.strategies import strategies, teacher_file
from wandistiller.teacher.teacher_json import read_placement
from wandistiller.utils.errors import RECIPE, ConfigError, Place, Problem, collecting, readable
from wandistiller.wan.added_lora import read_added, with_experts
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.transformer_config import TransformerConfig


@readable()
def read_job(
    run: RunConfig,
    world: int,
    *,
    here: bool = True,
    previous: Job | None = None,
    keeps_path: bool = False,
    origins: dict[str, str] | None = None,
) -> Job:
    """Check a run against its teacher, data, student and engines before any weight is read.

    First each of them alone; if all are sound, what does not go together. Each JSON is opened once.

    Args:
        here: check it against this machine too.
        previous: the run that `student_config` names, which need not have begun.
        keeps_path: another stage follows the teacher's sampling path, from the same cache.
        origins: place of each setting that the user gave.

    Raises:
        ConfigError: with every problem of each part, or with every one between them.
    """
    problems: list[Problem] = []
    origins, replicas, folder = origins or {}, max(1, world // run.context_parallel), None
    with collecting(problems):
        folder = _read_folder(run)
    with collecting(problems):
        folder, items = _read_data(run, folder)
    with collecting(problems):
        if folder:
            student, transformer, start = _read_student(_opened(run, STUDENT, origins), folder, previous)
    with collecting(problems):
        objective = read_objective(run.objective)
    with collecting(problems):  # with what depends on the student and the data left open
        json = _overridden(_opened(run, ENGINE, origins), run)
        batch = _engine(json, replicas, steps=1, here=here).batch
    with collecting(problems):
        teacher = _teacher(_opened(run, TEACHER, origins), run, world, here=here)
    if problems := problems + own_problems(run):
        raise ConfigError(*problems)
    transformer = transformer.with_second_time(objective.few_step_sampler == FLOW_MAP)
    whole = _complete(run, folder, items, samples=batch.total * len(objective.updates))
    job = Job(
        run=whole,
        folder=folder,
        items=items,
        student=student,
        student_transformer=transformer,
        student_engine=_engine(json, replicas, steps=whole.max_steps, here=here),
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


def _opened(run: RunConfig, setting: str, origins: dict[str, str]) -> DeepSpeedJson:
    """Open the JSON of a setting; raises ConfigError."""
    source = getattr(run, setting)
    source = source.json if isinstance(source, AutoOf) else source
    if setting == TEACHER:
        source = teacher_file(source)
    elif setting == ENGINE and source == AUTO:
        source = DEFAULT_ENGINE
    return load(source, origins.get(setting, RECIPE))


def _read_folder(run: RunConfig) -> Folder:
    """Read the teacher's configs, with the LoRA files that are added to it; raises ConfigError."""
    folder = open_wan(run.teacher_path, revision=run.teacher_revision)
    if problems := folder.noise_problems():
        raise ConfigError(*problems)
    if run.teacher_lora is None:
        return folder
    added = read_added("recipe", "teacher_lora", run.teacher_lora)
    return folder.with_loras(with_experts(Place(RECIPE, "teacher_lora"), added, folder.configs))


def _read_data(run: RunConfig, folder: Folder | None) -> tuple[Folder | None, PromptDataset]:
    """Read the data; return the teacher too, for clips that begin with the data's images if it makes such.

    Wan2.2 5B makes clips of text or of a first frame: of pictures in a run of clips it makes the latter.
    """
    may_begin = folder and (folder.config.takes_image or folder.expands_time and run.num_frames > 1)
    data = run.data_path
    if data.startswith(HUB):
        cache = Path(run.cache_dir or Path(run.output_dir) / "cache")
        data = str(fetch_prompts(data, run.hub_column, run.hub_count, run.seed, cache))
    items = read_dataset(data, thumbnails=run.num_frames == 1, first_frames=bool(may_begin))
    if may_begin and (folder.config.takes_image or items.first(*WITH_IMAGES)):
        return folder.with_first_frames(), items
    return folder, items


def _read_student(
    json: DeepSpeedJson, folder: Folder, previous: Job | None
) -> tuple[StudentConfig, TransformerConfig, Start | None]:
    """Read the student's settings, its transformer's config, and the run that it starts from."""
    start = end_of(previous) if previous else read_start(json.raw.get("init"))
    if not start:
        return *read_student_config(json.where, json.raw, folder), None
    values = {"experts": start.experts} | json.raw
    student, transformer = read_student_config(json.where, values, folder, start.facts.config)
    if student.experts != start.experts:
        remedy = f"{start.folder} has {start.experts}. Write that, or leave it out."
        raise ConfigError(json.problem("experts", student.experts, remedy))
    return student, transformer, start


def _overridden(json: DeepSpeedJson, run: RunConfig) -> DeepSpeedJson:
    """Return the student's JSON with the run's short settings, and the usual ZeRO section if it is open."""
    chosen = run.deepspeed_config
    if isinstance(chosen, AutoOf) or AUTO in (chosen, json.raw.get(ZERO)):
        json = json.replaced(**{ZERO: shipped_json(DEFAULT_ENGINE).raw[ZERO]})
        json = dataclasses.replace(json, is_open=True)
    changed = apply_overrides(json, **{setting: getattr(run, setting) for setting in OVERRIDES})
    # values of the default one are no user's
    return dataclasses.replace(changed, overridden=()) if json.where == DEFAULT_ENGINE else changed


def _engine(json: DeepSpeedJson, ranks: int, *, steps: int, here: bool) -> EngineConfig:
    """Check the student's DeepSpeed JSON, with "auto" filled, for so many `ranks` of different samples."""
    engine = student_engine(fill_auto(json, steps), ranks)
    if problems := config_problems(engine, here=here):
        raise ConfigError(*problems)
    return engine


def _teacher(json: DeepSpeedJson, run: RunConfig, world: int, *, here: bool) -> Placement:
    """Check the teacher's DeepSpeed JSON, in the run's own precision if it has one."""
    dtype, source = run.teacher_dtype, run.teacher_deepspeed_config
    placed = json.in_precision(dtype)
    if not (isinstance(source, str) and source in (DEFAULT_TEACHER, *strategies())):  # nobody wrote its bf16
        placed = placed.noting("teacher_dtype", dtype, json)
    teacher = read_placement(placed, world)
    problems = config_problems(teacher.engine, here=here)
    if problems := problems + (missing_problems(teacher.engine, teacher.weights) if here else []):
        raise ConfigError(*problems)
    return teacher


def _complete(run: RunConfig, folder: Folder, items: PromptDataset, samples: int) -> RunConfig:
    """Replace None by the teacher's own values; clear settings that the JSONs hold; a step has `samples`."""
    usual, epoch = folder.usual, items.samples(run.rollouts_per_prompt)
    # one scale is for both experts, as in diffusers
    scale, scale_2 = usual.guidance if run.guidance_scale is None else [run.guidance_scale] * 2
    steps = [number and -(-number * epoch // samples) for number in (run.num_epochs, run.sample_interval)]
    return dataclasses.replace(
        run,
        guidance_scale=scale,
        guidance_scale_2=scale_2 if run.guidance_scale_2 is None else run.guidance_scale_2,
        shift=run.shift or folder.shift,
        video_fps=run.video_fps or float(folder.fps),
        height=run.height or usual.height,
        width=run.width or usual.width,
        max_steps=steps[0] or run.max_steps or 1000,
        num_epochs=None,
        sample_every=steps[1] or run.sample_every,
        prepare_batch=run.prepare_batch or (4 if run.num_frames == 1 else 1),
        sample_interval=None,
        sample_prompts=[*map(clean, run.sample_prompts or ())] or [item.prompt for item in items.spread()],
        teacher_dtype=None,
        teacher_lora=folder.added_settings or None,
        lora=run.lora if run.lora != {} else {"rank": Lora().rank},
        **dict.fromkeys(OVERRIDES),
    )
