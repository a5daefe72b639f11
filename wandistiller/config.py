"""A run's settings: one dataclass that is the recipe's keys, the command line's flags and `resolved/run.json` at once."""

import dataclasses
import json
import types
import typing
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from wandistiller.problems import DEEP, ConfigError, impossible_values, nearest, problem, readable, unknown_keys

SHIPPED = next(p for p in (Path(__file__).parent / "ds_configs", Path(__file__).parent.parent / "ds_configs") if p.is_dir())
STRATEGIES = {
    "gpu": "replicated", "balanced": "sharded", "offload": "zero_inference_cpu", "disk": "zero_inference_nvme",
    "cpu": "host_cpu", "gpu0": "owner", "sequential": "device_map_sequential", "custom": "device_map_custom", "auto": "auto",
}  # fmt: skip
"""--teacher_device_strategy -> the JSON in ds_configs/teacher/ that it means."""
AUTO = "auto"
"""What leaves the student's engine, or the teacher's placement, to the machine; see auto.py."""
DEFAULT_ENGINE = "ds_configs/student/zero2_offload.json"
"""The student's; with `auto` what is not chosen is as it says."""
MIXED = ("bf16", "fp16", "no")
DTYPES = ("float32", "float16", "bfloat16")
ON_NONFINITE = ("stop", "skip")
MOST = {
    "rollout_steps": 1000, "sample_steps": 1000,  # of the noise levels that a Wan was trained at
    "shift": 1000, "guidance_scale": 1000, "guidance_scale_2": 1000, "lr": 1, "video_fps": 10**6,
    "batch_size": 10**6, "prepare_batch": 10**6, "rollouts_per_prompt": 10**6, "num_epochs": 10**6,
    "max_steps": 10**9, "ema_start": 10**9, "expert_blocks": 10**6,
}  # fmt: skip
"""Setting -> the largest value that can be meant."""
WAN_NEGATIVE_PROMPT = (  # Wan2.1's and Wan2.2's own, wan/configs/shared_config.py `sample_neg_prompt`
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)


def shipped(path: str) -> Path:
    """`path` from the current folder; a `ds_configs/...` that is not there is taken from the files we ship."""
    here = Path(path)
    if not here.exists() and here.parts[:1] == ("ds_configs",):
        return SHIPPED.joinpath(*here.parts[1:])
    return here


