"""Opens a diffusers Wan pipeline: a folder, a hub id or an embedded one, whose JSON files are checked."""

import json
import re
import shlex
from pathlib import Path, PurePosixPath

from wandistiller.experts import Expert
from wandistiller.network.weight_reader import unfinished
from wandistiller.utils.errors import ADDRESS, ConfigError, problem, readable
from wandistiller.utils.files import TINY, read_json
from wandistiller.wan import checks, components
from wandistiller.wan.components import own_settings, shift_key
from wandistiller.wan.folder import WanFolder
from wandistiller.wan.hub import CONFIG_FILES, WEIGHT_FILES, fetch
from wandistiller.wan.single_files import EXAMPLE, folder_of
from wandistiller.wan.transformer_config import TransformerConfig


@readable()
def open_wan(name: str, weights: bool = False, revision: str | None = None) -> WanFolder:
    """Describe a diffusers Wan pipeline: a folder, a hub id, `tiny` or `tiny-video`, a JSON of files.

    Args:
        weights: for a hub id, fetch the weights too and not only the JSON files.
        revision: branch, tag or commit of a hub id; None is its main branch.
    Raises:
        ConfigError: there is no such folder, or it is not a Wan pipeline that can be distilled.
    """
    path, commit = TINY.get(name, Path(name)), None
    if ADDRESS.match(name):
        hub_id = "/".join(PurePosixPath(name).parts[2:4])
        raise ConfigError(f"{name}: is an address. Give the hub id, such as {hub_id}, or a folder here.")
    if path.suffix == ".json":
        path = folder_of(path)
    if path.is_file():
        remedy = f"Write a JSON that names all its files, and give that: {json.dumps(EXAMPLE)}."
        raise ConfigError(f"{name}: is one file of a pipeline. {remedy}")
    if not path.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        path = fetch(name, revision or "main", CONFIG_FILES + WEIGHT_FILES if weights else CONFIG_FILES)
        commit = path.name
    elif revision:
        remedy = "Only a hub id has revisions; leave it out."
        raise ConfigError(problem(name, "teacher_revision", revision, remedy))
    if of_run := run_problem(path, name):
        raise ConfigError(of_run)
    if problems := unfinished(path, [file for file in CONFIG_FILES if file != "README.md"]):
        raise ConfigError(*problems)
    index = _read(path, name, "model_index.json")
    if index.values.get("_class_name") not in checks.PIPELINES:
        both = f"text-to-video ({checks.TEXT_TO_VIDEO}) or image-to-video ({checks.IMAGE_TO_VIDEO})"
        remedy = f"Give a diffusers Wan of {both}."
        raise ConfigError(index.problem("_class_name", f"{remedy} {checks.UNSUPPORTED}"))
    # boundary_ratio alone proves nothing: a converted Wan2.1 can carry it without a second transformer
    experts = [e for e in Expert if e is Expert.HIGH_NOISE or (path / e.value / "config.json").is_file()]
    configs = {e: _read(path, name, f"{e.value}/config.json") for e in experts}
    vae = _read(path, name, "vae/config.json")
    scheduler = _read(path, name, "scheduler/scheduler_config.json")
    boundary = index.values.get("boundary_ratio") if len(experts) == 2 else None
    image = bool(configs[Expert.HIGH_NOISE].values.get("image_dim"))
    parts = [*(e.value for e in experts), *(components.IMAGE_PARTS if image else ())]
    problems = components.index_problems(index, parts, scheduler.values.get("_class_name"))
    problems += [p for config in configs.values() for p in checks.part_problems("transformer", config)]
    problems += checks.part_problems("vae", vae) + checks.scheduler_problems(scheduler)
    text = None
    if (path / "text_encoder" / "config.json").is_file():
        text = components.PartConfig(f"{name}/text_encoder/config.json", components.text_config(path))
        problems += checks.part_problems("text_encoder", text)
    problems += components.tokenizer_problems(f"{name}/tokenizer", path / "tokenizer")
    if len(experts) == 2 and not (isinstance(boundary, float) and 0 < boundary < 1):
        remedy = "It has two experts; write where they meet (Wan2.2 A14B: 0.875)."
        problems.append(index.problem("boundary_ratio", remedy))
    if problems := problems or checks.unequal_problems(index, [*configs.values()], vae, text):
        raise ConfigError(*problems)
    shift = own_settings(scheduler.values)[shift_key(scheduler.values)]
    expands_time = bool(index.values.get("expand_timesteps"))
    transformers = {expert: TransformerConfig.of(config.values) for expert, config in configs.items()}
    described = path, name, transformers, boundary, float(shift), vae.values
    folder = WanFolder(*described, revision=commit, expands_time=expands_time)
    return folder.with_first_frames() if index.values["_class_name"] == checks.IMAGE_TO_VIDEO else folder


def student_of(name: str) -> str:
    """Return the student that a run has exported, for the name of its folder; else the name as it is."""
    inside = Path(name) / "student"
    is_run = not (Path(name) / "model_index.json").exists() and (inside / "model_index.json").is_file()
    return str(inside) if is_run else name


def run_problem(path: Path, name: str) -> str | None:
    """Return the problem of the folder of a run, or of a checkpoint, in place of a pipeline's."""
    if (path / "model_index.json").exists():
        return None
    if (inside := student_of(name)) != name:
        return f"{name}: is the folder of a run. Give its student: {inside}."
    if (path / "resolved" / "run.json").is_file() or (path / "run_state.json").is_file():
        words = shlex.join(["wandistiller", "export", "--checkpoint", name, "--output", "students/mine"])
        return f"{name}: is a run or a checkpoint, not a pipeline. Export it, and give that: `{words}`."
    return None


def _read(folder: Path, name: str, file: str) -> components.PartConfig:
    """Read a file of the pipeline, with the values of keys that are needed and that it may lack."""
    if not (folder / file).is_file():
        remedy = "Give a complete diffusers Wan folder, a JSON of ComfyUI files, a hub id, or `tiny`."
        raise ConfigError(f"{name}: no file {folder / file}. {remedy}")
    values, part = read_json(folder / file), file.partition("/")[0]
    is_network = part.startswith(("vae", "transformer"))
    return components.PartConfig(f"{name}/{file}", components.filled(part, values) if is_network else values)
