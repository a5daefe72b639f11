"""A teacher spread over the GPUs of one rank, its CPU memory and its disk by accelerate (an extra)."""

import logging
import re
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from wandistiller.distributed import collectives
from wandistiller.distributed.device import local_rank
from wandistiller.engine.ds_schema import BLOCK
from wandistiller.experts import Expert
from wandistiller.network.config import NetworkConfig
from wandistiller.network.folder import Folder
from wandistiller.network.names import BLOCKS, is_in_block, set_parameter
from wandistiller.network.weight_reader import WeightReader
from wandistiller.teacher.loading import one_by_one
from wandistiller.teacher.placements.base import OnOneRank
from wandistiller.utils.parameter_patterns import names_part
from wandistiller.utils.validation import write

Devices = Annotated[
    Literal["sequential", "balanced"] | dict[str, int | Literal["cpu", "disk"]],
    write('sequential, balanced, or {layer: device}; a device is a GPU\'s number, "cpu" or "disk"'),
]
MaxMemory = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^(\d+|cpu)$")],
        Annotated[str, Field(pattern=r"^\d+(\.\d+)? ?[KMGT]i?B$")],
    ],
    write('an object of sizes, by the GPU\'s number or "cpu", such as {"0": "20GiB", "cpu": "100GiB"}'),
]


@dataclass(frozen=True, kw_only=True)
class DeviceMap(OnOneRank):
    """Modules on the owner's devices as accelerate, or the JSON, divides them."""

    memory_known: ClassVar[bool] = False

    device_map: Devices = "sequential"
    """sequential, balanced, or {layer: device}; see `expand_device_map`."""
    max_memory: MaxMemory | None = None
    """Limits for the whole teacher, {"0": "20GiB", "cpu": "100GiB"}; left out: what is free."""

    def holds_quantized(self) -> bool:
        return False  # accelerate's hooks would move and rebuild them

    def reads_all(self) -> bool:
        # accelerate reads what is on disk itself, and may put any module there
        return isinstance(self.device_map, dict) and "disk" not in self.device_map.values()

    def problems(self, world: int) -> list[str]:
        problems = super().problems(world)
        if not find_spec("accelerate"):
            text = "the placement device_map needs accelerate. Run: pip install accelerate"
            problems.append(f"{self.engine.where}: {text}")
        if self.compile:
            text = "accelerate moves weights inside of the blocks; leave it out."
            problems.append(self.engine.problem(f"{BLOCK}.compile", True, text))
        return problems

    def teacher_problems(self, modules: list[str], gpus: int) -> list[str]:
        devices = self.device_map
        if not isinstance(devices, dict) or local_rank() != self.owner_rank:
            return []
        try:
            expand_device_map(devices, modules)
            text = ""
        except ValueError as error:
            text = str(error)
        if beyond := {d for d in devices.values() if isinstance(d, int) and d >= gpus}:
            here = f"are GPUs 0 to {gpus - 1} here" if gpus else 'is no GPU here; write "cpu" or "disk"'
            text = f"It names GPU {max(beyond)}, but there {here}."
        return [self.engine.problem(f"{BLOCK}.device_map", devices, text)] if text else []

    def load(self, folder: Folder, expert: Expert, reader: WeightReader) -> nn.Module:
        """Load each module to its device; those on "disk" are read from the teacher's own files at each call.

        diffusers' from_pretrained with a device map is not used: with a part on disk it casts what it else
        keeps in float32 (diffusers 0.42.1).
        """
        from accelerate import dispatch_model

        logging.getLogger("accelerate").setLevel(logging.ERROR)
        config, dtype, device = folder.configs[expert], self.engine.dtype, collectives.device()
        model, index = config.meta(device), {}
        devices = self._devices(model, config, dtype, share=len(folder.configs))
        main = "cpu" if device.type == "cpu" else device.index
        for name, p in one_by_one(dict(model.named_parameters()), reader, alone=True):
            own_dtype = config.dtype_of(name, dtype)
            where = next((d for module, d in devices.items() if name.startswith(f"{module}.")), main)
            if where == "disk":
                stored, dtype_name = reader.stored[name], str(own_dtype).removeprefix("torch.")
                files = {"safetensors_file": str(stored.file), "weight_name": stored.name}
                index[name] = files | {"dtype": dtype_name}
                value = p.to(own_dtype)
            else:
                value = torch.empty(p.shape, dtype=own_dtype, device=where)
                reader.read(name, value)
            set_parameter(model, name, value)
        # a parameter next to the modules; accelerate 1.15 needs it, then warns
        devices |= {name: main for name, _ in model.named_parameters(recurse=False)}
        options = {"main_device": main, "offload_index": index or None, "force_hooks": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dispatch_model(model, devices, **options)

    def _devices(
        self, model: nn.Module, config: NetworkConfig, dtype: torch.dtype, share: int
    ) -> dict[str, int | str]:
        """The device of each module. `share`: number of such models that `max_memory` is for."""
        from accelerate import infer_auto_device_map
        from accelerate.utils import convert_file_size_to_int, get_balanced_memory, get_max_memory

        if isinstance(self.device_map, dict):
            return expand_device_map(self.device_map, config.top_modules)
        limits = self.max_memory and {
            int(k) if k.isdigit() else k: convert_file_size_to_int(v) // share
            for k, v in self.max_memory.items()
        }
        dtypes = {name: config.dtype_of(name, dtype) for name, _ in model.named_parameters()}
        special = {name: of_name for name, of_name in dtypes.items() if of_name != dtype}
        # accelerate's hooks move what a block's forward needs as one
        options = {"no_split_module_classes": [config.block_class], "dtype": dtype, "special_dtypes": special}
        limits = get_max_memory(limits)
        if self.device_map == "balanced":
            limits = get_balanced_memory(model, max_memory=limits, **options)
        devices = infer_auto_device_map(model, max_memory=limits, **options)
        if "" in devices:  # all of it fits on one device
            return dict.fromkeys(config.top_modules, devices[""])
        return dict(devices)


def expand_device_map(devices: dict[str, int | str], modules: list[str]) -> dict[str, int | str]:
    """Each module's device, from a map with `blocks` (all), `blocks.0-19`, `blocks.20-`, and `*` (the rest).

    Args:
        modules: the model's top modules, with blocks.0, blocks.1, ... for the layers; a span that goes
            past the last layer ends there.
    Raises:
        ValueError: a key means no module, or a module has no device.
    """
    made: dict[str, int | str] = {}
    for key, device in devices.items():
        named = [m for m in modules if key != "*" and names_part(key, m)]
        if not named and key != "*" and not re.fullmatch(rf"{BLOCKS}\.\d+-\d*", key):
            others = [m for m in modules if not is_in_block(m)]
            last = len(modules) - len(others) - 1
            raise ValueError(
                f"This teacher has no `{key}`. It has {BLOCKS}.0-{last}, {', '.join(others)}; * is the rest."
            )
        made |= dict.fromkeys(named, device)
    if missing := [m for m in modules if m not in made]:
        if "*" not in devices:
            raise ValueError(f"`{missing[0]}` has no device. Add it, or `*` for the rest.")
        made |= dict.fromkeys(missing, devices["*"])
    return made
