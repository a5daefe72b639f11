"""Comparison of two pipelines' latents and texts: VAE, text encoder and tokenizer."""

from pathlib import Path
from typing import Any

import torch

from wandistiller.utils.errors import ConfigError
from wandistiller.wan.components import VERSIONS, known_config
from wandistiller.wan.hub import STEMS
from wandistiller.wan.weight_reader import WeightReader

WORDS = {"vae": "VAE", "text_encoder": "text encoder", "tokenizer": "tokenizer"}
OF_FILE = (*VERSIONS, "dtype", "torch_dtype", "transformers_version", "architectures")
"""Keys of a config that say how its weights are stored, and by whom."""
TENSORS, NUMBERS = 16, 256
"""Tensors of a part, and numbers of each, that are compared."""
ROUNDING = 2.0**-7
"""Largest relative difference of one weight stored in two precisions."""


def other_parts(first: Path, second: Path) -> list[str]:
    """List in words the parts in which two pipelines differ; what is not on this machine is left out."""
    if first.resolve() == second.resolve():
        return []
    return [word for part, word in WORDS.items() if not _same(part, first / part, second / part)]


def _same(part: str, *folders: Path) -> bool:
    if part == "tokenizer":
        there = [
            name for name in ("tokenizer.json", "spiece.model") if all((f / name).is_file() for f in folders)
        ]
        return all(len({(folder / name).read_bytes() for folder in folders}) == 1 for name in there)
    try:
        first, second = (_config(folder) for folder in folders)
        readers = [WeightReader(folder, STEMS[part]) for folder in folders]
    except ConfigError:
        return True  # reported where it is read
    names = sorted(readers[0].stored.keys() & readers[1].stored.keys())
    some = names[:: max(1, len(names) // TENSORS)]
    equal = all(first[key] == second[key] for key in first.keys() & second.keys())
    return equal and all(_alike(name, readers) for name in some)


def _config(folder: Path) -> dict[str, Any]:
    config = known_config(folder / "config.json")
    return {key: value for key, value in config.items() if key not in OF_FILE}


def _alike(name: str, readers: list[WeightReader]) -> bool:
    """Return whether the first numbers of a tensor are the same up to rounding."""
    first, *_ = shapes = [reader.stored[name].shape for reader in readers]
    values = [torch.zeros(min(NUMBERS, first.numel())) for _ in readers]
    for reader, value_N in zip(readers, values, strict=True):
        reader.read(name, value_N)
    return len(set(shapes)) == 1 and torch.allclose(*values, rtol=ROUNDING, atol=1e-6)
