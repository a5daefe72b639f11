"""torch.compile in this process: its settings, the seconds that it takes, and where it gives up."""

import logging
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any

from wandistiller.distributed import collectives
from wandistiller.utils.logging import log

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
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_in_words)  # once, as in `drop_noise`
    return torch.compile(function)


def _in_words(record: logging.LogRecord) -> bool:
    """Log in one line that blocks stay eager, in place of torch's own warning; let other records pass."""
    if "hit config." in record.msg:
        text = "compile   torch gives up after %s variants of a block: it computes further ones eagerly (%s)"
        log.warning(text, record.args[1], str(record.args[3]).strip().partition("\n")[0])
    elif "WON'T CONVERT" in record.msg:
        why = record.msg.partition("\n\nSet TORCHDYNAMO")[0].strip().rpartition("\n")[2]
        log.warning("compile   torch cannot compile a block: it computes it eagerly (%s)", why)
    else:
        return True
    return False


def log_compiled(before: float) -> float:
    """Log the seconds of all compiling if they are more than `before`; return them."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import
        return before
    from torch._dynamo.utils import calculate_time_spent, counters

    if (seconds := calculate_time_spent()["total_wall_time"]) > before:
        variants = counters["stats"]["unique_graphs"]
        collectives.log0("compile   %.0f s in all, %d variants of a block", seconds, variants)
    return seconds
