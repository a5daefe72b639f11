"""A student JSON: architecture and initial weights of the student, checked against the teacher."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from wandistiller.experts import Expert
from wandistiller.network.folder import Folder
from wandistiller.student.pruning import fits_rope
from wandistiller.utils.errors import ConfigError, problem
from wandistiller.utils.files import read_json
from wandistiller.utils.validation import Count, Index, Text, check, types_of, write
from wandistiller.wan.checks import part_problems, transformer_problems
from wandistiller.wan.components import PartConfig, filled
from wandistiller.wan.transformer_config import TransformerConfig

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
    """`teacher`, `random`, or the folder of a diffusers pipeline or transformer, or of a run."""
    num_layers: Size | None = None
    """A number of layers, or a share of the teacher's: 0.5 is half."""
    num_attention_heads: Size | None = None
    """The product with `attention_head_dim` is the hidden width. Each may be a share of the teacher's."""
    attention_head_dim: Size | None = None
    ffn_dim: Size | None = None
    keep_layers: Layers = "uniform"
    """Teacher layers that are copied: `uniform` (evenly spaced), `ends` (first and last), their numbers, or
    `importance`: those without which the teacher's velocity changes most, measured on cached data."""
    experts: Literal["one", "two", "all"] = "one"
    """`one` network for all sigma, or `two`, split at the teacher's boundary; `all`: as many as it has."""
    from_expert: Literal["low_noise", "high_noise"] = "low_noise"
    """Source of a one-expert student."""


def read_student_config(
    where: str, values: dict[str, Any], folder: Folder, trained: TransformerConfig | None = None
) -> tuple[StudentConfig, TransformerConfig]:
    """Check a student JSON against the teacher.

    Args:
        trained: the transformer config of the run that `init` names, if it names one.
    Returns:
        The checked config, and the student's full transformer config.
    Raises:
        ConfigError: with all problems at once.
    """
    problems, good = check(where, values, types_of(StudentConfig))
    student = StudentConfig(**good)
    student = replace(student, **_shares(student, folder.config))
    if student.experts == "all":
        student = replace(student, experts="one" if folder.boundary is None else "two")
    problems += _teacher_problems(where, student, folder)
    if problems:
        raise ConfigError(*problems)
    own_folder = student.init not in ("teacher", "random")
    if own_folder:
        if any(getattr(student, k) is not None for k in SIZE_KEYS):
            remedy = "Leave the sizes out."
            raise ConfigError(f'{where}: "init" names a folder, which fixes the architecture. {remedy}')
        values = trained.raw if trained else _read_config(where, student)
    else:
        sizes = {k: getattr(student, k) for k in SIZE_KEYS if getattr(student, k) is not None}
        if isinstance(student.keep_layers, list):
            sizes["num_layers"] = len(student.keep_layers)
        values = folder.config.raw | sizes
        if folder.config.image_dim:
            values["added_kv_proj_dim"] = values["num_attention_heads"] * values["attention_head_dim"]
    source = f"{where}: {student.init}" if own_folder else where
    if problems := part_problems("transformer", PartConfig(source, values)):
        raise ConfigError(*problems)
    config = replace(TransformerConfig.of(values), expands_time=folder.config.expands_time)
    problems = _shape_problems(where, student, config, folder)
    if own_folder and not trained and not problems:  # reads headers only
        experts = list(Expert) if student.experts == "two" else [Expert.HIGH_NOISE]
        folders = [transformer_folder(student.init, expert) for expert in experts]
        problems = [p for source in folders for p in transformer_problems(source, config)]
    if problems:
        raise ConfigError(*problems)
    return student, config


def _shares(student: StudentConfig, teacher: TransformerConfig) -> dict[str, int]:
    """The sizes that are given as shares of the teacher's; a head's width is even."""
    sizes = {}
    for key in SIZE_KEYS:
        if isinstance(share := getattr(student, key), float):
            unit = 2 if key == "attention_head_dim" else 1
            sizes[key] = unit * max(1, round(share * getattr(teacher, key) / unit))
    return sizes


def _teacher_problems(where: str, student: StudentConfig, folder: Folder) -> list[str]:
    """Experts and layers that this teacher does not have."""
    problems, keep, layers = [], student.keep_layers, folder.config.num_layers
    if student.experts == "two" and folder.boundary is None:
        problems.append(problem(where, "experts", "two", f'{folder.name} has one expert; write "one".'))
    if isinstance(keep, list) and (keep[-1] >= layers or sorted(set(keep)) != keep):
        remedy = f"Write rising layer numbers from 0 to {layers - 1}."
        problems.append(problem(where, "keep_layers", keep, remedy))
    return problems


