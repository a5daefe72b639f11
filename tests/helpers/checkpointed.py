"""A run of six steps with three checkpoints, to be damaged; weights of runs; caches."""

from pathlib import Path

import torch
from recipes import recipe
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from wandistiller.batch import STUDENT
from wandistiller.checkpoint import loading
from wandistiller.checkpoint.checkpointer import Checkpointer
from wandistiller.experts import Expert
from wandistiller.student.learner import Learner

STEPS = 6
SETTINGS = {
    "max_steps": STEPS,
    "save_every": 2,
    "keep_checkpoints": 3,
}


def settings(folder: Path, wan: Path, name: str, **more: object) -> dict:
    """A recipe whose output, with its cache, is `folder`/`name`."""
    folders = {"output_dir": str(folder / name), "cache_dir": str(folder / name / "cache")}
    return recipe(folder, wan, **SETTINGS | folders | more)


def save(student: Learner, output: Path, step: int, *, keep: int = 1) -> Path:
    """Write one checkpoint and wait for it. Collective."""
    checkpointer = Checkpointer(output, keep)
    folder = checkpointer.save({STUDENT: student}, step, {})
    checkpointer.finish()
    return folder


def saved(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"step_{step:08d}"


def trained(output: Path) -> dict[str, torch.Tensor]:
    return dict(loading.read_weights(saved(output, STEPS), Expert.HIGH_NOISE))


def exported(output: Path, expert: str = "transformer") -> dict[str, torch.Tensor]:
    """The weights of the exported student."""
    return load_file(output / "student" / expert / "diffusion_pytorch_model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def spoil_cached(folder: Path, prompt: str, place: tuple[int, ...], number: float, name: str = "") -> None:
    """Write a number into the tensors that a cache holds for a prompt, those of this name if one is given."""
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            about = {key: what for key, what in opened.metadata().items() if not key.startswith("crc32")}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}
        for key in tensors:
            sample, _, part = key.partition(".")
            if about.get(sample) == prompt and name in ("", part):
                tensors[key][place] = number
        save_file(tensors, file, metadata=about)
