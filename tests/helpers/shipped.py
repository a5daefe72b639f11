"""Placements of the shipped teacher JSONs."""

from pathlib import Path
from typing import Any

from wandistiller.engine.ds_config import load
from wandistiller.teacher.placements.base import Placement
from wandistiller.teacher.teacher_json import read_placement


def placement(
    name: str,
    dtype: str | None = None,
    *,
    zero: dict[str, Any] | None = None,
    swap: Path | None = None,
    **block: Any,
) -> Placement:
    """Return a shipped placement with other settings.

    Args:
        dtype: its precision, if not the JSON's.
        zero: keys of its section `zero_optimization`.
        swap: folder of what is on NVMe.
        block: keys of its block "wandistiller".
    """
    json = load(f"ds_configs/teacher/{name}.json").in_precision(dtype)
    section = json.section("zero_optimization") | (zero or {})
    if swap and json.on_nvme:
        section["offload_param"] = json.offload("param") | {"nvme_path": str(swap)}
    ours = json.section("wandistiller") | block
    return read_placement(json.replaced(zero_optimization=section, wandistiller=ours))
