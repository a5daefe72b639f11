"""Bytes per rank of each Wan as a teacher under each placement, by arithmetic: nothing is loaded.

    python tests/bench/placement_bytes.py --ranks 8
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from published_wan import PUBLISHED, write_published  # noqa: E402

from wandistiller.deepspeed_json import teacher_engine  # noqa: E402
from wandistiller.machine import GIB, placed  # noqa: E402
from wandistiller.memory import teacher_bytes  # noqa: E402
from wandistiller.wan import open_wan  # noqa: E402

PLACEMENTS = ["replicated", "sharded", "zero_inference_cpu", "zero_inference_nvme", "host_cpu", "owner"]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, default=8)
    made.add_argument("--dtype", default="bfloat16")
    args = made.parse_args()
    print(f"GiB for each of {args.ranks} ranks in {args.dtype}: on its GPU + there during a call; CPU memory (one copy a node "
          "for host_cpu); disk\n")  # fmt: skip
    print(f"| placement | {' | '.join(PUBLISHED)} |\n|{'---|' * (len(PUBLISHED) + 1)}")
    with tempfile.TemporaryDirectory() as folder:
        opened = [open_wan(str(write_published(Path(folder), name))) for name in PUBLISHED]
        for name in PLACEMENTS:
            ds = teacher_engine(name, placed(name, args.dtype), args.ranks)
            found = [teacher_bytes(teacher, ds, args.ranks) for teacher in opened]
            kinds = [(b.device, b.live, b.host + b.node, b.disk) for b in found]
            cells = ["{:.1f} + {:.1f}; {:.1f}; {:.1f}".format(*(n / GIB for n in kind)) for kind in kinds]
            print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
