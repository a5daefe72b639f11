"""A student JSON: architecture and initial weights of the student, checked against the teacher."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from wandistiller.batch import Expert
from wandistiller.student.pruning import fits_rope
from wandistiller.utils.errors import ConfigError, problem
from wandistiller.utils.files import read_json
from wandistiller.utils.validation import Count, Index, Text, check, types_of, write
from wandistiller.wan.checks import transformer_problems
from wandistiller.wan.pipeline import WanFolder, weight_problems

WIDTH_KEYS = ("num_attention_heads", "attention_head_dim", "ffn_dim")
SIZE_KEYS = ("num_layers", *WIDTH_KEYS)
IMPORTANCE = "importance"
Size = Annotated[
    Count | Annotated[float, Field(gt=0, le=1)],
    write("a positive integer, or a share of the teacher's, such as 0.5"),
]
Layers = Annotated[
    Literal["uniform", "ends", "importance"] | Annotated[list[Index], Field(min_length=1)],
    write("uniform, ends, importance, or a list of layer numbers"),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentConfig:
    """The keys of a student JSON; the teacher's values are the defaults."""

    init: Annotated[Text, write("teacher, random, or a folder with a Wan transformer")] = "teacher"
    """`teacher`, `random`, or the folder of a diffusers pipeline or transformer."""
    num_layers: Size | None = None
    """A number of layers, or a share of the teacher's: 0.5 is half."""
    num_attention_heads: Size | None = None
    """The product with `attention_head_dim` is the hidden width. Each may be a share of the teacher's."""
    attention_head_dim: Size | None = None
    ffn_dim: Size | None = None
    keep_layers: Layers = "uniform"
    """Teacher layers that are copied: `uniform` (evenly spaced), `ends` (first and last), their numbers, or
    `importance`: those without which the teacher's velocity changes most, measured on cached data."""
    experts: Literal["one", "two"] = "one"
    """`one` network for all sigma, or `two`, split at the teacher's boundary."""
    from_expert: Literal["low_noise", "high_noise", "average"] = "low_noise"
    """Source of a one-expert student: `low_noise`, `high_noise`, or the `average` of their weights."""


def read_student_config(
    where: str, values: dict[str, Any], folder: WanFolder
) -> tuple[StudentConfig, dict[str, Any]]:
    """Check a student JSON against the teacher.

    Returns:
        The checked config, and the student's full transformer config.
    Raises:
        ConfigError: with all problems at once.
    """
    found, good = check(where, values, types_of(StudentConfig))
    student = StudentConfig(**good)
    student = replace(student, **_shares(student, folder.config))
    found += _teacher_problems(where, student, folder)
    if found:
        raise ConfigError(*found)
    own_folder = student.init not in ("teacher", "random")
    if own_folder:
        config = _config_of(where, student)
    else:
        given = {k: getattr(student, k) for k in SIZE_KEYS if getattr(student, k) is not None}
        if isinstance(student.keep_layers, list):
            given["num_layers"] = len(student.keep_layers)
        config = {**folder.config, **given}
    found = transformer_problems(f"{where}: {student.init}" if own_folder else where, config)
    found = found or _shape_problems(where, student, config, folder)
    if own_folder and not found:  # reads headers only
        folders = [transformer_folder(student.init, e) for e in _experts(student)]
        found = [p for source in folders for p in weight_problems(source, config)]
    if found:
        raise ConfigError(*found)
    return student, config


def _experts(student: StudentConfig) -> list[Expert]:
    """The student's networks."""
    return list(Expert) if student.experts == "two" else [Expert.HIGH_NOISE]


def _shares(student: StudentConfig, teacher: dict[str, Any]) -> dict[str, int]:
    """The sizes that are given as shares of the teacher's; a head's width is even."""
    shares = {k: getattr(student, k) for k in SIZE_KEYS if isinstance(getattr(student, k), float)}
    units = {"attention_head_dim": 2}
    return {
        k: units.get(k, 1) * max(1, round(share * teacher[k] / units.get(k, 1)))
        for k, share in shares.items()
    }


def _teacher_problems(where: str, student: StudentConfig, folder: WanFolder) -> list[str]:
    """Experts and layers that this teacher does not have."""
    found, keep, layers = [], student.keep_layers, folder.config["num_layers"]
    if student.experts == "two" and folder.boundary is None:
        found.append(problem(where, "experts", "two", f'{folder.name} has one expert; write "one".'))
    if isinstance(keep, list) and (keep[-1] >= layers or sorted(set(keep)) != keep):
        remedy = f"Write rising layer numbers from 0 to {layers - 1}."
        found.append(problem(where, "keep_layers", keep, remedy))
    elif isinstance(keep, list) and student.num_layers not in (None, len(keep)):
        remedy = f"keep_layers names {len(keep)}; leave one of the two keys out."
        found.append(problem(where, "num_layers", student.num_layers, remedy))
    return found