def read_json(path: str | Path) -> dict[str, Any]:
    """Read one JSON object. Integers of 19 digits and more become floats.

    Raises:
        ConfigError: the file cannot be read, is no JSON, is no object, or holds what no setting can be.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = min(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
            raise ConfigError(f"{path}: `{twice}` is given twice. Keep one.")
        return found

    with readable(path):
        file = shipped(str(path))
        if file.stat() and not (file.is_file() or file.is_dir()):  # a pipe would be read by one rank, and keep it waiting
            raise ConfigError(f"{path}: is no plain file, which every rank could read. Name one.")
        raw = file.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=once, parse_int=lambda n: int(n) if len(n) < 19 else float(n))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}. Save it as UTF-8.") from None
    except json.JSONDecodeError as error:
        remedy = "Mend that place; JSON has double quotes, no comments, and no comma after the last value." if text.strip() else (
            "The file is empty; write one JSON object, {...}.")  # fmt: skip
        raise ConfigError(f"{path}: not valid JSON: {error}. {remedy}") from None
    except RecursionError:
        raise ConfigError(f"{path}: {DEEP}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}. Write one JSON object, {{...}}.")
    if found := impossible_values(path, value):
        raise ConfigError(*found)
    return value


def setting(default: Any, group: str, help: str, **more: Any) -> Any:
    """A field of RunConfig; `more` goes to argparse (metavar, choices)."""
    return field(default=default, metadata={"group": group, "help": help, "argparse": more})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Every key of a recipe. None means: the teacher's own value, or the rule that the help text gives."""

    teacher_path: str = setting("", "paths", "diffusers Wan pipeline: folder, hub id, or `tiny` (embedded)")
    teacher_revision: str | None = setting(None, "paths", "branch, tag or commit of a hub id; default its main branch")
    data_path: str = setting("", "paths", "prompts: .txt, .jsonl, a folder of media with .txt beside, or `tiny`")
    output_dir: str = setting("", "paths", "where the run is written")
    cache_dir: str | None = setting(None, "paths", "encoded prompts and latents; default OUTPUT/cache")
    student_config: str | dict = setting("ds_configs/students/half.json", "paths", "the student's architecture and start")
    deepspeed_config: str | dict = setting(DEFAULT_ENGINE, "paths", "the student's engine, or auto")
    teacher_deepspeed_config: str | dict = setting(
        "ds_configs/teacher/zero_inference_cpu.json", "paths", "the teacher's engine: its placement"
    )
    batch_size: int | None = setting(None, "engines", "samples per rank and micro-step, written into the student's JSON")
    lr: float | None = setting(None, "engines", "learning rate, written into the student's JSON")
    mixed_precision: str | None = setting(
        None, "engines", "bf16, fp16 or no, written into the student's JSON", choices=MIXED, metavar="P"
    )
    gradient_checkpointing: bool = setting(False, "engines", "adds activation_checkpointing to the student's JSON")
    teacher_device_strategy: str | None = setting(
        None, "engines", "short for a shipped teacher JSON; see ds_configs/README.md", choices=STRATEGIES, metavar="NAME"
    )
    teacher_on_cpu: bool = setting(False, "engines", "the same as --teacher_device_strategy cpu")
    teacher_dtype: str | None = setting(
        None, "engines", "float32, float16, or bfloat16; else as the teacher's JSON says", choices=DTYPES, metavar="D"
    )
    objective: str | dict | list[str | dict] = setting(
        "velocity", "learning", "velocity, feature or trajectory; settings and sums under this recipe key"
    )
    guidance_scale: float | None = setting(None, "learning", "guidance, high-noise expert; default 4 (one expert: 5, `tiny`: 2)")
    guidance_scale_2: float | None = setting(None, "learning", "guidance, low-noise expert; default 3 (`tiny`: 2)")
    negative_prompt: str = setting(WAN_NEGATIVE_PROMPT, "learning", "the unconditional branch's prompt; default Wan's")
    shift: float | None = setting(None, "learning", "timestep shift; default the teacher's scheduler's")
    ema: float | None = setting(None, "learning", "decay of an average of the weights, such as 0.999, which is then exported")
    ema_start: int = setting(0, "learning", "steps of the run before that average begins")
    learning_rates: dict | None = setting(None, "learning", 'factors by part: {"blocks.0-3": 0.1, "proj_out": 2}; `*`: the rest')
    frozen: list[str] | None = setting(None, "learning", "parts that are not trained: blocks.0-3 patch_embedding bias")
    lora: dict | None = setting(None, "learning", 'train adapters only: {"rank": 16, "alpha": 16, "targets": ["to_q"]}')
    seed: int = setting(0, "learning", "every random draw depends on it")
    max_steps: int | None = setting(None, "learning", "optimizer steps in the whole run; default 1000")
    num_steps: int | None = setting(None, "learning", "the same as --max_steps")
    num_epochs: int | None = setting(None, "learning", "passes over the data, instead of --max_steps")
    expert_blocks: int = setting(1, "learning", "parts of a global batch that each draw an expert")
    height: int | None = setting(None, "size", "pixels; default 480 (`tiny`: 64)")
    width: int | None = setting(None, "size", "pixels; default 832 (`tiny`: 64)")
    num_frames: int = setting(1, "size", "4k+1; 1 is an image")
    buckets: bool | list[list[int]] = setting(
        False, "size", "cut media to the nearest of several shapes of height x width pixels; in a recipe also [[h, w], ...]"
    )
    video_fps: float | None = setting(None, "size", "frames a second taken of faster videos; default 16 (Wan2.2 5B: 24)")
    strict: bool = setting(False, "size", "stop at media that cannot be read, instead of listing them in OUTPUT/skipped.json")
    rollout_steps: int = setting(20, "size", "sampling steps of teacher-made latents")
    rollouts_per_prompt: int = setting(1, "size", "teacher-made latents for each prompt without media")
    prepare_batch: int = setting(4, "size", "samples of one teacher call, and per file of the cache")
    rollout_path: bool = setting(False, "size", "store the states of the teacher's path too")
    save_every: int = setting(500, "output", "optimizer steps between checkpoints; the last is always saved")
    keep_checkpoints: int = setting(3, "output", "newest checkpoints kept")
    sample_every: int = setting(500, "output", "optimizer steps between pictures; the last always has one")
    sample_interval: int | None = setting(None, "output", "epochs between pictures, instead of --sample_every")
    sample_dir: str | None = setting(None, "output", "folder of those pictures; default OUTPUT/samples")
    sample_steps: int = setting(40, "output", "sampling steps of those pictures")
    sample_prompts: list[str] | None = setting(None, "output", "prompts of the pictures; default 8 of the data's")
    log_level: str = setting("info", "output", "", choices=("debug", "info", "warning"))
    resume: str = setting("auto", "output", "auto, never, or a checkpoint folder")
    allow_changed: list[str] | None = setting(None, "output", "keys in which the checkpoint may be of another run: optimizer ...")
    on_nonfinite: str = setting(
        "stop", "output", "a step whose loss or gradient is not finite: stop, or skip it", choices=ON_NONFINITE, metavar="P"
    )
    nonfinite_limit: int = setting(10, "output", "steps of the whole run that may be skipped so; the next one stops it")
    profile_memory: int | None = setting(
        None, "output", "draw who holds what memory in steps N to N+2, into OUTPUT/profile_memory", metavar="N"
    )
    timeout: float = setting(1800.0, "output", "seconds without a sign of life from any rank before all stop")
    dry_run: bool = setting(False, "output", "check everything, print the plan, load no weights, exit")

    def problems(self) -> list[tuple[str, str]]:
        """Everything wrong with the values themselves, whatever the teacher: (key, message)."""
        found = [
            (k, f"`{k}` is missing. Give --{k} or the recipe key.") for k in ("teacher_path", "data_path", "output_dir")
            if not getattr(self, k)
        ]
        found += [(key, f"`{key}` is empty. Name a JSON file.") for key in
                  ("student_config", "deepspeed_config", "teacher_deepspeed_config") if getattr(self, key) == ""]
        positive = ("batch_size", "lr", "max_steps", "num_epochs", "expert_blocks", "height", "width", "num_frames", "shift",
                    "video_fps", "rollout_steps", "rollouts_per_prompt", "prepare_batch", "save_every", "keep_checkpoints",
                    "sample_every", "sample_interval", "sample_steps", "nonfinite_limit",
                    "profile_memory", "timeout")  # fmt: skip
        for key in positive:
            value = getattr(self, key)
            if value is not None and value <= 0:
                found.append((key, f"`{key}` is {value}. Write a positive number."))
        for key, most in MOST.items():
            if abs(getattr(self, key) or 0) > most:
                found.append((key, f"`{key}` is {getattr(self, key)}. Write at most {most}."))
        if self.max_steps is not None and self.num_epochs is not None:
            found.append(("max_steps", "`max_steps` and `num_epochs` are both given. Keep one."))
        for key, known in (("teacher_device_strategy", STRATEGIES), ("teacher_dtype", DTYPES),
                           ("mixed_precision", MIXED), ("on_nonfinite", ON_NONFINITE)):  # fmt: skip
            if (value := getattr(self, key)) is not None and value not in known:
                found.append((key, f"`{key}` is {value!r}. Write one of: {', '.join(known)}.{nearest(value, known)}"))
        if self.log_level not in ("debug", "info", "warning"):
            found.append(("log_level", f"`log_level` is {self.log_level!r}. Write debug, info or warning."))
        return found


