"""Settings of a run: one dataclass for the recipe's keys, the flags and `resolved/run.json`."""

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import Field

from wandistiller.teacher.strategies import strategies
from wandistiller.utils.registry import names_in
from wandistiller.utils.validation import Count, Positive, Scale, Seed, Steps, write
from wandistiller.wan.defaults import WAN_NEGATIVE_PROMPT

AUTO = "auto"
"""Value that leaves the student's engine or the teacher's placement to `planner.resolve_auto`."""
ZERO = "zero_optimization"
"""Section of the student's JSON that AUTO in its place leaves to it too; the rest of the JSON stays."""
DEFAULT_ENGINE = "ds_configs/student/zero2_offload.json"
"""The student's engine; `auto` changes some of its keys."""
DEFAULT_TEACHER = "ds_configs/teacher/zero_inference_cpu.json"
Decay = Annotated[float, Gt(0), Lt(1)]
Amount = Annotated[int, Gt(0), Le(10**6)]
TrainingSteps = Annotated[int, Gt(0), Le(10**9)]
Duration = Annotated[float, Gt(0), Le(10**9)]
Shift = Annotated[float, Gt(0), Le(1000)]
PATHS = ("teacher_path", "data_path", "output_dir")
"""Settings that every run needs."""
JSON_FILES = {
    "student_config": "student",
    "deepspeed_config": "student_deepspeed",
    "teacher_deepspeed_config": "teacher_deepspeed",
}
"""Settings that name a JSON file -> the file's name in OUTPUT/resolved, without .json."""
EITHER = (("max_steps", "num_epochs"), ("sample_every", "sample_interval"))
"""Pairs of settings of which a run takes one."""
NONFINITE = 'stop, skip, or the most steps that may be skipped, such as "20"'
Name = Annotated[str, Field(pattern=r"\S"), write("the name of a file or folder")]
JsonFile = Annotated[Name | dict, write("a file name, or an object, {...}")]
Objectives = Annotated[
    str | dict | list[str | dict], write('a name, an object with a "name", or a list of these')
]
AddedLoras = Annotated[
    Name | dict | list[str | dict], write('a file name, an object with a "file", or a list of these')
]
Buckets = Annotated[
    bool | list[Annotated[list[Count], Len(2, 2)]],
    write("true, false, or a list of [height, width], in pixels"),
]


class AutoOf(NamedTuple):
    """The student's JSON beside the flag `--deepspeed_config auto`: all of it stays but ZERO."""

    json: str | dict[str, Any]


def _setting(group: str, default: Any, help: str, **argparse: Any) -> Any:
    """Define a field of RunConfig in a group of `--help`; `argparse` has a metavar and the like.

    Those of the group "this start" are flags alone: they say how a run is started, not what it is.
    """
    return field(default=default, metadata={"group": group, "help": help, "argparse": argparse})


