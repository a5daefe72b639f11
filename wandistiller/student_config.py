"""A student JSON: what the student looks like and what it starts from, checked against the teacher."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from wandistiller.batch import Expert
from wandistiller.config import ConfigError, problem, read_json, unknown_keys
from wandistiller.wan import WanFolder

WIDTH_KEYS = ("num_attention_heads", "attention_head_dim", "ffn_dim")


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentConfig:
    """The keys of a student JSON; what is left out is the teacher's."""

    init: str = "teacher"
    """`teacher`, `random`, or the folder of a diffusers pipeline or transformer."""
    num_layers: int | float | None = None
    """A number of layers, or a share of the teacher's: 0.5 is half."""
    num_attention_heads: int | None = None
    attention_head_dim: int | None = None
    ffn_dim: int | None = None
    keep_layers: str | list[int] = "uniform"
    """Teacher layers copied: `uniform` (evenly spaced), `ends` (first and last), or their numbers."""
    experts: str = "one"
    """`one` network for all sigma, or `two`, split at the teacher's boundary."""
    from_expert: str = "low_noise"
    """Which expert a one-expert student is copied from: `low_noise` or `high_noise`."""


def read_student_config(where: str, values: dict[str, Any], folder: WanFolder) -> tuple[StudentConfig, dict[str, Any]]:
    """Check a student JSON against the teacher.

    Returns:
        The checked config, and the student's full transformer config.
    Raises:
        ConfigError: with all problems at once.
    """
    known = [f.name for f in fields(StudentConfig)]
    found = unknown_keys(where, values, known)
    student = StudentConfig(**{k: v for k, v in values.items() if k in known})
    if isinstance(student.num_layers, float) and 0 < student.num_layers <= 1:
        student = replace(student, num_layers=max(1, round(student.num_layers * folder.config["num_layers"])))
    found += _value_problems(where, student, folder)
    if found:
        raise ConfigError(*found)
    if student.init not in ("teacher", "random"):
        config = _config_of(where, student)
    else:
        given = {k: getattr(student, k) for k in ("num_layers", *WIDTH_KEYS) if getattr(student, k) is not None}
        if isinstance(student.keep_layers, list):
            given["num_layers"] = len(student.keep_layers)
        config = {**folder.config, **given}
    if found := _shape_problems(where, student, config, folder):
        raise ConfigError(*found)
    return student, config


def _value_problems(where: str, student: StudentConfig, folder: WanFolder) -> list[str]:
    found = []
    if not isinstance(student.init, str) or not student.init:
        found.append(problem(where, "init", student.init, "Write teacher, random, or a folder with a Wan transformer."))
    for key in ("num_layers", *WIDTH_KEYS):
        value = getattr(student, key)
        if value is not None and (type(value) is not int or value < 1):
            found.append(problem(where, key, value, "Write a positive integer (num_layers: or a share, 0.5)."))
    choices = {"experts": ("one", "two"), "from_expert": ("low_noise", "high_noise")}
    for key, allowed in choices.items():
        if getattr(student, key) not in allowed:
            found.append(problem(where, key, getattr(student, key), f"Write {' or '.join(allowed)}."))
    if student.experts == "two" and folder.boundary is None:
        found.append(problem(where, "experts", "two", f"{folder.name} has one expert; write one."))
    keep = student.keep_layers
    if isinstance(keep, list):
        layers = folder.config["num_layers"]
        if not keep or any(type(k) is not int or not 0 <= k < layers for k in keep) or sorted(set(keep)) != keep:
            found.append(problem(where, "keep_layers", keep, f"Write rising layer numbers from 0 to {layers - 1}."))
        elif student.num_layers not in (None, len(keep)):
            found.append(problem(where, "num_layers", student.num_layers, f"keep_layers names {len(keep)}; leave one out."))
    elif keep not in ("uniform", "ends"):
        found.append(problem(where, "keep_layers", keep, "Write uniform, ends, or a list of layer numbers."))
    return found


def _shape_problems(where: str, student: StudentConfig, config: dict[str, Any], folder: WanFolder) -> list[str]:
    teacher, found = folder.config, []
    if config["attention_head_dim"] % 2:
        found.append(problem(where, "attention_head_dim", config["attention_head_dim"], "Rope needs an even number."))
    heads = student.num_attention_heads
    if heads and student.attention_head_dim is None and teacher["num_attention_heads"] % heads:
        found.append(problem(where, "num_attention_heads", heads, f"It does not divide the teacher's "
                             f"{teacher['num_attention_heads']}. Write a divisor, or give attention_head_dim too."))  # fmt: skip
    for key in ("in_channels", "out_channels", "text_dim", "patch_size"):
        if config[key] != teacher[key]:
            found.append(problem(f"{where}: {student.init}", key, config[key], f"The teacher has {teacher[key]}; a student "
                                 "must take and give the same latents and text."))  # fmt: skip
    if student.init == "random" and student.keep_layers != "uniform":
        found.append(problem(where, "keep_layers", student.keep_layers, 'A random start keeps none; leave it out.'))
    if student.init == "teacher":
        layers = teacher["num_layers"]
        if config["num_layers"] > layers:
            found.append(problem(where, "num_layers", config["num_layers"],
                                 f'{folder.name} has {layers}. Write at most that, or "init": "random".'))  # fmt: skip
        for key in WIDTH_KEYS:
            if config[key] != teacher[key]:
                found.append(problem(where, key, config[key], f'A student that starts from the teacher has its width '
                                     f'({teacher[key]}). Leave it out, or write "init": "random".'))  # fmt: skip
    return found


def _config_of(where: str, student: StudentConfig) -> dict[str, Any]:
    """The transformer config in the folder that the student starts from."""
    if any(getattr(student, k) is not None for k in ("num_layers", *WIDTH_KEYS)):
        raise ConfigError(f'{where}: "init" names a folder, which fixes the architecture. Leave the sizes out.')
    file = transformer_folder(student.init, Expert.HIGH_NOISE) / "config.json"
    if not file.is_file():
        raise ConfigError(problem(where, "init", student.init, "Write teacher, random, or a folder with a Wan transformer."))
    if student.experts == "two" and not (Path(student.init) / Expert.LOW_NOISE.value).is_dir():
        raise ConfigError(problem(where, "init", student.init, 'It has one expert. Write "experts": "one", or name another.'))
    return read_json(file)


def transformer_folder(init: str, expert: Expert) -> Path:
    inside = Path(init) / expert.value
    return inside if inside.is_dir() else Path(init)


def kept_layers(student: StudentConfig, config: dict[str, Any], folder: WanFolder) -> list[int]:
    """For each student layer the teacher layer it is copied from."""
    layers, kept = folder.config["num_layers"], config["num_layers"]
    if isinstance(student.keep_layers, list):
        return student.keep_layers
    if student.keep_layers == "ends":
        first = (kept + 1) // 2
        return [*range(first), *range(layers - (kept - first), layers)]
    return [0] if kept == 1 else [round(i * (layers - 1) / (kept - 1)) for i in range(kept)]


def stands_for(kept: list[int], layers: int) -> list[int]:
    """For each student block the last teacher block that it stands for: the one before the next block kept.

    Its output is what feature matching compares with. Source: BK-SDM, Kim et al. 2023, arXiv:2305.15798.
    """
    return [*(k - 1 for k in kept[1:]), layers - 1]