def _shape_problems(
    where: str, student: StudentConfig, config: TransformerConfig, folder: Folder
) -> list[str]:
    """Sizes that do not fit the teacher's."""
    teacher, problems = folder.config, []
    for key in ("in_channels", "out_channels", "text_dim", "patch_size", "image_dim", "pos_embed_seq_len"):
        if getattr(config, key) != (expected := getattr(teacher, key)):
            remedy = f"The teacher has {expected}; a student must take and give the same."
            problems.append(problem(f"{where}: {student.init}", key, getattr(config, key), remedy))
    if student.init == "teacher":
        for key in SIZE_KEYS:
            if (size := getattr(config, key)) > (most := getattr(teacher, key)):
                remedy = f'{folder.name} has {most}. Write at most that, or "init": "random".'
                problems.append(problem(where, key, size, remedy))
        old, new = teacher.attention_head_dim, config.attention_head_dim
        if not (problems or fits_rope(old, new)):
            fitting = [n for n in range(2, old + 1, 2) if fits_rope(old, n)]
            text = "Rope divides it among time, height and width in parts that the teacher's does not have."
            problems.append(problem(where, "attention_head_dim", new, f"{text} Write one of {fitting}."))
    return problems


def _read_config(where: str, student: StudentConfig) -> dict[str, Any]:
    """Read the transformer config in the folder that the student starts from."""
    file = transformer_folder(student.init, Expert.HIGH_NOISE) / "config.json"
    if not file.is_file():
        remedy = "Write teacher, random, or a folder: of a Wan transformer, or of a run with a checkpoint."
        raise ConfigError(problem(where, "init", student.init, remedy))
    has_two = (low := Path(student.init) / Expert.LOW_NOISE.value).is_dir()
    if student.experts == "one" and has_two:
        remedy = f"It has two experts. Name one of them, {file.parent} or {low}, or "
        remedy += 'write "experts": "two" where the teacher has two.'
        raise ConfigError(problem(where, "init", student.init, remedy))
    if student.experts == "two" and not has_two:
        remedy = 'It has one expert. Write "experts": "one", or name another.'
        raise ConfigError(problem(where, "init", student.init, remedy))
    return filled("transformer", read_json(file))


def transformer_folder(init: str, expert: Expert) -> Path:
    """Return an expert's folder in a pipeline; `init` itself if that is a transformer's folder."""
    inside = Path(init) / expert.value
    return inside if inside.is_dir() else Path(init)


def kept_layers(student: StudentConfig, config: TransformerConfig, folder: Folder) -> list[int]:
    """Return for each student layer the teacher layer that it is copied from."""
    layers, keep = folder.config.num_layers, config.num_layers
    if isinstance(student.keep_layers, list):
        return student.keep_layers
    if student.keep_layers == IMPORTANCE:
        raise ValueError(
            "Layers are chosen by importance only after calibration: call `Job.with_layers` first."
        )
    if student.keep_layers == "ends":
        first = (keep + 1) // 2
        return [*range(first), *range(layers - (keep - first), layers)]
    return [0] if keep == 1 else [round(i * (layers - 1) / (keep - 1)) for i in range(keep)]


def source_expert(student: StudentConfig, folder: Folder, expert: Expert) -> Expert:
    """Return the teacher's expert that one of the student's networks starts from."""
    if len(folder.configs) == 1:
        return Expert.HIGH_NOISE
    return expert if student.experts == "two" else Expert.of_key(student.from_expert)


def teacher_block_of(copied: list[int], layers: int) -> list[int]:
    """Return for each student block the last teacher block that it replaces: the one before the next copied.

    Feature matching compares with its output. Source: BK-SDM, Kim et al. 2023, arXiv:2305.15798.
    """
    # a student of more layers may have the first twice
    return [*(max(0, k - 1) for k in copied[1:]), layers - 1]


def lineage(student: StudentConfig, config: TransformerConfig, folder: Folder) -> list[int]:
    """Return the teacher blocks that feature matching compares the blocks of a student's network with.

    `keep_layers` must be resolved (no longer `importance`). The blocks are evenly spaced for a student that
    does not start from the teacher's layers.
    """
    return teacher_block_of(kept_layers(student, config, folder), folder.config.num_layers)
