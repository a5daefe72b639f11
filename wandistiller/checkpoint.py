"""Save, find and load checkpoints. Collective; a checkpoint folder appears whole, `latest` moves last."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.utils import zero_to_fp32
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wandistiller import distributed, ema
from wandistiller.batch import Expert
from wandistiller.config import ConfigError
from wandistiller.files import atomic, link_or_copy, write_json
from wandistiller.student import Student

STATE = "run_state.json"
TAG = "engine"
WHOLE = "weights.safetensors"
"""The weights of an engine of stage 0, float32 by name; the other stages' files of each rank say the names themselves."""
FROZEN = "frozen"
"""Folder with the weights that are not trained, float32: beside the checkpoints, and by hard links in each."""


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
        engine.save_checkpoint(str(temporary / expert.value), tag=TAG, exclude_frozen_parameters=True)
        _restart_cpu_adam(engine)
        if engine.zero_optimization_stage() == 0 and distributed.rank() == 0:
            save_file(ema.masters(engine), temporary / expert.value / WHOLE)
        if expert in student.averages:
            student.averages[expert].save(temporary / expert.value, distributed.rank())
    distributed.barrier()
    if distributed.rank() == 0:
        if (folder.parent / FROZEN).exists():
            link_or_copy(folder.parent / FROZEN, temporary / FROZEN)
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

    DeepSpeedCPUAdam, and FusedAdam on a CPU, multiply beta^t up step by step in C++ and lose that product in a checkpoint,
    so a resumed run would differ by one ulp (deepspeed 0.19.8). tests/test_resume.py::test_resumed_run_is_bitwise_equal.
    """
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)  # stage 0 in float32 has no wrapper around it
    group = optimizer.param_groups[0]
    if isinstance(optimizer, FusedAdam) and engine.device.type == "cpu":
        nothing = [[torch.zeros(1)] for _ in range(4)]  # an update of step 0, after which the next is no step up
        optimizer.multi_tensor_adam(1, torch.zeros(1), nothing, 0.0, *group["betas"], 1.0, 0, optimizer.adam_w_mode, 1, 0.0)
    if isinstance(optimizer, DeepSpeedCPUAdam):
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
    differ = [k for k in identity | saved if saved.get(k) != identity.get(k)]
    if differ:
        raise ConfigError(*(
            f"{folder}: holds a run with another {k}: {saved.get(k)!r}, now {identity.get(k)!r}. "
            "Give another --output_dir, or --resume never to start anew." for k in differ
        ))  # fmt: skip


def load(student: Student, folder: Path) -> int:
    """Load both weights and optimizer; returns the number of finished steps. Collective."""
    for expert, engine in student.engines.items():
        all_trained = all(p.requires_grad for p in engine.module.parameters())
        path, _ = engine.load_checkpoint(str(folder / expert.value), tag=TAG, load_module_strict=all_trained)
        if path is None:
            raise ConfigError(f"{folder}: DeepSpeed found no checkpoint in it. Name another with --resume.")
        if expert in student.averages:
            student.averages[expert].load(folder / expert.value, distributed.rank())
    return read_state(folder)["step"]


def keep_frozen(models: dict[Expert, nn.Module], output_dir: Path, resume_from: Path | None) -> None:
    """Store the weights that are not trained, once for all checkpoints and before an engine casts them. Collective.

    Args:
        resume_from: a checkpoint, whose frozen weights take the place of the models' own.
    """
    folder = output_dir / "checkpoints" / FROZEN
    if distributed.rank() == 0 and folder.exists():
        shutil.rmtree(folder)
    for expert, model in models.items():
        frozen = {name: p.data for name, p in model.named_parameters() if not p.requires_grad}
        if frozen and resume_from:
            for name, value in load_file(_frozen_file(resume_from, expert)).items():
                frozen[name].copy_(value)
        elif frozen and distributed.rank() == 0:
            with atomic(_frozen_file(folder.parent, expert)) as temporary:
                save_file(frozen, temporary)
    if resume_from and (resume_from / FROZEN).exists() and distributed.rank() == 0:
        link_or_copy(resume_from / FROZEN, folder)
    distributed.barrier()


def _frozen_file(folder: Path, expert: Expert) -> Path:
    return folder / FROZEN / f"{expert.value}.safetensors"


def weights(folder: Path, expert: Expert, averaged: bool = False) -> dict[str, Tensor]:
    """The float32 weights of one expert, put together from all ranks' parts, on the CPU.

    Args:
        averaged: take the moving average of those that are trained.
    """
    whole = folder / expert.value / WHOLE
    if whole.is_file():
        state = load_file(ema.file(folder / expert.value, 0) if averaged else whole)
    elif averaged:
        state = _averaged(folder / expert.value)
    else:
        state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder / expert.value), TAG, True)
    if _frozen_file(folder, expert).is_file():
        state |= load_file(_frozen_file(folder, expert))
    return {name: value.detach().to("cpu", torch.float32) for name, value in state.items()}


def _averaged(folder: Path) -> dict[str, Tensor]:
    """The average in DeepSpeed's own merging (0.19.8): it lies as flat as the weights that it stands for.

    Stages 1 and 2 save those without the padding at the end.
    """
    inside = str(folder / TAG)
    models = zero_to_fp32.parse_model_states(zero_to_fp32.get_model_state_files(inside))
    stage, ranks, masters, paddings = zero_to_fp32.parse_optim_states(zero_to_fp32.get_optim_files(inside), inside)
    averages = [load_file(ema.file(folder, rank)) for rank in range(ranks)]
    flat = [[averages[rank][str(i)][: weights.numel()] for i, weights in enumerate(masters[rank])] for rank in range(ranks)]
    if stage == 3:
        merged = zero_to_fp32._get_fp32_state_dict_from_zero3_checkpoint(ranks, flat, models, True)
    else:
        merged = zero_to_fp32._get_fp32_state_dict_from_zero2_checkpoint(ranks, flat, models, True, paddings)
    return zero_to_fp32.to_torch_tensor(merged)