def read_run_config(values: dict[str, Any], flags: dict[str, Any], where: str = "command line") -> RunConfig:
    """Merge a recipe's values with the flags given on the command line; a flag wins.

    Args:
        where: the recipe's name, for messages.

    Raises:
        ConfigError: with all unknown keys, wrong types and wrong values at once.
    """
    values, flags = dict(values), dict(flags)
    known = {f.name: f.type for f in fields(RunConfig)}
    found = unknown_keys(where, values, known) + impossible_values("command line", flags)
    mistyped: set[str] = set()
    for name, kind in known.items():
        for source, given in ((where, values), ("command line", flags)):
            if name in given and not _fits(given[name], kind):
                wanted = str(kind if isinstance(kind, types.UnionType) else kind.__name__).replace(" | ", " or ")
                found.append(problem(source, name, given.pop(name), f"Write a value of type {wanted}."))
                mistyped.add(name)
    if ("max_steps" in flags) != ("num_epochs" in flags):  # the flag replaces the recipe's other way to say it
        values.pop("num_epochs" if "max_steps" in flags else "max_steps", None)
    config = RunConfig(**({k: v for k, v in values.items() if k in known} | flags))
    for key, text in config.problems():
        if key not in mistyped:
            found.append(f"{'command line' if key in flags or key not in values else where}: {text}")
    if found:
        raise ConfigError(*found)
    return config


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a JSON value is of an annotated type; an int passes for a float, a bool is no int."""
    options = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    for option in options:
        kind = typing.get_origin(option) or option
        if kind is list and isinstance(value, list):
            return all(_fits(v, typing.get_args(option)[0]) for v in value)
        if type(value) is kind or (kind is float and type(value) is int):
            return True
    return False


def as_dict(config: RunConfig) -> dict[str, Any]:
    """The config as a recipe that can be passed back in."""
    return dataclasses.asdict(config)
