"""A whole Wan transformer that others made: in diffusers' folder, or in a file with the original names."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wandistiller.experts import Expert
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import digest, file_digest, read_json
from wandistiller.wan.lora_files import IN_A_FOLDER
from wandistiller.wan.original_names import original_name
from wandistiller.wan.transformer import shapes
from wandistiller.wan.transformer_config import TransformerConfig
from wandistiller.wan.weight_reader import WeightReader

PREFIXES = ("", "diffusion_model.", "model.diffusion_model.")
"""What may stand before the names in a single file; the latter two ComfyUI writes."""
SCALED = (".scale_weight", ".weight_scale", "scaled_fp8", ".comfy_quant")
"""Endings of names in a file whose numbers mean nothing without a scale."""


def is_full_model(path: Path) -> bool:
    """Return whether `path` is of a whole network: any folder but a LoRA's, or a file with its first map."""
    if path.is_dir():
        return not (path / IN_A_FOLDER).is_file()
    try:
        with safe_open(path, "pt") as opened:
            return any(key.endswith("patch_embedding.weight") for key in opened.keys())
    except (OSError, SafetensorError):
        return False  # reported where it is read


def place_of(path: Path, expert: Expert) -> Path:
    """Return the folder of an expert in a pipeline, or of its only one; of another path that itself."""
    inside = (path / name for name in (expert.value, Expert.HIGH_NOISE.value))
    return next((folder for folder in inside if folder.is_dir()), path)


def content(place: Path) -> str:
    """Hash the files of a network, without reading all of them, wherever they lie."""
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    return digest(*map(file_digest, files))


class FullModel:
    """The weights of one transformer by diffusers' names, read one at a time."""

    def __init__(self, place: Path, config: TransformerConfig):
        """Read the headers, no data.

        Args:
            place: a folder with one safetensors file or several, or one file.
        Raises:
            ConfigError: files are missing, truncated, or not safetensors.
        """
        if place.is_file() and place.suffix != ".safetensors":
            raise ConfigError(f"{place}: is read by its ending. Rename it to {place.stem}.safetensors.")
        self._reader = WeightReader(place.parent, place.stem) if place.is_file() else WeightReader(place)
        self.place, self._config, stored = place, config, self._reader.stored
        spellings = [
            {name: prefix + spell(name) for name in shapes(config)}
            for prefix in PREFIXES
            for spell in (str, original_name)
        ]
        self._names = max(spellings, key=lambda names: sum(name in stored for name in names.values()))

    def problem(self) -> str:
        """Say what its files have that its config has not, or the other way round; empty if they agree."""
        stored, names = self._reader.stored, self._names
        if any(name.endswith(SCALED) for name in stored) or any(
            t.dtype.itemsize < 2 for t in stored.values()
        ):
            return "which has weights in 8 bits, whose rounding is larger than what was learned. Give 16 bits"
        if other := self._other_setting():
            return f"whose config.json has {other}. Give one of the teacher's architecture"
        for name, wanted in shapes(self._config).items():
            found = list(stored[names[name]].shape) if names[name] in stored else None
            if found != wanted:
                has = f"in which `{names[name]}` is {found}" if found else f"which has no `{names[name]}`"
                return f"{has}, and the teacher's is {wanted}. Give one of the teacher's architecture"
        if more := sorted(stored.keys() - set(names.values())):
            return f"which has `{more[0]}`, and the teacher has not. Give one of the teacher's architecture"
        return ""

    def _other_setting(self) -> str:
        """Return the first setting in its config.json, if there is one, that is not the teacher's."""
        file = self.place / "config.json"
        given = read_json(file) if file.is_file() else {}
        for key, wanted in json.loads(json.dumps(self._config.raw)).items():
            if not key.startswith("_") and given.get(key, wanted) != wanted:
                return f"`{key}` {json.dumps(given[key])}, and the teacher's {json.dumps(wanted)}"
        return ""

    def read(self, name: str) -> Tensor:
        """Read a weight, float32 on the CPU.

        Raises:
            ConfigError: it is damaged, or not finite.
        """
        stored = self._names[name]
        value = torch.empty(self._reader.stored[stored].shape)
        self._reader.read(stored, value)
        if self._reader.faults:
            raise ConfigError(*self._reader.faults)
        return value
