"""Recognition of a whole Wan transformer, in diffusers' folder or in one file, where a LoRA is wanted."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from wandistiller.utils.errors import ConfigError
from wandistiller.wan.weight_reader import DIFFUSERS_STEM


def is_full_model(path: Path) -> bool:
    """Return whether `path` is a pipeline's folder, a transformer's, or a file with a network's first map."""
    if path.is_dir():
        return (path / "transformer").is_dir() or any(path.glob(f"{DIFFUSERS_STEM}*.safetensors"))
    try:
        with safe_open(path, "pt") as opened:
            return any(key.endswith("patch_embedding.weight") for key in opened.keys())
    except (OSError, SafetensorError):
        return False  # reported where it is read


def require_no_full_model(name: str, teacher: str = "TEACHER", more: Iterable[object] = ()) -> None:
    """Raise ConfigError if a whole network is given as a LoRA, with the command that makes one of it.

    Args:
        more: flags of the command.
    """
    if is_full_model(path := Path(name).expanduser()):
        output = f"{path.name.removesuffix('.safetensors')}_lora"
        words = ["wandistiller", "export", "--adapter", "--checkpoint", name, "--teacher_path", teacher]
        command = shlex.join([*words, *map(str, more), "--output", output])
        raise ConfigError(f"{name}: is a whole model. Make a LoRA of it: `{command}`, and give {output}.")
