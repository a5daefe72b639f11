"""This rank's GPU: taken at the start, its identity, and what to do if it does not start or is shared."""

import os

import torch
from torch.distributed import Store

from wandistiller.distributed import device
from wandistiller.utils.errors import ConfigError


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
        made_for = f"torch {torch.__version__} is built for {device.title()} {device.version()}"
        remedy = "Update the driver, or install a torch for it (https://pytorch.org/get-started)."
        raise ConfigError(f"{device.title()} does not start: {reason}. {made_for}. {remedy}") from None


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
