"""What 64 GPUs should gain on paper: the floor of a step, and bytes between nodes, for 1 to 8 nodes of 8 x 80 GB.

    python tests/bench/scaling.py                                  # half a minute; nothing is trained
    python tests/bench/scaling.py --wan Wan2.2-T2V-A14B --network 25

Each GPU takes as many samples a step however many there are, so ideal is the same time. The arithmetic is that of `wandistiller
plan`, at its usual rates, and takes traffic to go on beneath the computing; network.py compares its bytes with what is counted.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

from machines import write_wans  # noqa: E402
from planned import published_job  # noqa: E402
from published_wan import PUBLISHED  # noqa: E402

from wandistiller.config import read_json  # noqa: E402
from wandistiller.costs import Costs  # noqa: E402
from wandistiller.machine import GIB, Machine  # noqa: E402
from wandistiller.rates import usual  # noqa: E402

PAIRS = [("zero2", "replicated"), ("zero2_offload", "replicated"), ("zero3_offload", "replicated"), ("zero2_offload", "sharded"),
         ("zero2_offload", "sharded_node"), ("zero2_offload", "zero_inference_cpu"), ("zero2_offload", "zero_inference_cpu_node"),
         ("zero2_offload", "owner")]  # fmt: skip
HALF = "ds_configs/students/half.json"
NODES = (1, 2, 4, 8)
GPUS = 8


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--wan", choices=PUBLISHED, default="Wan2.1-T2V-14B")
    made.add_argument("--micro", type=int, default=8, help="samples of a micro-step")
    made.add_argument("--accumulation", type=int, default=1)
    made.add_argument("--network", type=float, help="GB/s of a node to the others; default as `plan` has it")
    args = made.parse_args()
    print(f"| student, teacher | {' | '.join(f'{GPUS * n} GPUs: s a step, of ideal, GiB a node' for n in NODES)} |")
    print(f"|{'---|' * (len(NODES) + 1)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_wans(Path(temporary))
        for student, teacher in PAIRS:
            cells, first = [], None
            for nodes in NODES:
                machine = Machine(80 * GIB, 2000 * GIB, 2000 * GIB, GPUS * nodes, GPUS)
                rates = usual(machine.device_free)
                rates = replace(rates, network=args.network or rates.network)
                ds = read_json(f"ds_configs/student/{student}.json")
                ds |= {"train_micro_batch_size_per_gpu": args.micro, "gradient_accumulation_steps": args.accumulation}
                job = published_job(folder, machine, args.wan, deepspeed_config=ds, student_config=HALF,
                                    teacher_deepspeed_config=f"ds_configs/teacher/{teacher}.json")  # fmt: skip
                costs = Costs(job, machine, rates)
                seconds = costs.floor()
                first = first or seconds
                sent = sum(c.times * m.nbytes for c in costs.all() for m in c.moves if m.way == "network") / GIB
                cells.append(f"{seconds:.2f}, {100 * first / seconds:.0f} %, {sent:.0f}")
            print(f"| {student}, {teacher} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
