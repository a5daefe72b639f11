"""Where the teacher lives, as far as DeepSpeed's JSON has no word for it: the block "wandistiller" of a teacher JSON."""

import re
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

from wandistiller.parts import names_part
from wandistiller.problems import nearest, problem, unknown_keys

BLOCK = "wandistiller"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The keys of the block; each is used by the placements named with it in `KEYS`."""

    placement: str = "engine"
    """engine: as `zero_optimization` says. owner, device_map: on one rank of a node. host_cpu: once per node. auto: chosen."""
    owner_rank: int = 0
    """Which of a node's ranks, from 0, holds the teacher and answers for the others there."""
    device_map: str | dict = "sequential"
    """For accelerate: sequential, balanced, or {layer: device}; see `expand_device_map`."""
    max_memory: dict | None = None
    """Limits for the whole teacher, {"0": "20GiB", "cpu": "100GiB"}; accelerate reads what is free where it is left out."""
    shards: str = "world"
    """Over which ranks an engine of stage 3 is cut: all, or those of each node, so that no weight goes from node to node."""
    guidance_passes: int = 1
    """2: text and null branch one after the other, for half the memory of a call."""

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU computes, wherever the student is."""
        return self.placement == "host_cpu"

    @property
    def on_one_rank(self) -> bool:
        return self.placement in ("owner", "device_map")


ALWAYS = {"placement", "guidance_passes"}
KEYS = {
    "engine": ALWAYS | {"shards"},
    "owner": ALWAYS | {"owner_rank"},
    "host_cpu": ALWAYS,
    "device_map": ALWAYS | {"owner_rank", "device_map", "max_memory"},
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
    owner, passes, shards = block.get("owner_rank", 0), block.get("guidance_passes", 1), block.get("shards", "world")
    if type(owner) is not int or not 0 <= owner < world:
        found.append(problem(where, f"{BLOCK}.owner_rank", owner, f"There are {world} rank(s); write 0 to {world - 1}."))
    if passes not in (1, 2) or type(passes) is not int:
        found.append(problem(where, f"{BLOCK}.guidance_passes", passes, "Write 1 or 2."))
    zero = ds.get("zero_optimization")
    if shards not in ("world", "node"):
        found.append(problem(where, f"{BLOCK}.shards", shards, "Write world or node."))
    elif shards == "node" and not (isinstance(zero, dict) and zero.get("stage") == 3):
        found.append(problem(where, f"{BLOCK}.shards", shards, "Only an engine of stage 3 is cut: write it, or remove this."))
    if kind != "engine" and isinstance(zero, dict) and zero.get("stage", 0) != 0:
        found.append(problem(where, "zero_optimization.stage", zero["stage"],
                             f"The placement {kind} uses no ZeRO engine; write 0 or remove the section."))  # fmt: skip
    return found + (_block_problems(where, block) if kind == "device_map" else [])


def _block_problems(where: str, block: dict[str, Any]) -> list[str]:
    given, limits = block.get("device_map", "sequential"), block.get("max_memory")
    found = []
    if not find_spec("accelerate"):
        found.append(f"{where}: the placement device_map needs accelerate. Run: pip install accelerate")
    if not isinstance(given, dict) and given not in ("sequential", "balanced"):
        found.append(problem(where, f"{BLOCK}.device_map", given, "Write sequential, balanced, or {layer: device}."))
    if limits is not None and not isinstance(limits, dict):
        found.append(problem(where, f"{BLOCK}.max_memory", limits, 'Write an object such as {"0": "20GiB", "cpu": "100GiB"}.'))
    for key, limit in limits.items() if isinstance(limits, dict) else ():
        if not (key.isdigit() or key == "cpu") or not re.fullmatch(r"\d+(\.\d+)? ?[KMGT]i?B", str(limit)):
            found.append(problem(where, f"{BLOCK}.max_memory.{key}", limit,
                                 'Write a GPU\'s number or "cpu", and a size such as "20GiB".'))  # fmt: skip
    devices = given.values() if isinstance(given, dict) else ()
    for device in devices:
        if type(device) is not int and device not in ("cpu", "disk"):
            found.append(problem(where, f"{BLOCK}.device_map", device, 'A device is a GPU\'s number, "cpu" or "disk".'))
    return found


def expand_device_map(given: dict[str, int | str], modules: list[str]) -> dict[str, int | str]:
    """Every module's device, from a map that may say `blocks` (all), `blocks.0-19`, `blocks.20-`, and `*` (the rest).

    Args:
        modules: the model's top modules, with blocks.0, blocks.1, ... for the layers; a span that goes
            past the last layer ends there.
    Raises:
        ValueError: a key means no module, or a module has no device.
    """
    made: dict[str, int | str] = {}
    for key, device in given.items():
        named = [m for m in modules if key != "*" and names_part(key, m)]
        if not named and key != "*" and not re.fullmatch(r"blocks\.\d+-\d*", key):
            layers = sum(m.startswith("blocks.") for m in modules)
            others = ", ".join(m for m in modules if not m.startswith("blocks."))
            raise ValueError(f"This teacher has no `{key}`. It has blocks.0-{layers - 1}, {others}; * is the rest.")
        made |= dict.fromkeys(named, device)
    if missing := [m for m in modules if m not in made]:
        if "*" not in given:
            raise ValueError(f"`{missing[0]}` has no device. Add it, or `*` for the rest.")
        made |= dict.fromkeys(missing, given["*"])
    return made


def device_map_problems(where: str, ds: dict[str, Any], modules: list[str], gpus: int) -> list[str]:
    """What does not fit between a device map, the teacher's modules, and the number of GPUs."""
    given = read_placement(ds).device_map
    beyond = {d for d in given.values() if isinstance(d, int) and d >= gpus} if isinstance(given, dict) else ()
    if beyond:
        known = f"there are GPUs 0 to {gpus - 1} here" if gpus else 'there is no GPU here; write "cpu" or "disk"'
        return [problem(where, f"{BLOCK}.device_map", given, f"It names GPU {max(beyond)}, but {known}.")]
    try:
        if isinstance(given, dict):
            expand_device_map(given, modules)
    except ValueError as error:
        return [problem(where, f"{BLOCK}.device_map", given, str(error))]
    return []
