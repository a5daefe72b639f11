"""The interface of an export format, and the registry of all formats."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch

from wandistiller.export.source import Source
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

    def problems(self) -> list[str]:
        """Problems with this format's own settings, found before anything is read."""
        return []

    @abstractmethod
    def write(self, source: Source, output: Path) -> list[Path]:
        """Write the student and its model card; return the files and folders made.

        Raises:
            ConfigError: `output` holds something else, or this student has no such form.
        """


def formats() -> dict[str, type[ExportFormat]]:
    return classes_in("wandistiller.export.formats", ExportFormat)
