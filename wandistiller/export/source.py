"""A checkpoint, or a whole network of others, as the source of an export: its weights, facts and teacher."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from wandistiller.checkpoint import loading, manifest
from wandistiller.checkpoint.facts import Facts
from wandistiller.checkpoint.resume import find
from wandistiller.config.start import stage_folders
from wandistiller.experts import Expert
from wandistiller.flow import RENOISE
from wandistiller.network.adapters import BASE_LAYER, is_adapter
from wandistiller.network.folder import Folder
from wandistiller.network.heads import PROJECTIONS
from wandistiller.network.names import SECOND_TIME
from wandistiller.network.network import Network, Trained, without_memory
from wandistiller.network.weight_reader import WeightReader
from wandistiller.utils.errors import ConfigError, Place, problem, readable
from wandistiller.utils.logging import current, set_activity
from wandistiller.wan.added_lora import each_file, read_added
from wandistiller.wan.lora_experts import BOTH, is_full_model, sides_of, split_side
from wandistiller.wan.original_names import names_in
from wandistiller.wan.pipeline import open_wan

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
LOCAL = ("/", "~", "./", "../")
"""Beginnings of a path on this machine."""
TEXTS = ("negative_prompt", "sample_prompts")
FOLDER_AWAY = "No such folder is here: start in the folder that the run was started in, or put it back."


class Source(NamedTuple):
    """A checkpoint with the settings of its run."""

    folder: Path
    facts: Facts
    recipe: dict[str, Any]
    teacher_identity: str = ""
    """Commit or fingerprint of the teacher's networks, as in the run's identity."""

    @property
    def hub_id(self) -> str:
        """The teacher's, with whose commit it is recorded; empty: the teacher is a folder."""
        return self.facts.teacher_path if self.facts.teacher_revision else ""

    @property
    def published(self) -> Facts:
        """The facts as an export tells them: without places on this machine."""
        facts = Facts(**without_places(vars(self.facts)))
        return replace(facts, teacher_path=self.hub_id or Path(facts.teacher_path).name)

    @property
    def sides(self) -> list[str]:
        """Folder names of the experts that names of files tell apart."""
        return self.facts.experts

    @property
    def description(self) -> str:
        """One line for a file's metadata: the teacher, and how to sample."""
        facts = self.published
        how = f" {sampler_in_words(facts)}" if facts.few_steps else ""
        return (
            f"Distilled from {facts.teacher_path} with wandistiller. Guidance is folded in: "
            f"sample with CFG 1, shift {facts.shift:.6g}, {facts.steps} steps{how}, "
            f"{clip(facts)} of {facts.width}x{facts.height}."
        )

    def networks(self, dtype: torch.dtype) -> Iterator[tuple[str, WanTransformer3DModel]]:
        """Yield name and network of each expert, LoRA fused; `dtype` except where diffusers keeps float32."""
        for name in self.facts.experts:
            yield name, Network.made(self.facts.config, self.finished(name, dtype)).module

    def finished(self, name: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of one expert, LoRA fused, in `dtype` except where diffusers keeps float32.

        Each is cast as it is read, so that only one is held in another dtype, and copied, so that its file is
        closed.
        """
        for parameter, value in self._fused(name) if self.facts.lora else self.weights(name):
            yield parameter, value.to(self.facts.config.dtype_of(parameter, dtype), copy=True)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of one expert as it was trained, without feature matching's projections."""
        for parameter, value in loading.read_weights(self.folder, Expert(name), self.facts.averaged):
            if not parameter.startswith(PROJECTIONS):
                yield parameter, value

    def adapters(self, name: str) -> WanTransformer3DModel:
        """One expert with its adapters; its other weights take no memory, and are not its own."""
        network = Network.made(self.facts.config, without_memory(self.facts.config))
        begin = partial(self.fill_adapters, name)
        return network.prepare(Trained(lora=self.facts.lora), begin).module

    def fill_adapters(self, name: str, model: nn.Module) -> None:
        known = dict(model.named_parameters())  # without a second time that the next stage does not have
        for parameter, value in loading.read_weights(self.folder, Expert(name), self.facts.averaged):
            if is_adapter(parameter) and parameter in known:
                known[parameter].data.copy_(value)

    def second_time(self, name: str) -> dict[str, Tensor]:
        """Return the weights of one expert that learn beside adapters; none of a student of one time."""
        weights = self.weights(name) if self.facts.is_flow_map else ()
        return {parameter: value.clone() for parameter, value in weights if SECOND_TIME in parameter}

    def _fused(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with the adapters added, one after the other, in float32."""
        modules = self.adapters(name).named_modules()
        layers = {layer: module for layer, module in modules if hasattr(module, "lora_A")}
        for parameter, value in self._beside_adapters(name):
            if (layer := parameter.removesuffix(".weight")) in layers:
                with torch.no_grad():
                    value = value + layers[layer].get_delta_weight("default")
            yield parameter, value
        yield from self.second_time(name).items()

    def _beside_adapters(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of all other weights, float32: the teacher's, or the checkpoint's."""
        if not self.facts.bases:
            for parameter, value in self.weights(name):
                if not is_adapter(parameter):
                    yield parameter.replace(BASE_LAYER, "."), value
            return
        reader = self.base_teacher().reader(self.base(name))
        for parameter, shape in self.facts.config.shapes.items():
            if not is_adapter(parameter):
                reader.read(parameter, value := torch.empty(shape))
                yield parameter, value
        if reader.faults:
            raise ConfigError(*reader.faults)

    def teacher(self, weights: bool) -> Folder:
        """The teacher's pipeline folder, as it was published.

        Raises:
            ConfigError: it is not here.
        """
        if self.facts.teacher_is_away:
            raise ConfigError(problem(self.folder, "teacher_path", self.facts.teacher_path, FOLDER_AWAY))
        return open_wan(self.facts.teacher_path, weights=weights, revision=self.facts.teacher_revision)

    def base(self, name: str) -> Expert:
        """The teacher's network that an expert is, but for its adapters."""
        return Expert(dict(zip(self.facts.experts, self.facts.bases, strict=True))[name])

    def base_teacher(self) -> Folder:
        """The teacher with the LoRA files that were added to its networks, under a run's adapters.

        Raises:
            ConfigError: its weights or those files have changed since.
        """
        added = read_added(str(self.folder), "teacher_lora", self.facts.teacher_lora or [])
        teacher = self.teacher(weights=True).with_loras(each_file(added))
        if teacher.identity != self.teacher_identity:
            raise ConfigError(
                f"{self.folder}: its adapters are for the weights of {self.facts.teacher_path}, which are "
                "not as they were when they were trained. Put the files back that the run had."
            )
        return teacher


def read_source(
    run_or_checkpoint: Path, averaged: bool | None = None, share: tuple[int, int] = (0, 1)
) -> Source:
    """Find a checkpoint and verify the checksums of all that is read from it.

    Args:
        averaged: the moving average of the weights, or the last ones; None: the average where there is one.
        share: rank and ranks, that verify large files together; the caller gathers what they find.
    Raises:
        ConfigError: no checkpoint there, a damaged one, or no average in it.
    """
    folder = _checkpoint(run_or_checkpoint, share)
    state = loading.read_state(folder)
    facts = Facts.of(state["facts"])
    if averaged and facts.ema is None:
        raise ConfigError(f"{folder}: its run had no `ema`, so it has no averaged weights. Leave out --ema.")
    averaged = facts.ema is not None if averaged is None else averaged
    recipe = {key: value for key, value in state.get("run", {}).items() if key != "data_path"}
    facts = replace(facts, averaged=averaged, max_steps=state["step"] or facts.max_steps)
    return Source(folder, facts, recipe, state["identity"]["teacher"])


def sampler_in_words(facts: Facts) -> str:
    if facts.is_flow_map:
        return "or any other number (AnyFlowPipeline)"
    renoise = facts.sampler == RENOISE
    return "by noising its clean latents again (LCM)" if renoise else "by Euler's method"


def written(facts: Facts) -> dict[str, Any]:
    """Return the facts for a text, with their numbers as a person writes them."""
    return {key: f"{v:.6g}" if isinstance(v, float) else v for key, v in vars(facts).items()}


def arguments(settings: dict[str, Any]) -> str:
    """Return settings as the arguments of a call, without the digits that rounding leaves."""
    short = {key: float(f"{v:.10g}") if isinstance(v, float) else v for key, v in settings.items()}
    return ", ".join(f"{key}={value!r}" for key, value in short.items())


def clip(facts: Facts) -> str:
    """Name what a student draws."""
    return "images" if facts.num_frames == 1 else f"videos of {facts.num_frames} frames"


def without_places(value: Any, key: str = "") -> Any:
    """`value`, any JSON, with the last part of each path on this machine; hub ids and prompts stay."""
    if isinstance(value, dict):
        return {name: without_places(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return value if key in TEXTS else [without_places(inner, key) for inner in value]
    if not isinstance(value, str) or key == "negative_prompt":
        return value
    if HUB_ID.fullmatch(value) and not Path(value).exists():
        return value
    path = value.startswith(LOCAL) or key.endswith(("path", "dir", "folder", "file")) or key == "init"
    return Path(value).name if path else value


@readable()
def _checkpoint(folder: Path, share: tuple[int, int]) -> Path:
    run = (stage_folders(folder) or [folder])[-1]
    checkpoint = folder if (folder / loading.STATE).is_file() else find(run, "auto")
    if checkpoint is None or not (checkpoint / loading.STATE).is_file():
        of_stage = f" ({run.name} is its last stage; its student is in {run / 'student'})"
        there = of_stage if run != folder else ""
        raise ConfigError(
            f"{folder}: no checkpoint there{there}. Name the --output_dir of a run, "
            "or one checkpoints/step_... folder."
        )
    before = current.activity
    set_activity(f"verifying {checkpoint}")
    if problems := manifest.verify(checkpoint, share=share, of_student=True):
        others = [str(other) for other in manifest.steps(checkpoint.parent) if other != checkpoint]
        named = f", such as {others[0]}" if others else ""
        raise ConfigError(f"{checkpoint}: {'; '.join(problems)}. Name another checkpoint{named}.")
    set_activity(before)
    return checkpoint


class WholeModel(Source):
    """A pipeline, a transformer's folder, or a file with the original Wan's names, of a teacher's shape."""

    @property
    def description(self) -> str:
        return f"What {self.folder.name} changes of {self.published.teacher_path}, by wandistiller."

    @property
    def sides(self) -> list[str]:
        return [expert.value for expert in open_wan(self.facts.teacher_path).configs]

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each weight of one expert, float32.

        Raises:
            ConfigError: it is of another architecture, in 8 bits, or damaged.
        """
        inside = (self.folder / part for part in (name, "transformer"))
        place = next((folder for folder in inside if folder.is_dir()), self.folder)
        reader = WeightReader(place.parent, place.stem) if place.is_file() else WeightReader(place)
        wanted, stored = self.facts.config.shapes, reader.stored
        names = names_in(stored, wanted)
        other = [key for n, key in names.items() if key not in stored or list(stored[key].shape) != wanted[n]]
        other += sorted(stored.keys() - {*names.values()})
        if other or any(tensor.dtype.itemsize < 2 for tensor in stored.values()):
            what = f"its `{other[0]}` is not as the teacher's" if other else "it is in 8 bits"
            remedy = f"Give a model of the architecture of {self.facts.teacher_path}, in 16 or 32 bits."
            raise ConfigError(f"{place}: {what}. {remedy}")
        for n, key in names.items():
            reader.read(key, value := torch.empty(wanted[n]))
            if reader.faults:
                raise ConfigError(*reader.faults)
            yield n, value


def require_no_whole_model(place: Path) -> None:
    """Raise ConfigError if `place` is a whole model, and no checkpoint of a run."""
    if is_full_model(place) and not (place / loading.STATE).is_file():
        remedy = "Say with --teacher_path which pipeline a LoRA of it is for."
        raise ConfigError(f"{place}: is a whole model. {remedy}")


def read_whole_model(model: str, teacher_path: str) -> WholeModel:
    """Take a model by its place, which for one of a teacher's two experts says of which it is, as a LoRA's.

    Raises:
        ConfigError: it is no whole model, or nothing says of which expert it is.
    """
    side, name = split_side(model)
    place, teacher = Path(os.path.expanduser(name)), open_wan(teacher_path)
    if not is_full_model(place):
        remedy = "Give a pipeline's folder, a transformer's, or a .safetensors file of the whole network."
        raise ConfigError(f"{name}: is no whole Wan model. {remedy}")
    experts = [expert for expert in teacher.configs if (place / expert.value).is_dir()]
    if len(experts) < len(teacher.configs):
        (side,) = sides_of(Place("command line", "checkpoint"), [(place, side)], len(teacher.configs))
        experts = [e for e in teacher.configs if side in ("", BOTH, e.key)]
    facts = Facts(
        teacher_path=teacher_path,
        teacher_revision=teacher.revision,
        transformer=teacher.config.raw,
        experts=[expert.value for expert in experts],
        boundary=teacher.boundary,
        shift=teacher.shift,
    )
    return WholeModel(place, facts, {})
