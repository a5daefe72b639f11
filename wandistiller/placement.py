"""Where the teacher lives, as far as DeepSpeed's JSON has no word for it: the block "wandistiller" of a teacher JSON."""

import re
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from wandistiller.config import nearest, problem, unknown_keys

BLOCK = "wandistiller"
STRATEGIES = {
    "gpu": "replicated", "balanced": "sharded", "offload": "zero_inference_cpu", "disk": "zero_inference_nvme",
    "cpu": "host_cpu", "gpu0": "owner", "sequential": "device_map_sequential", "custom": "device_map_custom", "auto": "auto",
}  # fmt: skip
"""--teacher_device_strategy -> the JSON in ds_configs/teacher/ that it means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The keys of the block; each is used by the placements named with it in `KEYS`."""

    placement: str = "engine"
    """engine: as `zero_optimization` says. owner, device_map: on one rank. host_cpu: one copy per node. auto: chosen."""
    owner_rank: int = 0
    """The rank that holds the teacher and answers for the others."""
    device_map: str | dict = "sequential"
    """For accelerate: sequential, balanced, or {layer: device}; see `expand_device_map`."""
    max_memory: dict | None = None
    """Limits for the whole teacher, {"0": "20GiB", "cpu": "100GiB"}; accelerate reads what is free where it is left out."""
    offload_folder: str | None = None
    """Where layers that are mapped to "disk" go."""
    guidance_passes: int = 1
    """2: text and null branch one after the other, for half the memory of a call."""

    @property
    def on_one_rank(self) -> bool:
        return self.placement in ("owner", "device_map")


ALWAYS = {"placement", "guidance_passes"}
KEYS = {
    "engine": ALWAYS,
    "owner": ALWAYS | {"owner_rank"},
    "host_cpu": ALWAYS,
    "device_map": ALWAYS | {"owner_rank", "device_map", "max_memory", "offload_folder"},
    "auto": ALWAYS,
}


def read_placement(ds: dict[str, Any]) -> Placement:
    """The block of a checked teacher JSON."""
    return Placement(**ds.get(BLOCK, {}))


def without_block(ds: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed may see of a teacher JSON."""
    return {k: v for k, v in ds.items() if k != BLOCK}


def placement_problems(where: str, ds: dict[str, Any], world: int) -> list[str]:
    """All that is wrong with the block, and with the JSON around it."""
    block = ds.get(BLOCK, {})
    if not isinstance(block, dict):
        return [problem(where, BLOCK, block, "Write an object, {...}.")]
    found = unknown_keys(where, block, [f.name for f in fields(Placement)], f"{BLOCK}.")
    kind = block.get("placement", "engine")
    if not isinstance(kind, str) or kind not in KEYS:
        return [*found, problem(where, f"{BLOCK}.placement", kind, f"Write one of: {', '.join(KEYS)}.{nearest(kind, KEYS)}")]
    for key in sorted(block.keys() & {f.name for f in fields(Placement)} - KEYS[kind]):
        found.append(problem(where, f"{BLOCK}.{key}", block[key], f"It means nothing for the placement {kind}; remove it."))
    owner, passes = block.get("owner_rank", 0), block.get("guidance_passes", 1)
    if type(owner) is not int or not 0 <= owner < world:
        found.append(problem(where, f"{BLOCK}.owner_rank", owner, f"There are {world} rank(s); write 0 to {world - 1}."))
    if passes not in (1, 2) or type(passes) is not int:
        found.append(problem(where, f"{BLOCK}.guidance_passes", passes, "Write 1 or 2."))
    zero = ds.get("zero_optimization")
    if kind != "engine" and isinstance(zero, dict) and zero.get("stage", 0) != 0:
        found.append(problem(where, "zero_optimization.stage", zero["stage"],
                             f"The placement {kind} uses no ZeRO engine; write 0 or remove the section."))  # fmt: skip
    return found + (_device_map_problems(where, block) if kind == "device_map" else [])


def _device_map_problems(where: str, block: dict[str, Any]) -> list[str]:
    given, limits, folder = block.get("device_map", "sequential"), block.get("max_memory"), block.get("offload_folder")
    found = []
    if not find_spec("accelerate"):
        found.append(f"{where}: the placement device_map needs accelerate. Run: pip install accelerate")
    if not isinstance(given, dict) and given not in ("sequential", "balanced"):
        found.append(problem(where, f"{BLOCK}.device_map", given, "Write sequential, balanced, or {layer: device}."))
    if limits is not None and not isinstance(limits, dict):
        found.append(problem(where, f"{BLOCK}.max_memory", limits, 'Write an object such as {"0": "20GiB", "cpu": "100GiB"}.'))
    if folder is not None and not isinstance(folder, str):
        found.append(problem(where, f"{BLOCK}.offload_folder", folder, "Write the path of a folder."))
    devices = given.values() if isinstance(given, dict) else ()
    for device in devices:
        if type(device) is not int and device not in ("cpu", "disk"):
            found.append(problem(where, f"{BLOCK}.device_map", device, 'A device is a GPU\'s number, "cpu" or "disk".'))
    if "disk" in devices and not folder:
        found.append(problem(where, f"{BLOCK}.offload_folder", folder, "The device_map uses disk; write a folder for it."))
    if isinstance(folder, str) and Path(folder).is_file():
        found.append(problem(where, f"{BLOCK}.offload_folder", folder, "This is a file; name a folder."))
    return found


def expand_device_map(given: dict[str, int | str], children: list[str], layers: int) -> dict[str, int | str]:
    """Every module's device, from a map that may say `blocks.0-19`, `blocks.20-`, and `*` for the rest.

    Args:
        children: the names of the model's top modules and top parameters; `blocks` stands for `layers` of them.
    Raises:
        ValueError: a key means no module, or a module has no device.
    """
    modules = [f"blocks.{i}" for i in range(layers)] + [c for c in children if c != "blocks"]
    made: dict[str, int | str] = {}
    for key, device in given.items():
        span = re.fullmatch(r"blocks\.(\d+)-(\d*)", key)
        if span:
            named = [f"blocks.{i}" for i in range(int(span[1]), int(span[2] or layers - 1) + 1)]
        else:
            named = [m for m in modules if key == "blocks" and m.startswith("blocks.")] or [key]
        if unknown := [m for m in named if m not in modules] if key != "*" else []:
            raise ValueError(f"`{key}` means {unknown[0]}, which this teacher lacks. It has blocks.0-{layers - 1}, "
                             f"{', '.join(m for m in modules if not m.startswith('blocks.'))}; * is the rest.")  # fmt: skip
        made |= dict.fromkeys(named if key != "*" else [], device)
    if missing := [m for m in modules if m not in made]:
        if "*" not in given:
            raise ValueError(f"{missing[0]} has no device. Add it, or `*` for the rest.")
        made |= dict.fromkeys(missing, given["*"])
    return made
