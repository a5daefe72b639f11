"""Planned memory of a GPU by the number of frames, for Wan2.1 14B and a student of half its layers.

    python tests/bench/frames.py            # some minutes; nothing is loaded or trained

A cell has GiB of a GPU at the most, the simplest shipped JSONs that fit at a micro-batch of 1, and the ranks
that compute each sample together if those are several. All of it is arithmetic.
"""

import tempfile
from pathlib import Path

from common import head, row
from planned import gpus, published_job
from published_wan import write_wans

from wandistiller.planner.machine import Machine
from wandistiller.planner.resolve_auto import pairs
from wandistiller.utils.system_memory import GIB

MACHINES = {
    "1 x 24 GB, 128 GiB": gpus(1, 24, 128),
    "4 x 24 GB, 256 GiB": gpus(4, 24, 256),
    "8 x 80 GB, 1000 GiB": gpus(8, 80, 1000),
}
"""Machines by their GPUs and CPU memory."""
SIZES = [(480, 832), (720, 1280)]
FRAMES = (1, 17, 49, 81)


def cell(folder: Path, machine: Machine, height: int, width: int, frames: int) -> str:
    """What the simplest combination at a micro-batch of 1 takes."""
    size = {"height": height, "width": width, "num_frames": frames}
    for sharers in [1] if frames == 1 else [n for n in (1, 2, 4, 8) if machine.ranks % n == 0]:
        job = published_job(folder, machine, context_parallel=sharers, **size)
        fits = (pair.fitting(pair.sizes[0], machine) for pair in pairs(job, machine))
        if best := next(filter(None, fits), None):
            gib = max(b.device + b.transient for b in best.takes) / GIB
            return f"{gib:.1f}: {best.student}, {best.teacher}{f', {sharers} ranks' * (sharers > 1)}"
    return "does not fit"


def main() -> None:
    head("pixels, frames", *MACHINES)
    with tempfile.TemporaryDirectory() as made:
        folder = write_wans(Path(made))
        for height, width in SIZES:
            for frames in FRAMES:
                cells = [cell(folder, machine, height, width, frames) for machine in MACHINES.values()]
                row(f"{height}x{width}, {frames}", *cells)


if __name__ == "__main__":
    main()
