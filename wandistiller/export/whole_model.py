"""A whole network that no run here made, as the source of a LoRA: what it changes of a teacher's weights."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from wandistiller.checkpoint.facts import Facts
from wandistiller.export.source import Source
from wandistiller.utils.errors import ConfigError, Place
from wandistiller.wan.lora_experts import BOTH, is_full_model, sides_of, split_side
from wandistiller.wan.original_names import original_name
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.transformer import shapes
from wandistiller.wan.weight_reader import WeightReader

PREFIXES = ("", "model.", "diffusion_model.", "model.diffusion_model.")
"""What may stand before the names in a single file; the last two ComfyUI writes."""


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
        wanted, stored = shapes(self.facts.config), reader.stored
        spellings = [
            {n: prefix + spell(n) for n in wanted} for prefix in PREFIXES for spell in (str, original_name)
        ]
        names = max(spellings, key=lambda names: sum(own in stored for own in names.values()))
        found = {n: list(stored[own].shape) for n, own in names.items() if own in stored}
        other = [names[n] for n in wanted if found.get(n) != wanted[n]] + sorted(
            stored.keys() - {*names.values()}
        )
        if other or any(one.dtype.itemsize < 2 for one in stored.values()):
            what = f"its `{other[0]}` is not as the teacher's" if other else "it is in 8 bits"
            remedy = f"Give a model of the architecture of {self.facts.teacher_path}, in 16 or 32 bits."
            raise ConfigError(f"{place}: {what}. {remedy}")
        for n, own in names.items():
            reader.read(own, value := torch.empty(wanted[n]))
            if reader.faults:
                raise ConfigError(*reader.faults)
            yield n, value


def read_whole_model(given: str, teacher_path: str) -> WholeModel:
    """Take a model by its place, which for one of a teacher's two experts says of which it is, as a LoRA's.

    Raises:
        ConfigError: it is no whole model, or nothing says of which expert it is.
    """
    side, name = split_side(given)
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
