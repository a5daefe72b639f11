"""`wandistiller export`: a checkpoint -> a diffusers pipeline, original-Wan files, or a LoRA, that open without this package."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors import safe_open

from wandistiller import checkpoint, manifest, wan
from wandistiller.adapters import Adapter, comfy_state, extract, trained
from wandistiller.batch import Expert
from wandistiller.blocks import PROJECTIONS
from wandistiller.card import FACTS, About, write_adapter_card, write_original_card, write_pipeline_card
from wandistiller.files import link_or_copy, write_json
from wandistiller.original import original_state, per_expert, unlike_published, write_file
from wandistiller.problems import ConfigError, folder_problems, problem, readable
from wandistiller.resume import find, read_state
from wandistiller.tuning import Lora, add_lora
from wandistiller.wan import WanFolder, open_wan
from wandistiller.weights import WeightReader

FIRST, SECOND = "pytorch_lora_weights.safetensors", "pytorch_lora_weights_2.safetensors"
SIZE = re.compile(r"[1-9]\d*(KB|MB|GB|KIB|MIB|GIB)", re.IGNORECASE)
SHARD = "10GB"
"""diffusers' own limit of one file."""


class Source(NamedTuple):
    """A checkpoint, and what its run said."""

    folder: Path
    facts: dict[str, Any]
    recipe: dict[str, Any]

    @property
    def run(self) -> Path:
        """The output folder that it lies in."""
        return self.folder.parent.parent

    def networks(self, dtype: torch.dtype) -> Iterator[tuple[str, WanTransformer3DModel]]:
        """Each expert by its folder's name: LoRA fused in float32, `dtype` but where diffusers keeps float32."""
        for name in self.facts["experts"]:
            yield name, self._fused(name, dtype) if self.facts.get("lora") else self.network(name, dtype)

    def network(self, name: str, dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
        """One expert as it was trained, on the CPU: with its adapters, without the projections of feature matching.

        A weight is cast when it is read, so that the whole is only there in `dtype`; copied, so that its file can be closed.
        """
        model = wan.skeleton(self.facts["transformer"])
        if self.facts.get("lora"):
            add_lora(model, Lora(**self.facts["lora"]), seed=0)
        for parameter, value in checkpoint.weights(self.folder, Expert(name), self.facts["averaged"]):
            if not parameter.startswith(PROJECTIONS):
                wan.put(model, parameter, value.to(wan.parameter_dtype(parameter, dtype), copy=True))
        return model

    def _fused(self, name: str, dtype: torch.dtype) -> WanTransformer3DModel:
        model = self.network(name)
        model.fuse_lora()
        model.unload_lora()
        for parameter in [name for name, _ in model.named_parameters()]:  # names: a list of values would keep the old ones
            wan.put(model, parameter, model.get_parameter(parameter).to(wan.parameter_dtype(parameter, dtype)))
        return model

    def teacher(self, weights: bool) -> WanFolder:
        # .get: checkpoints made before `teacher_revision` have no such fact
        return open_wan(self.facts["teacher_path"], weights=weights, revision=self.facts.get("teacher_revision"))

    def about(self, repository: str) -> About:
        """What its card tells of; a teacher that is gone leaves only its name."""
        try:
            teacher = self.teacher(weights=False)
        except ConfigError:
            teacher = None
        return About(teacher, self.facts, self.recipe, self.run, repository)


def check_export(flags: dict[str, Any]) -> None:
    """Refuse flags that do not go together, before anything is read.

    Raises:
        ConfigError: with every problem.
    """
    found, where = [], "command line"
    if flags["dtype"] == "float8_e4m3fn" and (flags["format"] != "original" or flags["adapter"]):
        found.append(problem(where, "dtype", flags["dtype"], "Only --format original knows it, without --adapter. Add that, or "
                             "take bfloat16."))  # fmt: skip
    if not 0 < flags["energy"] <= 1:
        found.append(problem(where, "energy", flags["energy"], "Write a share over 0, up to 1."))
    if flags["rank"] < 1:
        found.append(problem(where, "rank", flags["rank"], "Write a positive integer."))
    if not SIZE.fullmatch(flags["max_shard_size"]):
        found.append(problem(where, "max_shard_size", flags["max_shard_size"], "Write a size such as 5GB or 500MB."))
    if found:
        raise ConfigError(*found)


def export(run_or_checkpoint: Path, target: Path, dtype: torch.dtype = torch.bfloat16, averaged: bool | None = None,
           shard: str = SHARD, repository: str = "") -> Path:  # fmt: skip
    """Write the student as a diffusers pipeline; `target` appears whole, an earlier one is replaced.

    Args:
        run_or_checkpoint: an output folder (its newest checkpoint is taken) or one checkpoint folder.
        dtype: of the stored weights, except those that diffusers keeps in float32.
        averaged: the moving average of the weights, or the last ones; None: the average where there is one.
        shard: the size of a file over which a network is cut into several, such as 5GB.
        repository: the hub's, for the card to name.
    Raises:
        ConfigError: no checkpoint there, or no average in it.
    """
    source = _read(run_or_checkpoint, averaged)
    _refuse_foreign(target)
    teacher, temporary = source.teacher(weights=True), _beside(target)
    for name, model in source.networks(dtype):
        model.save_pretrained(temporary / name, max_shard_size=shard)
        del model  # before the next is read
    for part in ("vae", "text_encoder", "tokenizer"):
        link_or_copy(teacher.path / part, temporary / part)
    _write_scheduler(teacher, source.facts["shift"], temporary / "scheduler")
    _write_index(teacher, source.facts, temporary)
    write_pipeline_card(temporary, About(teacher, source.facts, source.recipe, source.run, repository))
    return _put_in_place(temporary, target)


def export_original(run_or_checkpoint: Path, target: Path, dtype: torch.dtype = torch.bfloat16,
                    averaged: bool | None = None, repository: str = "") -> list[Path]:  # fmt: skip
    """Write the transformer alone as original-Wan weights: FILE, or for two experts FILE_high_noise and FILE_low_noise.

    Beside them a folder, FILE's name with .card, with the model card and the config.json with which diffusers reads them.

    Args:
        dtype: torch.float8_e4m3fn stores the matrices of the blocks in eight bits with a scale each, the rest in bfloat16.
    Raises:
        ConfigError: as `export`; a `target` that is no .safetensors file, or another's.
    """
    source = _read(run_or_checkpoint, averaged)
    experts, facts = source.facts["experts"], source.facts
    files = {name: per_expert(target, experts, name) for name in experts}
    card = _refuse_foreign_files(target, list(files.values()))
    for line in unlike_published(facts["transformer"]):
        print(f"note: {line}", file=sys.stderr)
    small = dtype == torch.float8_e4m3fn
    for name, model in source.networks(torch.bfloat16 if small else dtype):
        write_file(files[name], original_state(model.state_dict(), small), "Wan", _description(facts), facts)
        del model  # before the next is read
    temporary = _beside(card)
    write_original_card(temporary, source.about(repository), [file.name for file in files.values()], small)
    return [*files.values(), _put_in_place(temporary, card)]


def export_adapter(run_or_checkpoint: Path, target: Path, dtype: torch.dtype = torch.bfloat16, averaged: bool | None = None,
                   original: bool = False, energy: float = 0.99, rank: int = 128,
                   repository: str = "") -> list[Path]:  # fmt: skip
    """Write a LoRA: that of a run with `lora`; of any other the difference to its teacher, which must have the same shape.

    Args:
        original: as ComfyUI reads it, a FILE an expert and a folder FILE.card; else a folder for WanPipeline.load_lora_weights.
        energy: of a difference, the share of its square that is kept.
        rank: of a difference, the largest.
    Raises:
        ConfigError: no checkpoint there; a student that no LoRA of its teacher can be.
    """
    source = _read(run_or_checkpoint, averaged)
    experts, facts = source.facts["experts"], source.facts
    files = [per_expert(target, experts, name) for name in experts]
    folder = _refuse_foreign_files(target, files) if original else _refuse_foreign(target)
    adapters = dict(_adapters(source, energy, rank))
    said = "; ".join(f"Rank {adapter.rank}" for adapter in adapters.values())
    cast = {name: a._replace(state={k: v.to(dtype) for k, v in a.state.items()}) for name, a in adapters.items()}
    temporary = _beside(folder)
    if original:
        for file, adapter in zip(files, cast.values(), strict=True):
            write_file(file, comfy_state(adapter), "Wan/lora", _description(facts), facts)
    else:
        files = [Path(SECOND if Expert(name) is Expert.LOW_NOISE else FIRST) for name in experts]
        for file, adapter in zip(files, cast.values(), strict=True):
            WanPipeline.save_lora_weights(temporary, adapter.state, weight_name=file.name,
                                          transformer_lora_adapter_metadata=adapter.config)  # fmt: skip
    write_adapter_card(temporary, source.about(repository), said, [file.name for file in files], original)
    made = _put_in_place(temporary, folder)
    return [*files, made] if original else [made]


def _adapters(source: Source, energy: float, rank: int) -> Iterator[tuple[str, Adapter]]:
    """Of each expert, trained or cut out of the difference."""
    facts = source.facts
    if facts.get("lora"):
        for name in facts["experts"]:
            yield name, trained(source.network(name))
        return
    teacher = source.teacher(weights=True)
    different = [key for key, value in facts["transformer"].items() if teacher.config.get(key, value) != value]
    if different or set(facts["experts"]) != {e.value for e in teacher.configs}:
        what = ", ".join(f"`{key}`" for key in different) or "`experts`"
        raise ConfigError(f"{source.folder}: its student differs from {facts['teacher_path']} in {what}, so it is no LoRA of it. "
                          "Leave out --adapter; or train one with the recipe key `lora`.")  # fmt: skip
    for name, model in source.networks(torch.float32):
        with torch.no_grad():
            found = extract(model, WeightReader(teacher.path / name).read, energy, rank)
        del model  # before the next is read
        print(f"{name}: rank {found.adapter.rank} keeps {found.kept:.2%} of the squared difference of the linear layers; "
              f"{found.beside:.2%} of all is in biases, norms and tables, which no LoRA holds", file=sys.stderr)  # fmt: skip
        yield name, found.adapter


def _description(facts: dict[str, Any]) -> str:
    return (f"Distilled from {facts['teacher_path']} with wandistiller. Guidance is folded in: sample with CFG 1, shift "
            f"{facts['shift']}, {facts['steps']} steps, {facts['width']}x{facts['height']}, {facts['num_frames']} frame(s).")


def _beside(target: Path) -> Path:
    """A new folder to fill before it takes `target`'s place."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def _refuse_foreign(target: Path) -> Path:
    """An export takes the place of an earlier one, and of nothing else; gives `target`."""
    if found := folder_problems("output", target):
        raise ConfigError(*found)
    if target.is_dir() and any(target.iterdir()) and not (target / FACTS).is_file():
        raise ConfigError(f"--output {target}: is a folder with something else in it. Name a new one, or an earlier export.")
    return target


def _refuse_foreign_files(target: Path, files: list[Path]) -> Path:
    """The same for files; gives the folder of their card."""
    if target.suffix != ".safetensors" or target.is_dir():
        raise ConfigError(f"--output {target}: is no file name for weights. Write one that ends with .safetensors.")
    for file in files:
        if file.is_file() and not _is_ours(file):
            raise ConfigError(f"--output {file}: is there, and no earlier export. Name another.")
    return _refuse_foreign(target.with_suffix(".card"))


def _is_ours(file: Path) -> bool:
    try:
        with safe_open(file, "pt") as opened:
            return "wandistiller" in (opened.metadata() or {})
    except Exception:  # safetensors 0.8 has an exception of its own that says nothing about the file
        return False


def _put_in_place(temporary: Path, target: Path) -> Path:
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)
    return target


def _read(run_or_checkpoint: Path, averaged: bool | None) -> Source:
    """The checkpoint, and its facts with "averaged" as asked."""
    folder = _checkpoint(run_or_checkpoint)
    state = read_state(folder)
    facts = state["facts"]
    if averaged and "ema" not in facts:
        raise ConfigError(f"{folder}: its run had no `ema`, so it has no averaged weights. Leave out --ema.")
    recipe = {key: value for key, value in state.get("run", {}).items() if key != "data_path"}  # is of one machine
    return Source(folder, facts | {"averaged": "ema" in facts if averaged is None else averaged}, recipe)


@readable()
def _checkpoint(folder: Path) -> Path:
    found = folder if (folder / checkpoint.STATE).is_file() else find(folder, "auto")
    if found is None or not (found / checkpoint.STATE).is_file():
        raise ConfigError(f"{folder}: no checkpoint there. Name the --output_dir of a run, or one checkpoints/step_... folder.")
    if faults := manifest.faults(found):
        raise ConfigError(f"{found}: {'; '.join(faults)}. Name another checkpoint.")
    return found


def _write_scheduler(teacher: WanFolder, shift: float, folder: Path) -> None:
    config = json.loads((teacher.path / "scheduler" / "scheduler_config.json").read_text())
    config["shift" if "shift" in config else "flow_shift"] = shift
    write_json(folder / "scheduler_config.json", config)


def _write_index(teacher: WanFolder, facts: dict[str, Any], folder: Path) -> None:
    index = json.loads((teacher.path / "model_index.json").read_text())
    if len(facts["experts"]) == 1:  # one network serves the whole path
        index |= {"transformer_2": [None, None], "boundary_ratio": None}
    write_json(folder / "model_index.json", index)
