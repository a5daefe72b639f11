"""Called on ranks by test_loading.py: what each rank reads and keeps while a teacher is loaded."""

import re
from pathlib import Path
from typing import Any

from shipped import placement

from wandistiller.distributed import collectives
from wandistiller.teacher.build import build_teacher
from wandistiller.wan import pipeline


def bytes_read() -> int:
    """By this process so far, from files of any kind, whether cached or not."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def shared_blocks() -> list[str]:
    """Inode numbers of the anonymous memory files that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[4] for line in lines if "memfd:wandistiller" in line})


def loaded(folder: Path, work: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Load the teacher by each JSON; return the bytes that this rank read, and the memory that it shares."""
    teacher, loads = pipeline.open_wan(str(folder)), {}
    for name in names:
        placed = placement(name, "float32", swap=work / "swap")
        before = bytes_read()
        made: Any = build_teacher(teacher, placed)
        loads[name] = {"read": bytes_read() - before, "shared": shared_blocks()}
        collectives.barrier()
        del made
    return loads
