"""Runs of a size at which tensors outweigh libraries: their planned and their measured memory.

CPU memory as the kernel counts it; on GPUs as torch's allocator does, without CUDA's own.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import launcher, write_json
from ranks import run as run_words
from reading import run_of
from recipes import PROMPTS
from small_wan import make_wan, small_transformer

from wandistiller.cli.main import main
from wandistiller.config.job import Job
from wandistiller.config.validate import read_job
from wandistiller.distributed.collectives import device
from wandistiller.planner.machine import Machine, this_machine
from wandistiller.planner.peak_memory import CONTEXT, CUBLAS, plan
from wandistiller.planner.time import Rates
from wandistiller.utils.system_memory import GIB

RATES = Rates(tflops=100, pcie=20)
ONE_24 = Machine(24 * GIB, 128 * GIB, 1000 * GIB, 1, 1)
TWO_NODES = Machine(80 * GIB, 1000 * GIB, 1000 * GIB, 16, 8)
EIGHT_80 = Machine(80 * GIB, 1000 * GIB, 1000 * GIB, 8, 8)
ON_CPU = Machine(None, 256 * GIB, GIB, 2, 2)


def gpus(count: int, each: int, host: int, nodes: int = 1) -> Machine:
    """Nodes of `count` GPUs of `each` GiB, `host` GiB of CPU memory and 1800 GiB of disk."""
    return Machine(each * GIB, host * GIB, 1800 * GIB, count * nodes, count)


def published_job(folder: Path, machine: Machine, wan: str = "Wan2.1-T2V-14B", **more: Any) -> Job:
    """A run of a published Wan, whose JSON files and prompts are in `folder`, on the ranks of `machine`."""
    usual = {
        "teacher_path": str(folder / "Wan-AI" / f"{wan}-Diffusers"),
        "data_path": str(folder / "prompts.txt"),
        "output_dir": str(folder / "out"),
    }
    return read_job(run_of({}, usual | more), machine.ranks)


def plan_output(
    published: Path,
    capsys: pytest.CaptureFixture,
    machine: str,
    *more: str,
    wan: str = "Wan2.1-T2V-14B",
    fits: bool = True,
) -> str:
    """The output of `plan` for a machine, on which a run fits or not."""
    words = [
        "--teacher_path",
        str(published / f"Wan-AI/{wan}-Diffusers"),
        "--data_path",
        str(published / "prompts.txt"),
    ]
    assert main(["plan", *words, *machine.split(), *more]) == (0 if fits else 2)
    return capsys.readouterr().out


def pipeline(folder: Path, width: int, layers: int) -> Path:
    """A pipeline of one expert of this width."""
    made = folder / f"wan_{width}x{layers}"
    if not (made / "done").is_file():
        make_wan(made, experts=1)
        sizes = {"num_attention_heads": width // 64, "attention_head_dim": 64, "ffn_dim": 4 * width}
        small_transformer(1, layers, **sizes).save_pretrained(made / "transformer")
        (made / "done").touch()
    return made


def recipe(folder: Path, wan: Path, layers: int, student: str, teacher: str, **more: Any) -> dict[str, Any]:
    """A run that prepares, trains two steps, saves and draws, with shipped JSONs."""
    (folder / "prompts.txt").write_text(PROMPTS)
    usual = {
        "teacher_path": str(wan),
        "data_path": str(folder / "prompts.txt"),
        "output_dir": str(folder / "run"),
        "resume": "never",
        "student_config": {"num_layers": layers},
        "deepspeed_config": f"ds_configs/student/{student}.json",
        "teacher_deepspeed_config": f"ds_configs/teacher/{teacher}.json",
        "height": 64,
        "width": 64,
        "max_steps": 2,
        "rollout_steps": 2,
        "sample_steps": 2,
        "save_every": 1,
        "sample_every": 1,
        "sample_prompts": ["a red circle"],
    }
    return usual | more


def read_libraries() -> None:
    """Into the system's file cache in large pieces, as an installer leaves them.

    Read again page by page, as they are after the system has dropped them, they make a rank 80 MiB smaller.
    """
    for file in Path(torch.__file__).parent.parent.rglob("*.so*"):
        with file.open("rb") as library:
            os.posix_fadvise(library.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while library.read(16 * 2**20):
                pass


def measured(values: dict[str, Any], ranks: int) -> dict[str, int]:
    """Measured MiB of the largest rank by phase."""
    read_libraries()
    output = Path(values["output_dir"])
    output.mkdir(parents=True, exist_ok=True)
    file = str(write_json(output.with_suffix(".json"), values))
    kind = device().type
    run_words(
        [*launcher(ranks), "-m", "wandistiller", "train", "--recipe", file], timeout=3600, DS_ACCELERATOR=kind
    )
    gib_of = json.loads((output / "memory.json").read_text())
    shutil.rmtree(output)
    counted = "peak" if kind == "cuda" else "host_peak"
    return {phase: round(1024 * max(kinds[counted])) for phase, kinds in gib_of.items() if counted in kinds}


def job_here(values: dict[str, Any], ranks: int) -> tuple[Job, Machine]:
    """A recipe's run on this machine, and that machine with so many ranks."""
    machine = replace(this_machine(Path()), ranks=ranks, ranks_on_node=ranks)
    return read_job(run_of(values), ranks), machine


def predicted(values: dict[str, Any], ranks: int) -> dict[str, int]:
    """Planned MiB of a rank by phase."""
    peaks = {phase: p.peak() for phase, p in plan(*job_here(values, ranks)).items()}
    if device().type == "cuda":
        left_out = CONTEXT + (CUBLAS if "SIMULATED_GPUS" in os.environ else 0)
        return {phase: round((b.device + b.transient - left_out) / 2**20) for phase, b in peaks.items()}
    return {phase: round((b.host + b.node) / 2**20) for phase, b in peaks.items()}
