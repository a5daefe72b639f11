"""A student JSON: what the student looks like and what it starts from, checked against the teacher."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from wandistiller.batch import Expert
from wandistiller.config import read_json
from wandistiller.problems import ConfigError, problem, unknown_keys
from wandistiller.prune import fits_rope
from wandistiller.wan import WanFolder, weight_problems
from wandistiller.wan_configs import transformer_problems

WIDTH_KEYS = ("num_attention_heads", "attention_head_dim", "ffn_dim")
SIZE_KEYS = ("num_layers", *WIDTH_KEYS)
CHOICES = {
    "experts": ("one", "two"),
    "from_expert": ("low_noise", "high_noise", "average"),
    "width_basis": ("channels", "principal", "truncate"),
    "ffn_units": ("activation", "weight"),
}
IMPORTANCE = "importance"


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentConfig:
    """The keys of a student JSON; what is left out is the teacher's."""

    init: str = "teacher"
    """`teacher`, `random`, or the folder of a diffusers pipeline or transformer."""
    num_layers: int | float | None = None
    """A number of layers, or a share of the teacher's: 0.5 is half."""
    num_attention_heads: int | float | None = None
    """With `attention_head_dim` also the hidden width, which is their product. Each may be a share of the teacher's."""
    attention_head_dim: int | float | None = None
    ffn_dim: int | float | None = None
    keep_layers: str | list[int] = "uniform"
    """Teacher layers copied: `uniform` (evenly spaced), `ends` (first and last), their numbers, or `importance`: those whose
    absence the teacher's velocity suffers from most, measured on cached data when training starts."""
    experts: str = "one"
    """`one` network for all sigma, or `two`, split at the teacher's boundary."""
    from_expert: str = "low_noise"
    """Which expert a one-expert student is copied from: `low_noise`, `high_noise`, or the `average` of their weights."""
    width_basis: str = "channels"
    """What a smaller hidden width keeps of the residual stream: its strongest `channels`, its `principal` directions, or
    `truncate`, the first channels."""
    ffn_units: str = "activation"
    """Which feed-forward units a smaller `ffn_dim` keeps: those that write most as measured on cached data (`activation`), or
    those with the largest weights (`weight`)."""


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
    student = replace(student, **_shares(student, folder.config))
    found += _value_problems(where, student, folder)
    if found:
        raise ConfigError(*found)
    if student.init not in ("teacher", "random"):
        config = _config_of(where, student)
    else:
        given = {k: getattr(student, k) for k in SIZE_KEYS if getattr(student, k) is not None}
        if isinstance(student.keep_layers, list):
            given["num_layers"] = len(student.keep_layers)
        config = {**folder.config, **given}
    named = where if student.init in ("teacher", "random") else f"{where}: {student.init}"
    found = transformer_problems(named, config) or _shape_problems(where, student, config, folder)
    if found := found or _weight_problems(student, config):
        raise ConfigError(*found)
    return student, config


def _weight_problems(student: StudentConfig, config: dict[str, Any]) -> list[str]:
    """What is wrong with the weights in the folder that the student starts from; reads headers only."""
    if student.init in ("teacher", "random"):
        return []
    experts = Expert if student.experts == "two" else (Expert.HIGH_NOISE,)
    return [p for e in experts for p in weight_problems(transformer_folder(student.init, e), config)]


def _shares(student: StudentConfig, teacher: dict[str, Any]) -> dict[str, int]:
    """The numbers that shares of the teacher's mean; a head's width is even."""
    shares = {k: getattr(student, k) for k in SIZE_KEYS if isinstance(getattr(student, k), float)}
    units = {"attention_head_dim": 2}
    return {
        k: units.get(k, 1) * max(1, round(share * teacher[k] / units.get(k, 1)))
        for k, share in shares.items() if 0 < share <= 1
    }  # fmt: skip


def _value_problems(where: str, student: StudentConfig, folder: WanFolder) -> list[str]:
    found = []
    if not isinstance(student.init, str) or not student.init:
        found.append(problem(where, "init", student.init, "Write teacher, random, or a folder with a Wan transformer."))
    for key in SIZE_KEYS:
        value = getattr(student, key)
        if value is not None and (type(value) is not int or value < 1):
            found.append(problem(where, key, value, "Write a positive integer, or a share of the teacher's, 0.5."))
    for key, allowed in CHOICES.items():
        if getattr(student, key) not in allowed:
            found.append(problem(where, key, getattr(student, key), f"Write {' or '.join(allowed)}."))
    if student.experts == "two" and folder.boundary is None:
        found.append(problem(where, "experts", "two", f'{folder.name} has one expert; write "one".'))
    keep = student.keep_layers
    if isinstance(keep, list):
        layers = folder.config["num_layers"]
        if not keep or any(type(k) is not int or not 0 <= k < layers for k in keep) or sorted(set(keep)) != keep:
            found.append(problem(where, "keep_layers", keep, f"Write rising layer numbers from 0 to {layers - 1}."))
        elif student.num_layers not in (None, len(keep)):
            found.append(problem(where, "num_layers", student.num_layers,
                                 f"keep_layers names {len(keep)}; leave one of the two keys out."))  # fmt: skip
    elif keep not in ("uniform", "ends", IMPORTANCE):
        found.append(problem(where, "keep_layers", keep, "Write uniform, ends, importance, or a list of layer numbers."))
    return found


