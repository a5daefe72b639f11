"""A DeepSpeed JSON as a user wrote it, with its name for messages. Nothing changes one in place."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from json import dumps
from typing import Any, Self

import torch

from wandistiller.engine.ds_schema import BLOCK
from wandistiller.utils.errors import problem

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Section of a JSON -> the precision that it switches on."""
SHORT = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
"""Long names of precisions -> short ones."""
OPEN = (None, "auto")
"""Values of a key that leave it to a flag."""


@dataclass(frozen=True)
class DeepSpeedJson:
    """A DeepSpeed JSON before its checks."""

    where: str = field(repr=False, compare=False)
    """Its file, or what else names it in messages."""
    raw: dict[str, Any]
    overridden: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """What settings of the run took the place of, a line each."""
    is_open: bool = field(default=False, repr=False, compare=False)
    """True if `planner.resolve_auto` chooses the student's ZeRO stage and what is offloaded."""
    is_offload_open: bool = field(default=False, repr=False, compare=False)
    """True if it chooses between CPU memory and the accelerators for the optimizer alone."""
    is_compile_open: bool = field(default=False, repr=False, compare=False)
    """True if `planner.compiling` chooses whether blocks are compiled."""

    def section(self, name: str) -> dict[str, Any]:
        """Return a section by its dotted name; empty if there is none, or no object."""
        section = self.raw
        for part in filter(None, name.split(".")):
            section = section[part] if isinstance(section.get(part), dict) else {}
        return section

    @property
    def as_written(self) -> dict[str, Any]:
        """The JSON that leaves the choice of compiled blocks open, if it did."""
        return self.raw | ({BLOCK: self.section(BLOCK) | {"compile": "auto"}} if self.is_compile_open else {})

    def problem(self, key: str, value: object, remedy: str) -> str:
        return problem(self.where, key, value, remedy)

    def replaced(self, **sections: Any) -> Self:
        return replace(self, raw=self.raw | sections)

    def without(self, *keys: str) -> Self:
        return replace(self, raw={key: value for key, value in self.raw.items() if key not in keys})

    def noting(self, setting: str, value: object, before: "DeepSpeedJson") -> Self:
        """Note in `overridden` the values of the JSON `before` in whose place a setting was written."""
        lost = " and ".join(_lost(before.raw, self.raw))
        line = f"`{setting}` {value} is taken in place of {lost} in {before.where}"
        return replace(self, overridden=(*self.overridden, line)) if lost else self

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 if the JSON names none."""
        return self.section("zero_optimization").get("stage", 0)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The precision of its bf16 or fp16 section, else float32."""
        on = (dtype for name, dtype in PRECISIONS.items() if self.section(name).get("enabled", False))
        return next(on, torch.float32)

    @property
    def precision(self) -> str:
        """The name of `dtype`, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    def in_precision(self, dtype: str | None) -> Self:
        """Return it in another precision, if one is given; its section keeps its other keys."""
        rest, section = self.without(*PRECISIONS), SHORT.get(dtype, dtype)
        if section in PRECISIONS:
            rest = rest.replaced(**{section: self.section(section) | {"enabled": True}})
        return rest if dtype else self

    def offload(self, target: str) -> dict[str, Any]:
        """Return the section of what is offloaded, `param` or `optimizer`, with its device."""
        return {"device": "none"} | self.section(f"zero_optimization.offload_{target}")

    @property
    def weights_on(self) -> str:
        """The device on which ZeRO-3 keeps parameters: none (the accelerator), cpu or nvme."""
        return self.offload("param")["device"]

    @property
    def optimizer_on(self) -> str:
        """The device of the optimizer's state: none (the accelerator), cpu or nvme."""
        return self.offload("optimizer")["device"]

    @property
    def on_nvme(self) -> str | None:
        """The first offload section that puts something on a disk."""
        return next(
            (f"offload_{t}" for t in ("param", "optimizer") if self.offload(t)["device"] == "nvme"), None
        )

    @property
    def schedule(self) -> str:
        """The type of the learning-rate schedule, in lower case; "none" without one."""
        return str(self.section("scheduler").get("type")).lower()


def _lost(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """List the keys that have another value in `after`, with that in `before`."""
    for key, value in before.items():
        now = after.get(key)
        if isinstance(value, dict) and isinstance(now, dict):
            yield from _lost(value, now, f"{prefix}{key}.")
            continue
        on = value.get("enabled", True) if isinstance(value, dict) else True
        if now != value and value not in OPEN and on not in (False, *OPEN):
            yield f"`{prefix}{key}` {dumps(value)}"
