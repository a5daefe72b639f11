"""Shared by the benchmarks, imported first: the way to the helpers, the command line, Markdown tables."""

import argparse
import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
sys.path[:0] = [str(TESTS / "helpers"), str(ROOT)]


def on_cpu() -> None:
    """Compute on a CPU, with one thread a process, unless the environment says otherwise; before torch."""
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "DS_ACCELERATOR": "cpu",
    }.items():
        os.environ.setdefault(name, value)


def parser(text: str | None) -> argparse.ArgumentParser:
    """One whose help is `text`, a file's docstring, as it stands."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


Row = tuple[object, ...]
"""Cells of a table."""


def head(*cells: object) -> None:
    """Print the first two lines of a table."""
    row(*cells)
    print("|---" * len(cells) + "|", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
