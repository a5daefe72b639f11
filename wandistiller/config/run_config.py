"""Settings of a run: one dataclass for the recipe's keys, the flags and `resolved/run.json`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

from wandistiller.teacher.strategies import strategies
from wandistiller.utils.errors import ConfigError, impossible_values
from wandistiller.utils.registry import names_in
from wandistiller.utils.validation import Count, Positive, check, types_of, write
from wandistiller.wan.defaults import WAN_NEGATIVE_PROMPT

AUTO = "auto"
"""Value that lets the planner choose the student's engine or the teacher's placement."""
DEFAULT_ENGINE = "ds_configs/student/zero2_offload.json"
"""The student's engine; `auto` changes some of its keys."""
Amount = Annotated[int, Gt(0), Le(10**6)]
SamplingSteps = Annotated[int, Gt(0), Le(1000)]  # of the noise levels that a Wan was trained at
TrainingSteps = Annotated[int, Gt(0), Le(10**9)]
Scale = Annotated[float, Ge(-1000), Le(1000)]
PATHS = ("teacher_path", "data_path", "output_dir")
"""Settings that every run needs."""
JSON_FILES = ("student_config", "deepspeed_config", "teacher_deepspeed_config")
JsonFile = Annotated[str | dict, write("a file name, or an object, {...}")]
Objectives = Annotated[
    str | dict | list[str | dict], write('a name, an object with a "name", or a list of these')
]
Buckets = Annotated[
    bool | list[Annotated[list[Count], Len(2, 2)]],
    write("true, false, or a list of [height, width], in pixels"),
]