def _shape_problems(
    where: str, student: StudentConfig, config: dict[str, Any], folder: WanFolder
) -> list[str]:
    """Sizes that do not fit the teacher's."""
    teacher = folder.config
    remedy = "The teacher has {}; a student must take and give the same latents and text."
    found = [
        problem(f"{where}: {student.init}", key, config[key], remedy.format(teacher[key]))
        for key in ("in_channels", "out_channels", "text_dim", "patch_size")
        if config[key] != teacher[key]
    ]
    found += _needless_problems(where, student)
    heads = student.num_attention_heads
    if student.init == "teacher":
        remedy = folder.name + ' has {}. Write at most that, or "init": "random".'
        found += [
            problem(where, key, config[key], remedy.format(teacher[key]))
            for key in SIZE_KEYS
            if config[key] > teacher[key]
        ]
        found += [] if found else _rope_problems(where, config, teacher)
        if narrower(config, teacher) and not teacher["cross_attn_norm"]:
            remedy = "Only teachers with it can be made narrower; leave the heads alone."
            found.append(problem(folder.name, "cross_attn_norm", False, remedy))
    elif heads and student.attention_head_dim is None and teacher["num_attention_heads"] % heads:
        remedy = (
            f"It does not divide the teacher's {teacher['num_attention_heads']}. Write a divisor, or give "
        )
        found.append(problem(where, "num_attention_heads", heads, f"{remedy}attention_head_dim too."))
    return found


def _rope_problems(where: str, config: dict[str, Any], teacher: dict[str, Any]) -> list[str]:
    old, new = teacher["attention_head_dim"], config["attention_head_dim"]
    if fits_rope(old, new):
        return []
    fitting = [n for n in range(2, old + 1, 2) if fits_rope(old, n)]
    remedy = "Rope's split of it among time, height and width is no part of the teacher's. Write one of "
    return [problem(where, "attention_head_dim", new, f"{remedy}{fitting}.")]


def _needless_problems(where: str, student: StudentConfig) -> list[str]:
    """Keys that select parts of the teacher, for a student that copies all or none of them."""
    copied = 'It selects parts of the teacher; leave it out, or write "init": "teacher".'
    reasons = dict.fromkeys(("keep_layers", "from_expert"), copied)
    if student.init == "teacher":
        one_each = "Each of two experts starts from its own; leave it out."
        reasons = {"from_expert": one_each} if student.experts == "two" else {}
    given = {key: getattr(student, key) for key in reasons}
    usual = StudentConfig()
    return [
        problem(where, key, given[key], why)
        for key, why in reasons.items()
        if given[key] != getattr(usual, key)
    ]


def narrower(config: dict[str, Any], teacher: dict[str, Any]) -> bool:
    """Return whether the hidden width, that of all heads together, is smaller than the teacher's."""
    return any(config[key] != teacher[key] for key in ("num_attention_heads", "attention_head_dim"))


def _config_of(where: str, student: StudentConfig) -> dict[str, Any]:
    """Read the transformer config in the folder that the student starts from."""
    if any(getattr(student, k) is not None for k in SIZE_KEYS):
        raise ConfigError(
            f'{where}: "init" names a folder, which fixes the architecture. Leave the sizes out.'
        )
    file = transformer_folder(student.init, Expert.HIGH_NOISE) / "config.json"
    if not file.is_file():
        remedy = "Write teacher, random, or a folder with a Wan transformer."
        raise ConfigError(problem(where, "init", student.init, remedy))
    if student.experts == "two" and not (Path(student.init) / Expert.LOW_NOISE.value).is_dir():
        remedy = 'It has one expert. Write "experts": "one", or name another.'
        raise ConfigError(problem(where, "init", student.init, remedy))
    return read_json(file)


def transformer_folder(init: str, expert: Expert) -> Path:
    """Return an expert's folder in a pipeline; `init` itself if that is a transformer's folder."""
    inside = Path(init) / expert.value
    return inside if inside.is_dir() else Path(init)


def kept_layers(student: StudentConfig, config: dict[str, Any], folder: WanFolder) -> list[int]:
    """Return for each student layer the teacher layer that it is copied from."""
    layers, kept = folder.config["num_layers"], config["num_layers"]
    if isinstance(student.keep_layers, list):
        return student.keep_layers
    if student.keep_layers == IMPORTANCE:
        raise ValueError(
            "Layers are chosen by importance only after calibration: call `Job.with_layers` first."
        )
    if student.keep_layers == "ends":
        first = (kept + 1) // 2
        return [*range(first), *range(layers - (kept - first), layers)]
    return [0] if kept == 1 else [round(i * (layers - 1) / (kept - 1)) for i in range(kept)]


def source_experts(student: StudentConfig, folder: WanFolder, expert: Expert) -> list[Expert]:
    """Return the teacher's experts whose average one of the student's networks starts from."""
    if len(folder.configs) == 1:
        return [Expert.HIGH_NOISE]
    if student.experts == "two":
        return [expert]
    return list(Expert) if student.from_expert == "average" else [Expert[student.from_expert.upper()]]


def teacher_block_of(kept: list[int], layers: int) -> list[int]:
    """Return for each student block the last teacher block that it replaces: the one before the next kept.

    Feature matching compares with its output. Source: BK-SDM, Kim et al. 2023, arXiv:2305.15798.
    """
    # a student of more layers may have the first twice
    return [*(max(0, k - 1) for k in kept[1:]), layers - 1]


def lineage(student: StudentConfig, config: dict[str, Any], folder: WanFolder) -> dict[Expert, list[int]]:
    """Return by network of the student the teacher blocks that feature matching compares its blocks with.

    `keep_layers` must be resolved (no longer `importance`). The blocks are evenly spaced for a student that
    does not start from the teacher's layers.
    """
    blocks = teacher_block_of(kept_layers(student, config, folder), folder.config["num_layers"])
    return dict.fromkeys(_experts(student), blocks)
