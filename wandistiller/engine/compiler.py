"""torch.compile in this process: its settings, and the seconds that it takes."""

import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any

from wandistiller.distributed import collectives

VARIANTS = 32
"""Most variants of a block: some for each size, which student and critic share. torch's own limit is 8."""


def has_compiler() -> bool:
    """Return whether a compiler and Python's headers are where torch and Triton look for them."""
    names = filter(None, (os.environ.get("CC"), os.environ.get("CXX"), "gcc", "clang", "g++"))
    return any(map(which, names)) and Path(sysconfig.get_paths()["include"], "Python.h").is_file()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as torch.compile makes it, which rounds to bf16 wherever eager code does.

    A teacher and a critic that is equal to it would else differ by 0.5 %, as their graphs do.
    """
    import torch._dynamo.config
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = VARIANTS
    torch._dynamo.config.allow_ignore_mark_dynamic = True  # where it has no effect: more variants, no error
    # a compiler that fails after hours of preparation ends no run
    torch._dynamo.config.suppress_errors = True
    torch._inductor.config.emulate_precision_casts = True
    return torch.compile(function)


def log_compiled(before: float) -> float:
    """Log the seconds of all compiling if they are more than `before`; return them."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import
        return before
    from torch._dynamo.utils import calculate_time_spent, counters

    if (seconds := calculate_time_spent()["total_wall_time"]) > before:
        variants = counters["stats"]["unique_graphs"]
        collectives.log0("compile   %.0f s in all, %d variants of a block", seconds, variants)
    return seconds
