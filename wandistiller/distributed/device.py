"""This rank's device: the only module that knows of which kind it is.

DeepSpeed's accelerator chooses the kind, by DS_ACCELERATOR or by what the machine has. torch has the same
functions for all kinds (torch.accelerator, torch.get_device_module); AMD's ROCm is `cuda` to both.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from wandistiller.utils.errors import ConfigError


def kind() -> str:
    """Return torch's name of the kind of this process's devices, such as cpu, cuda or xpu."""
    return get_accelerator().device_name()


def on_accelerator() -> bool:
    return kind() != "cpu"


def title() -> str:
    return "ROCm" if torch.version.hip else kind().upper()


def version() -> str:
    """Return the version of CUDA or ROCm that torch is built for; empty for other kinds."""
    return torch.version.hip or torch.version.cuda or ""


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def device() -> torch.device:
    """Return this rank's accelerator, or the CPU; the same one in every thread."""
    return torch.device(get_accelerator().device_name(local_rank()))


def count() -> int:
    return torch.accelerator.device_count() if on_accelerator() else 0


def make_current() -> None:
    if on_accelerator():
        torch.accelerator.set_device_index(local_rank())


def worker(name: str) -> ThreadPoolExecutor:
    """Make a thread for one task after the other on this rank's device, which CUDA keeps for each thread."""
    return ThreadPoolExecutor(1, name, initializer=make_current)


def name() -> str:
    """Return the model of this rank's accelerator, such as NVIDIA H100 80GB HBM3; empty on CPUs."""
    return torch.get_device_module(kind()).get_device_name(local_rank()) if on_accelerator() else ""


def default_backend() -> str:
    return get_accelerator().communication_backend_name() if on_accelerator() else "gloo"


def nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def has_bf16_gpu() -> bool:
    """Return whether this rank has a GPU of CUDA (8.0 or later) or ROCm, with instructions for bf16."""
    return kind() == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def emulates_bf16() -> bool:
    """Return whether this rank computes on a CPU without instructions for bf16.

    Its products in bf16 then take 6 to 56 times as long as in float32, as oneDNN refuses them (torch 2.13).
    """
    if on_accelerator():
        return False
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class DeviceMemory(NamedTuple):
    """Bytes of this rank's accelerator that torch's allocator holds; 0 on CPUs."""

    allocated: int = 0
    """In tensors."""
    reserved: int = 0
    """Taken from the device, tensors included."""
    most_allocated: int = 0
    """Peak of `allocated` since `reset_peaks`."""
    most_reserved: int = 0
    """Peak of `reserved` since `reset_peaks`."""


def held_memory() -> DeviceMemory:
    if not on_accelerator():
        return DeviceMemory()
    m = torch.accelerator
    return DeviceMemory(
        m.memory_allocated(), m.memory_reserved(), m.max_memory_allocated(), m.max_memory_reserved()
    )


def memory_size() -> tuple[int, int] | tuple[None, None]:
    """Return the free and all bytes of this rank's accelerator; None on CPUs."""
    return torch.accelerator.get_memory_info(local_rank()) if on_accelerator() else (None, None)


def reset_peaks() -> None:
    if on_accelerator():
        torch.accelerator.reset_peak_memory_stats()


def make_deterministic() -> None:
    """Let torch take kernels with one order of additions alone; before the first product on a GPU.

    Attention's backward passes, for one, add with atomics else. Source: torch 2.13, notes on randomness.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS, on several streams
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def empty_cache() -> None:
    if on_accelerator():
        torch.accelerator.empty_cache()


def synchronize() -> None:
    if on_accelerator():
        torch.accelerator.synchronize()


def lock_pages(address: int, nbytes: int) -> bool:
    """Lock pages of CPU memory for copies that the host does not wait for; return whether they are locked.

    Only CUDA and ROCm can; on other accelerators the host waits for each copy.

    Raises:
        RuntimeError: the system allows no more locked memory.
    """
    if kind() != "cuda":
        return False
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)))
    return True


def unlock_pages(address: int) -> None:
    """Unlock what `lock_pages` locked, after all copies out of it; CUDA's call does not wait for them."""
    synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


def take_gpu() -> None:
    """Make the GPU of this rank the current one, if there are GPUs.

    Where a rank sees only one, as under srun, it is rank 0 of its GPUs; DeepSpeed reads that too.

    Raises:
        ConfigError: CUDA does not start, or the node has fewer GPUs than ranks.
    """
    if not on_accelerator():
        return
    if (visible := count()) == 1:
        os.environ["LOCAL_RANK"] = "0"
    if local_rank() >= visible:
        raise ConfigError(
            f"Rank {local_rank()} of this node has no GPU of its own: {visible} can be seen here. "
            f"Start {visible} rank(s) a node, or let CUDA_VISIBLE_DEVICES name more GPUs."
        )
    try:
        make_current()
        memory_size()
    except RuntimeError as error:  # NVML counts GPUs that CUDA cannot use
        reason = str(error).strip().splitlines()[0]
        made_for = f"torch {torch.__version__} is built for {title()} {version()}"
        remedy = "Update the driver, or install a torch for it (https://pytorch.org/get-started)."
        raise ConfigError(f"{title()} does not start: {reason}. {made_for}. {remedy}") from None
