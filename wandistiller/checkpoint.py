"""Save, find and load checkpoints. Collective; a checkpoint folder appears whole, `latest` moves last."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

from wandistiller import distributed
from wandistiller.batch import Expert
from wandistiller.config import ConfigError
from wandistiller.files import atomic, write_json
from wandistiller.student import Student

STATE = "run_state.json"
TAG = "engine"


def save(student: Student, output_dir: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of `step` finished steps and drop all but the newest `keep`. Collective.

    Args:
        state: {"identity", "facts"} of the run, kept beside the engines' own files.
    """
    folder = output_dir / "checkpoints" / f"step_{step:08d}"
    temporary = folder.with_name(f".{folder.name}.tmp")
    if distributed.rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    distributed.barrier()
    for expert, engine in student.engines.items():
        engine.save_checkpoint(str(temporary / expert.value), tag=TAG)
        _restart_cpu_adam(engine)
    if distributed.rank() == 0:
        write_json(temporary / STATE, {"step": step, **state})
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
        with atomic(folder.parent / "latest") as latest:
            latest.write_text(folder.name + "\n")
        for old in sorted(folder.parent.glob("step_*"))[:-keep]:
            shutil.rmtree(old)
    distributed.barrier()
    return folder


def _restart_cpu_adam(engine: Any) -> None:
    """Make the running job compute beta^t as a resumed one will.

    DeepSpeedCPUAdam multiplies beta^t up step by step in C++ and loses that product in a checkpoint, so a resumed run
    would differ by one ulp (deepspeed 0.19.8). tests/test_resume.py::test_resumed_run_is_bitwise_equal.
    """
    optimizer = getattr(engine.optimizer, "optimizer", None)
    if isinstance(optimizer, DeepSpeedCPUAdam):
        group = optimizer.param_groups[0]
        optimizer.ds_opt_adam.destroy_adam(optimizer.opt_id)
        optimizer.ds_opt_adam.create_adam(
            optimizer.opt_id, group["lr"], *group["betas"], group["eps"], group["weight_decay"], optimizer.adam_w_mode, False
        )


def find(output_dir: Path, resume: str) -> Path | None:
    """The checkpoint folder that `resume` (auto, never, or a folder) means; None to start anew.

    Raises:
        ConfigError: a folder was named that is no checkpoint.
    """
    if resume == "never":
        return None
    if resume != "auto":
        if not (Path(resume) / STATE).is_file():
            raise ConfigError(f"--resume {resume}: no checkpoint there. Name a folder checkpoints/step_..., auto or never.")
        return Path(resume)
    latest = output_dir / "checkpoints" / "latest"
    return latest.parent / latest.read_text().strip() if latest.is_file() else None


def read_state(folder: Path) -> dict[str, Any]:
    """{"step", "identity", "facts"} of a checkpoint."""
    return json.loads((folder / STATE).read_text())


def check_identity(folder: Path, identity: dict[str, Any]) -> None:
    """Refuse to go on with a checkpoint of another run.

    Raises:
        ConfigError: names every difference.
    """
    saved = read_state(folder)["identity"]
    differ = [k for k in identity if saved.get(k) != identity[k]]
    if differ:
        raise ConfigError(*(
            f"{folder}: holds a run with another {k}: {saved.get(k)!r}, now {identity[k]!r}. "
            "Give another --output_dir, or --resume never to start anew." for k in differ
        ))  # fmt: skip


def load(student: Student, folder: Path) -> int:
    """Load both weights and optimizer; returns the number of finished steps. Collective."""
    for expert, engine in student.engines.items():
        path, _ = engine.load_checkpoint(str(folder / expert.value), tag=TAG)
        if path is None:
            raise ConfigError(f"{folder}: DeepSpeed found no checkpoint in it. Name another with --resume.")
    return read_state(folder)["step"]


def weights(folder: Path, expert: Expert) -> dict[str, Tensor]:
    """The float32 weights of one expert, put together from all ranks' parts, on the CPU."""
    state = get_fp32_state_dict_from_zero_checkpoint(str(folder / expert.value), tag=TAG)
    return {name: value.detach().to("cpu", torch.float32) for name, value in state.items()}
