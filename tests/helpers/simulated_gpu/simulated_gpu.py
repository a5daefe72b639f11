"""Python's side of the simulated GPU: the names of `torch.cuda` that a CPU build of torch 2.13 lacks."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import simulated_gpu_C as native
import torch
import torch.distributed.distributed_c10d as c10d

CUDA = 1  # number of its device type
DETAILS = {
    "name": "Simulated GPU",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 4,
    "gcnArchName": "",
    "is_integrated": 0,
    "is_multi_gpu_board": 0,
    "L2_cache_size": 2**20,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "shared_memory_per_block": 49152,
    "shared_memory_per_multiprocessor": 233472,
}


def index_of(device: Any = None) -> int:
    """The number of a device given in any of torch's ways; of the current one if it has none."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return native.current_device() if index is None else index


class Stream(torch.Stream):
    """`torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> "Stream":
        if "stream_id" in ids:
            return super().__new__(cls, **{"device_type": CUDA} | ids)
        return super().__new__(cls, device=f"cuda:{index_of(device)}", priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = event or Event()
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, torch.Stream) and self.stream_id == other.stream_id
        return same and self.device_index == other.device_index

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))


class Event(torch.Event):
    """`torch.cuda.Event`."""

    def __new__(cls, enable_timing: bool = False, **_: bool) -> "Event":
        return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(stream or current_stream())

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(stream or current_stream())


def current_stream(device: Any = None) -> Stream:
    number, device_index = native.current_stream(index_of(device))
    return Stream(stream_id=number, device_index=device_index)


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=index_of(device))


def properties(device: Any = None) -> SimpleNamespace:
    number = index_of(device)
    uuid = f"simulated-{native.visible_devices()[number]}"
    return SimpleNamespace(**DETAILS, total_memory=native.mem_info(number)[1], uuid=uuid)


class CudaRt:
    """`torch.cuda.cudart()`."""

    cudaError = SimpleNamespace(success=0)

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return native.register_host(address, nbytes)

    def cudaHostUnregister(self, address: int) -> int:
        return native.unregister_host(address)

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        return tuple(native.mem_info(device))

    def cudaGetErrorString(self, error: int) -> str:
        return f"simulated CUDA error {error}"


class _IsNccl(type):
    def __instancecheck__(cls, other: object) -> bool:
        return isinstance(other, native.Nccl)


class ProcessGroupNCCL(metaclass=_IsNccl):
    """Makes the simulated backend of NCCL's name, over gloo."""

    backends: list[Any] = []  # the C++ side has no Python reference

    class Options:
        def __init__(self, *_: Any, **__: Any):
            self.is_high_priority_stream, self._timeout = False, None
            self.global_ranks_in_group, self.group_name = [], ""

    def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
        timeout = getattr(options, "_timeout", None) or timedelta(minutes=30)
        cls.backends.append(gloo := c10d.ProcessGroupGloo(store, rank, size, timeout))
        return native.Nccl(gloo, rank, size)


def install() -> None:
    """Fill the names in; after `import torch`, before anything asks for them."""
    _fill_functions()
    _fill_cuda()
    _fill_storages()
    c10d.ProcessGroupNCCL, c10d._NCCL_AVAILABLE = ProcessGroupNCCL, True


def _fill_functions() -> None:
    """The functions of torch._C that torch.cuda calls."""
    functions = {
        "init": lambda: None,
        "isInBadFork": lambda: False,
        "getDeviceCount": native.device_count,
        "getDevice": native.current_device,
        "setDevice": native.set_device,
        "exchangeDevice": native.exchange_device,
        "maybeExchangeDevice": native.exchange_device,
        "getCurrentStream": lambda device: (*native.current_stream(device), CUDA),
        "getCurrentRawStream": lambda device: native.current_stream(device)[0],
        "getDefaultStream": lambda device: (0, device, CUDA),
        "setStream": lambda stream_id, device_index, device_type: native.set_stream(
            stream_id, device_index, device_type
        ),
        "synchronize": native.synchronize,
        "emptyCache": native.empty_cache,
        "memoryStats": native.statistics,
        "resetPeakMemoryStats": native.reset_peak,
        "resetAccumulatedMemoryStats": lambda device: None,
        "hostMemoryStats": dict,
        "ipc_collect": lambda: None,
        "getAllocatorBackend": lambda: "native",
        "isCurrentStreamCapturing": lambda: False,
        "hasPrimaryContext": lambda device: True,
        "getArchFlags": lambda: "sm_90",
        "getCompiledVersion": lambda: 13000,
        "cudaCachingAllocator_set_allocator_settings": lambda settings: None,
        "record_memory_history": lambda *_, **__: None,
        "memorySnapshot": lambda *_: {"segments": [], "device_traces": []},
        "set_sync_debug_mode": lambda mode: None,
        "get_sync_debug_mode": lambda: 0,
    }
    for name, function in functions.items():
        setattr(torch._C, f"_cuda_{name}", function)


def _fill_cuda() -> None:
    cuda = torch.cuda
    cuda.is_available = lambda: native.device_count() > 0
    cuda._is_compiled = torch.backends.cuda.is_built = lambda: True
    cuda.is_initialized = cuda.is_tf32_supported = lambda: True
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.device_count = native.device_count
    cuda._initialized, cuda._lazy_init, cuda._lazy_call = True, lambda: None, lambda call, **_: call()
    cuda._exchange_device = native.exchange_device
    cuda._maybe_exchange_device = lambda index: native.exchange_device(index)  # torch.compile wants two
    cuda.get_device_properties = properties
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: "Simulated GPU"
    for kind in (Stream, Event):
        kind.__module__ = "torch.cuda"
        setattr(cuda, kind.__name__, kind)
        setattr(cuda.streams, kind.__name__, kind)
    cuda.current_stream, cuda.default_stream = current_stream, default_stream
    cuda.default_generators = tuple(native.generators())
    cuda.mem_get_info = cuda.memory.mem_get_info = lambda device=None: tuple(
        native.mem_info(index_of(device))
    )
    cuda._cudart = CudaRt()
    cuda.cudart = lambda: cuda._cudart
    cuda.nccl.version = lambda: (2, 29, 7)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: 0
    torch.version.cuda = "13.0"


def _fill_storages() -> None:
    of_cpu = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return of_cpu(self, nbytes)
        native.resize_storage(self, nbytes)
        return self

    def to(self: torch.UntypedStorage, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        if self.device == device:
            return self
        made = torch.empty(self.size(), dtype=torch.uint8, device=device).untyped_storage()
        return made.copy_(self, non_blocking)

    torch.UntypedStorage.resize_ = resize_
    torch.storage._to = torch._utils._to = to