paths, engines, learning, size, output, this_start = (
    partial(_setting, group) for group in ("paths", "engines", "learning", "size", "output", "this start")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """All keys of a recipe, and the flags of a start. None: the teacher's own value, or as the help says."""

    teacher_path: Name = paths("", "Wan pipeline: folder, hub id, JSON of ComfyUI's files, `tiny` (embedded)")
    teacher_revision: str | None = paths(None, "branch, tag or commit of a hub id; default its main branch")
    teacher_lora: AddedLoras | None = paths(
        None, 'LoRA files added to the teacher, such as a style: FILE, or {"file": FILE, "strength": 0.8}'
    )
    data_path: Name = paths(
        "", "prompts: .txt, .jsonl, .csv, .tsv, media with .txt beside them, hub:OWNER/NAME, or `tiny`"
    )
    hub_column: str | None = paths(
        None, "column of the prompts in hub:OWNER/NAME; default prompt, caption ..."
    )
    hub_count: Amount | None = paths(None, "prompts drawn of hub:OWNER/NAME, by the seed; default 10000")
    output_dir: Name = paths("", "where the run is written")
    cache_dir: Name | None = paths(None, "encoded prompts and latents; default OUTPUT/cache")
    student_config: JsonFile = paths("ds_configs/students/half.json", "the student's architecture and start")
    deepspeed_config: JsonFile = paths(DEFAULT_ENGINE, "the student's engine, or auto")
    teacher_deepspeed_config: JsonFile = paths(
        DEFAULT_TEACHER,
        f"the teacher's engine: its placement; a shipped one's name will do: {', '.join(strategies())}",
    )
    batch_size: Amount | None = engines(None, "samples per rank and micro-step, for the student's JSON")
    lr: Annotated[float, Gt(0), Le(1)] | None = engines(None, "learning rate, for the student's JSON")
    mixed_precision: Literal["bf16", "fp16", "no"] | None = engines(None, "precision, for the student's JSON")
    gradient_checkpointing: bool | None = engines(None, "adds activation_checkpointing to the student's JSON")
    teacher_dtype: Literal["float32", "float16", "bfloat16"] | None = engines(
        None, "default as the teacher's JSON says"
    )
    merge_text_padding: bool = engines(
        False, "attention to a prompt's padding through 3 weighted rows, not 500; equal up to rounding"
    )
    context_parallel: Count = engines(1, "ranks that compute each sample together; for long videos")
    objective: Objectives = learning(
        "velocity",
        f"{', '.join(names_in('wandistiller.objectives'))}; settings and sums under this recipe key",
    )
    guidance_scale: Scale | None = learning(
        None, "guidance, high-noise expert; default 4 (Wan2.2 I2V A14B: 3.5; one expert: 5; `tiny`: 2)"
    )
    guidance_scale_2: Scale | None = learning(
        None, "guidance, low-noise expert; default 3 (Wan2.2 I2V A14B: 3.5; `tiny`: 2)"
    )
    negative_prompt: str = learning(WAN_NEGATIVE_PROMPT, "the unconditional branch's prompt; default Wan's")
    shift: Shift | None = learning(None, "timestep shift; default the teacher's scheduler's")
    ema: Decay | None = learning(None, "decay of an average of the weights, which is exported, such as 0.999")
    ema_start: Annotated[int, Ge(0), Le(10**9)] = learning(0, "steps of the run before that average begins")
    learning_rates: dict[str, Positive] | None = learning(
        None, 'factors by part: {"blocks.0-3": 0.1, "proj_out": 2}; `*`: the rest'
    )
    frozen: list[str] | None = learning(None, "parts that are not trained: blocks.0-3 patch_embedding bias")
    lora: dict | None = learning(
        None, 'train adapters only, by default of the whole teacher: {"rank": 64}', nargs="?", const={}
    )
    deterministic: bool = learning(False, "the same bits in every run on GPUs too, as on CPUs; slower")
    seed: Seed = learning(0, "every random draw depends on it")
    max_steps: TrainingSteps | None = learning(None, "optimizer steps in the whole run; default 1000")
    num_epochs: Amount | None = learning(None, "passes over the data, instead of --max_steps")
    height: Count | None = size(None, "pixels; default 480 (`tiny`: 64, its videos: 48)")
    width: Count | None = size(None, "pixels; default 832 (`tiny`: 64, its videos: 48)")
    num_frames: Count = size(1, "4k+1; 1 is an image")
    buckets: Buckets = size(
        False, "cut media to the nearest of several shapes of one area; in a recipe also [[h, w], ...]"
    )
    fit: Literal["crop", "letterbox"] = size(
        "crop", "media of other shapes are cut, or shown whole between bars of the background's colour"
    )
    video_fps: Annotated[float, Gt(0), Le(10**6)] | None = size(
        None, "frames a second taken of faster videos; default 16 (Wan2.2 5B: 24)"
    )
    background: str = size("white", "colour below transparent parts of media and of bars: a name, or #rrggbb")
    strict: bool = size(False, "stop at media that cannot be read; else they are in OUTPUT/skipped.json")
    rollout_steps: Steps = size(20, "sampling steps of teacher-made latents")
    rollouts_per_prompt: Amount = size(1, "teacher-made latents for each prompt without media")
    prepare_batch: Amount | None = size(
        None, "samples of one teacher call, and per file of the cache; default 4 images, or 1 video"
    )
    save_every: Count = output(500, "optimizer steps between checkpoints; the last is always saved")
    save_minutes: Duration = output(20.0, "minutes between checkpoints, if these steps take longer")
    keep_checkpoints: Count = output(3, "newest checkpoints kept")
    sample_every: Count = output(500, "optimizer steps between pictures; the last always has one")
    sample_minutes: Duration = output(20.0, "minutes between pictures, if these steps take longer")
    sample_interval: Count | None = output(None, "epochs between pictures, instead of --sample_every")
    sample_dir: Name | None = output(None, "folder of those pictures; default OUTPUT/samples")
    sample_steps: Steps = output(40, "sampling steps of those pictures")
    sample_prompts: list[str] | None = output(None, "prompts of the pictures; default 8 of the data's")
    log_level: Literal["debug", "info", "warning"] = output("info", "the least of what is printed")
    resume: str = output("auto", "auto, never, or a checkpoint folder")
    on_nonfinite: Annotated[str, Field(pattern=r"^(stop|skip|[1-9]\d{0,8})$"), write(NONFINITE)] = output(
        "stop", "at a step whose loss or gradient is not finite: stop, skip (up to 10), or skip up to so many"
    )
    timeout: Duration = output(1800.0, "seconds without a sign of life from any rank before all stop")
    allow_changed: list[str] | None = this_start(
        None, "keys in which the checkpoint may be of another run: optimizer ..."
    )
    despite_plan: bool = this_start(False, "start although the plan needs a fifth more memory than is free")
    dry_run: bool = this_start(False, "check everything, print the plan, load no weights, exit")


ONLY_FLAGS = [f.name for f in fields(RunConfig) if f.metadata["group"] == "this start"]
"""Settings that are no keys of a recipe."""
