"""The command line, with peaks of memory in use in memory.json, not of what torch's allocator holds.

On a GPU that is as good as full the two are the same, as the allocator then gives back what is not in use.
With MOST_GPU_BYTES in the environment, torch's allocator may hold no more of the GPU. With PROFILED_STEP the
milliseconds of that step's kernels are printed by kind.
"""

import os
from collections import Counter
from typing import Any

import torch

from wandistiller.cli.main import command
from wandistiller.distributed import device

KIND = "device" if torch.cuda.is_available() else "cpu"
KINDS_OF = "kernels, ms: "
KINDS = {"fused": ("triton",), "attention": ("fmha", "flash", "attn", "attention")}
KINDS |= {"products": ("gemm", "nvjet", "cutlass", "mm"), "copies": ("memcpy", "copy_"), "norms": ("norm",)}

held_memory = device.held_memory


def in_use() -> device.DeviceMemory:
    held = held_memory()
    most = torch.accelerator.memory_stats()["active_bytes.all.peak"] if held.reserved else 0
    return held._replace(most_reserved=most)


device.held_memory = in_use


def profile_step() -> None:
    """Let a step of training print the milliseconds of its kernels; on a CPU, of its operators."""
    from wandistiller.training.trainer import Trainer  # here, because it takes seconds

    train_step = Trainer.train_step

    def profiled(trainer: Trainer, step: int) -> Any:
        if step != int(os.environ["PROFILED_STEP"]):
            return train_step(trainer, step)
        with torch.profiler.profile() as profile:
            result = train_step(trainer, step)
        ms: Counter[str] = Counter()
        for e in profile.key_averages():
            took, name = getattr(e, f"self_{KIND}_time_total"), e.key.lower()
            kind = next((k for k, parts in KINDS.items() if any(p in name for p in parts)), "others")
            ms[kind] += took / 1e3
        print(KINDS_OF + ", ".join(f"{kind} {n:.0f}" for kind, n in ms.most_common()), flush=True)
        return result

    Trainer.train_step = profiled


if __name__ == "__main__":
    if "PROFILED_STEP" in os.environ:
        profile_step()
    if "MOST_GPU_BYTES" in os.environ:
        share = int(os.environ["MOST_GPU_BYTES"]) / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    command()
