"""The command line, with peaks of memory in use in memory.json, not of what torch's allocator holds.

On a GPU that is as good as full the two are the same, as the allocator then gives back what is not in use.
With MOST_GPU_BYTES in the environment, torch's allocator may hold no more of the GPU.
"""

import os

import torch

from wandistiller.cli.main import command
from wandistiller.distributed import device

held_memory = device.held_memory


def in_use() -> device.DeviceMemory:
    held = held_memory()
    most = torch.accelerator.memory_stats()["active_bytes.all.peak"] if held.reserved else 0
    return held._replace(most_reserved=most)


device.held_memory = in_use

if __name__ == "__main__":
    if "MOST_GPU_BYTES" in os.environ:
        share = int(os.environ["MOST_GPU_BYTES"]) / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    command()
