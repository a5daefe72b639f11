"""The interface of an export format, and the registry of all formats."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from wandistiller.export.source import Source
from wandistiller.utils.errors import problem
from wandistiller.utils.registry import classes_in


@dataclass(frozen=True, kw_only=True)
class ExportFormat(ABC):
    """One file format. The fields of a subclass are the flags that it reads, by their names."""

    DTYPES = ("bfloat16", "float16", "float32")
    """Values of --dtype that it can store."""
    dtype: torch.dtype = torch.bfloat16
    """Of the stored weights, except those that diffusers keeps in float32."""
    repository: str = ""
    """Hub repository for the model card to name; empty: none."""

    @classmethod
    def from_flags(cls, flags: dict[str, Any]) -> "ExportFormat":
        """Take this format's settings out of the command's flags; None is the default."""
        return cls(**{f.name: flags[f.name] for f in fields(cls) if flags[f.name] is not None})

    @classmethod
    def check(cls, flags: dict[str, Any]) -> list[str]:
        """Problems with this format's own flags, found before anything is read; none of them is None."""
        return []

    @abstractmethod
    def write(self, source: Source, output: Path) -> list[Path]:
        """Write the student and its model card; return the files and folders made.

        Raises:
            ConfigError: `output` holds something else, or this student has no such form.
        """


def formats() -> dict[str, type[ExportFormat]]:
    """Every format by its name."""
    return classes_in("wandistiller.export.formats", ExportFormat)


def flag_problems(name: str, flags: dict[str, Any]) -> list[str]:
    """Problems with the command's flags for the format `name`, before anything is read."""
    known, dtype, problems = formats(), flags["dtype"], []
    if dtype not in known[name].DTYPES:
        others = " or ".join(f"--format {other}" for other in known if dtype in known[other].DTYPES)
        stored = " or ".join(known[name].DTYPES)
        remedy = f"Only {others} stores it, without --adapter; --format {name} stores {stored}."
        problems.append(problem("command line", "dtype", dtype, remedy))
    own = {field.name: field.default for field in fields(known[name])}
    for other, its in known.items():
        keys = [field.name for field in fields(its) if field.name not in (*own, "format")]
        for key in (key for key in keys if flags[key] is not None):
            how = "--adapter" if other == "lora" else f"--format {other}"
            remedy = f"It belongs to {how}, and --format is {name}; remove it."
            problems.append(problem("command line", key, flags[key], remedy))
    given = {key: value for key, value in flags.items() if value is not None}
    return problems + known[name].check(own | given)