def _shape_problems(where: str, student: StudentConfig, config: dict[str, Any], folder: WanFolder) -> list[str]:
    teacher, found = folder.config, []
    for key in ("in_channels", "out_channels", "text_dim", "patch_size"):
        if config[key] != teacher[key]:
            found.append(problem(f"{where}: {student.init}", key, config[key], f"The teacher has {teacher[key]}; a student "
                                 "must take and give the same latents and text."))  # fmt: skip
    found += _needless_problems(where, student, config, teacher)
    if student.init == "teacher":
        for key in SIZE_KEYS:
            if config[key] > teacher[key]:
                found.append(problem(where, key, config[key],
                                     f'{folder.name} has {teacher[key]}. Write at most that, or "init": "random".'))  # fmt: skip
        if not (found or fits_rope(teacher["attention_head_dim"], config["attention_head_dim"])):
            fitting = [n for n in range(2, teacher["attention_head_dim"] + 1, 2) if fits_rope(teacher["attention_head_dim"], n)]
            found.append(problem(where, "attention_head_dim", config["attention_head_dim"], "Rope's split of it among time, "
                                 f"height and width is no part of the teacher's. Write one of {fitting}."))  # fmt: skip
        if narrower(config, teacher) and not teacher["cross_attn_norm"]:
            found.append(problem(folder.name, "cross_attn_norm", False, "Only teachers with it can be made narrower; leave "
                                 "the heads alone."))  # fmt: skip
    elif (heads := student.num_attention_heads) and student.attention_head_dim is None and teacher["num_attention_heads"] % heads:
        found.append(problem(where, "num_attention_heads", heads, f"It does not divide the teacher's "
                             f"{teacher['num_attention_heads']}. Write a divisor, or give attention_head_dim too."))  # fmt: skip
    return found


def _needless_problems(where: str, student: StudentConfig, config: dict[str, Any], teacher: dict[str, Any]) -> list[str]:
    """Keys that choose what is kept, of a student that keeps all or nothing of it."""
    usual, given, found = StudentConfig(), student, []
    if student.init != "teacher":
        for key in ("keep_layers", "from_expert", "width_basis", "ffn_units"):
            if getattr(given, key) != getattr(usual, key):
                found.append(problem(where, key, getattr(given, key), "It chooses what is kept of the teacher; leave it out, "
                                     'or write "init": "teacher".'))  # fmt: skip
        return found
    if given.experts == "two" and given.from_expert != usual.from_expert:
        found.append(problem(where, "from_expert", given.from_expert, "Each of two experts starts from its own; leave it out."))
    if given.width_basis != usual.width_basis and not narrower(config, teacher):
        found.append(problem(where, "width_basis", given.width_basis, "The hidden width is the teacher's; leave it out, or "
                             "write fewer heads or a smaller head."))  # fmt: skip
    if given.ffn_units != usual.ffn_units and config["ffn_dim"] == teacher["ffn_dim"]:
        found.append(problem(where, "ffn_units", given.ffn_units, "ffn_dim is the teacher's; leave it out, or write less."))
    return found


def narrower(config: dict[str, Any], teacher: dict[str, Any]) -> bool:
    """Whether the hidden width, which is that of all heads together, was cut."""
    return any(config[key] != teacher[key] for key in ("num_attention_heads", "attention_head_dim"))


def _config_of(where: str, student: StudentConfig) -> dict[str, Any]:
    """The transformer config in the folder that the student starts from."""
    if any(getattr(student, k) is not None for k in SIZE_KEYS):
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
    if student.keep_layers == IMPORTANCE:
        raise ValueError("Which layers are important is known once they were measured: ask `begin` for the run's job.")
    if student.keep_layers == "ends":
        first = (kept + 1) // 2
        return [*range(first), *range(layers - (kept - first), layers)]
    return [0] if kept == 1 else [round(i * (layers - 1) / (kept - 1)) for i in range(kept)]


def source_experts(student: StudentConfig, folder: WanFolder, expert: Expert) -> list[Expert]:
    """The teacher's experts that one of the student's networks is made of; of several the average."""
    if len(folder.configs) == 1:
        return [Expert.HIGH_NOISE]
    if student.experts == "two":
        return [expert]
    return {"low_noise": [Expert.LOW_NOISE], "high_noise": [Expert.HIGH_NOISE], "average": list(Expert)}[student.from_expert]


def stands_for(kept: list[int], layers: int) -> list[int]:
    """For each student block the last teacher block that it stands for: the one before the next block kept.

    Its output is what feature matching compares with. Source: BK-SDM, Kim et al. 2023, arXiv:2305.15798.
    """
    return [*(max(0, k - 1) for k in kept[1:]), layers - 1]  # a student of more layers may stand for the first twice


def lineage(student: StudentConfig, config: dict[str, Any], folder: WanFolder) -> dict[Expert, list[int]]:
    """For each network of the student the teacher blocks that its blocks stand for; feature matching compares with these.

    To be asked once `keep_layers` is resolved (no longer `importance`): of a Job that `train` has begun. A student that
    does not start from the teacher's layers stands for evenly spaced ones.
    """
    blocks = stands_for(kept_layers(student, config, folder), folder.config["num_layers"])
    return {expert: blocks for expert in (Expert if student.experts == "two" else (Expert.HIGH_NOISE,))}
