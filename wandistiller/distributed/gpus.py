"""This rank's GPU: taken at the start, its identity, and what to do if it does not start or is shared."""

import os
import shutil
import subprocess

import torch
from torch.distributed import Store

from wandistiller.distributed import device
from wandistiller.utils.errors import ConfigError

DRIVERS = {"13": 580, "12": 525, "11": 450}
"""Major version of CUDA -> least major version of the driver. Source: NVIDIA, CUDA compatibility, table 2."""


def take_gpu() -> None:
    """Make the GPU of this rank the current one, if there are GPUs.

    Where a rank sees only one, as under srun, it is rank 0 of its GPUs; DeepSpeed reads that too.

    Raises:
        ConfigError: CUDA does not start, or the node has fewer GPUs than ranks.
    """
    if not device.on_accelerator():
        return
    if (count := device.count()) == 1:
        os.environ["LOCAL_RANK"] = "0"
    if device.local_rank() >= count:
        raise ConfigError(
            f"Rank {device.local_rank()} of this node has no GPU of its own: {count} can be seen here. "
            f"Start {count} rank(s) a node, or let CUDA_VISIBLE_DEVICES name more GPUs."
        )
    try:
        device.make_current()
        device.memory_size()
    except RuntimeError as error:  # NVML counts GPUs that CUDA cannot use
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{device.title()} does not start: {reason}. {driver_remedy()}") from None


def driver_remedy() -> str:
    if not (cuda := torch.version.cuda):
        return f"torch is {torch.__version__}."
    needed, found = DRIVERS.get(cuda.partition(".")[0]), driver_version()
    have = f"the driver is {found}" if found else "nvidia-smi shows no driver"
    return (
        f"torch {torch.__version__} is built for CUDA {cuda}, which needs a driver from {needed} on; {have}. "
        "Update the driver, or install a torch for its CUDA version (https://pytorch.org/get-started)."
    )


def driver_version() -> str:
    """Return the version of the NVIDIA driver, such as 570.124.06; empty if it is not known."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return (done.stdout.split() or [""])[0] if done.returncode == 0 else ""


def require_own_gpu(store: Store, rank: int, world: int) -> None:
    """Compare the ranks' GPUs through the store, before NCCL would end or hang. Collective.

    Raises:
        ConfigError: on every rank, if two compute on the same GPU.
    """
    store.set(f"gpu/{rank}", device.identity() or "none")
    ranks_of: dict[str, list[int]] = {}
    for other in range(world):
        ranks_of.setdefault(store.get(f"gpu/{other}").decode(), []).append(other)
    problems = [
        f"Ranks {', '.join(map(str, ranks))} compute on the same GPU, {uuid}. Start one rank a GPU: with "
        "--num_gpus, with CUDA_VISIBLE_DEVICES, or with srun's --gpus-per-task and --gpu-bind."
        for uuid, ranks in ranks_of.items()
        if len(ranks) > 1 and uuid != "none"
    ]
    if problems:
        store.set(f"gpu_compared/{rank}", "")
        if rank == 0:  # the store ends with this process, and the others may still read
            store.wait([f"gpu_compared/{other}" for other in range(world)])
        raise ConfigError(*problems)