def setting(default: Any, group: str, help: str, **more: Any) -> Any:
    """Define a field of RunConfig; `more` goes to argparse (metavar)."""
    return field(default=default, metadata={"group": group, "help": help, "argparse": more})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """All keys of a recipe. None stands for the teacher's own value, or the default in the help text."""

    teacher_path: str = setting("", "paths", "diffusers Wan pipeline: folder, hub id, or `tiny` (embedded)")
    teacher_revision: str | None = setting(
        None, "paths", "branch, tag or commit of a hub id; default its main branch"
    )
    data_path: str = setting(
        "", "paths", "prompts: .txt, .jsonl, a folder of media with .txt beside, or `tiny`"
    )
    output_dir: str = setting("", "paths", "where the run is written")
    cache_dir: str | None = setting(None, "paths", "encoded prompts and latents; default OUTPUT/cache")
    student_config: JsonFile = setting(
        "ds_configs/students/half.json", "paths", "the student's architecture and start"
    )
    deepspeed_config: JsonFile = setting(DEFAULT_ENGINE, "paths", "the student's engine, or auto")
    teacher_deepspeed_config: JsonFile = setting(
        "ds_configs/teacher/zero_inference_cpu.json", "paths", "the teacher's engine: its placement"
    )
    batch_size: Amount | None = setting(
        None, "engines", "samples per rank and micro-step, written into the student's JSON"
    )
    lr: Annotated[float, Gt(0), Le(1)] | None = setting(
        None, "engines", "learning rate, written into the student's JSON"
    )
    mixed_precision: Literal["bf16", "fp16", "no"] | None = setting(
        None, "engines", "bf16, fp16 or no, written into the student's JSON", metavar="P"
    )
    gradient_checkpointing: bool = setting(
        False, "engines", "adds activation_checkpointing to the student's JSON"
    )
    teacher_device_strategy: Literal[tuple(strategies())] | None = setting(
        None, "engines", "a shipped teacher JSON, or its short name; see ds_configs/README.md", metavar="NAME"
    )
    teacher_on_cpu: bool = setting(False, "engines", "the same as --teacher_device_strategy cpu")
    teacher_dtype: Literal["float32", "float16", "bfloat16"] | None = setting(
        None, "engines", "float32, float16, or bfloat16; else as the teacher's JSON says", metavar="D"
    )
    objective: Objectives = setting(
        "velocity",
        "learning",
        f"{', '.join(names_in('wandistiller.objectives'))}; settings and sums under this recipe key",
    )
    guidance_scale: Scale | None = setting(
        None, "learning", "guidance, high-noise expert; default 4 (one expert: 5, `tiny`: 2)"
    )
    guidance_scale_2: Scale | None = setting(
        None, "learning", "guidance, low-noise expert; default 3 (`tiny`: 2)"
    )
    negative_prompt: str = setting(
        WAN_NEGATIVE_PROMPT, "learning", "the unconditional branch's prompt; default Wan's"
    )
    shift: Annotated[float, Gt(0), Le(1000)] | None = setting(
        None, "learning", "timestep shift; default the teacher's scheduler's"
    )
    ema: Annotated[float, Gt(0), Lt(1)] | None = setting(
        None, "learning", "decay of an average of the weights, such as 0.999, which is then exported"
    )
    ema_start: Annotated[int, Ge(0), Le(10**9)] = setting(
        0, "learning", "steps of the run before that average begins"
    )
    learning_rates: dict[str, Positive] | None = setting(
        None, "learning", 'factors by part: {"blocks.0-3": 0.1, "proj_out": 2}; `*`: the rest'
    )
    frozen: list[str] | None = setting(
        None, "learning", "parts that are not trained: blocks.0-3 patch_embedding bias"
    )
    lora: dict | None = setting(
        None, "learning", 'train adapters only: {"rank": 16, "alpha": 16, "targets": ["to_q"]}'
    )
    seed: int = setting(0, "learning", "every random draw depends on it")
    max_steps: TrainingSteps | None = setting(
        None, "learning", "optimizer steps in the whole run; default 1000"
    )
    num_steps: TrainingSteps | None = setting(None, "learning", "the same as --max_steps")
    num_epochs: Amount | None = setting(None, "learning", "passes over the data, instead of --max_steps")
    expert_blocks: Amount = setting(1, "learning", "parts of a global batch that each draw an expert")
    height: Count | None = setting(None, "size", "pixels; default 480 (`tiny`: 64)")
    width: Count | None = setting(None, "size", "pixels; default 832 (`tiny`: 64)")
    num_frames: Count = setting(1, "size", "4k+1; 1 is an image")
    buckets: Buckets = setting(
        False,
        "size",
        "cut media to the nearest of several shapes of height x width pixels; in a recipe also [[h, w], ...]",
    )
    video_fps: Annotated[float, Gt(0), Le(10**6)] | None = setting(
        None, "size", "frames a second taken of faster videos; default 16 (Wan2.2 5B: 24)"
    )
    strict: bool = setting(
        False, "size", "stop at media that cannot be read, instead of listing them in OUTPUT/skipped.json"
    )
    rollout_steps: SamplingSteps = setting(20, "size", "sampling steps of teacher-made latents")
    rollouts_per_prompt: Amount = setting(1, "size", "teacher-made latents for each prompt without media")
    prepare_batch: Amount = setting(4, "size", "samples of one teacher call, and per file of the cache")
    rollout_path: bool = setting(False, "size", "store the states of the teacher's path too")
    save_every: Count = setting(
        500, "output", "optimizer steps between checkpoints; the last is always saved"
    )
    keep_checkpoints: Count = setting(3, "output", "newest checkpoints kept")
    sample_every: Count = setting(500, "output", "optimizer steps between pictures; the last always has one")
    sample_interval: Count | None = setting(
        None, "output", "epochs between pictures, instead of --sample_every"
    )
    sample_dir: str | None = setting(None, "output", "folder of those pictures; default OUTPUT/samples")
    sample_steps: SamplingSteps = setting(40, "output", "sampling steps of those pictures")
    sample_prompts: list[str] | None = setting(
        None, "output", "prompts of the pictures; default 8 of the data's"
    )
    log_level: Literal["debug", "info", "warning"] = setting("info", "output", "")
    resume: str = setting("auto", "output", "auto, never, or a checkpoint folder")
    allow_changed: list[str] | None = setting(
        None, "output", "keys in which the checkpoint may be of another run: optimizer ..."
    )
    on_nonfinite: Literal["stop", "skip"] = setting(
        "stop", "output", "a step whose loss or gradient is not finite: stop, or skip it", metavar="P"
    )
    nonfinite_limit: Count = setting(
        10, "output", "steps of the whole run that may be skipped so; the next one stops it"
    )
    profile_memory: Count | None = setting(
        None, "output", "record the GPU's memory in steps N to N+2, into OUTPUT/profile_memory", metavar="N"
    )
    timeout: Positive = setting(
        1800.0, "output", "seconds without a sign of life from any rank before all stop"
    )
    dry_run: bool = setting(False, "output", "check everything, print the plan, load no weights, exit")


def read_run_config(values: dict[str, Any], flags: dict[str, Any], where: str = "command line") -> RunConfig:
    """Merge a recipe's values with the flags given on the command line; a flag wins.

    Args:
        where: the recipe's name, for messages.

    Raises:
        ConfigError: with all unknown keys, wrong types and wrong values at once.
    """
    values, types = dict(values), types_of(RunConfig)
    if ("max_steps" in flags) != ("num_epochs" in flags):  # the flag replaces the recipe's other key
        values.pop("num_epochs" if "max_steps" in flags else "max_steps", None)
    possible = {key: value for key, value in flags.items() if not impossible_values("", {key: value})}
    problems, good = check(where, values, types)
    flag_problems, good_flags = check("command line", possible, types)
    problems += impossible_values("command line", flags) + flag_problems
    run, given = RunConfig(**(good | good_flags)), values | flags
    missing = [key for key in PATHS if given.get(key, "") == ""]
    wrong = {key: f"`{key}` is missing. Give --{key} or the recipe key." for key in missing}
    wrong |= {key: f"`{key}` is empty. Name a JSON file." for key in JSON_FILES if given.get(key) == ""}
    if run.max_steps is not None and run.num_epochs is not None:
        wrong["max_steps"] = "`max_steps` and `num_epochs` are both given. Keep one."
    for key, text in wrong.items():
        problems.append(f"{where if key in values and key not in flags else 'command line'}: {text}")
    if problems:
        raise ConfigError(*problems)
    return run
