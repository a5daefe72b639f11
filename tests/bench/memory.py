"""Planned and measured memory of every shipped student JSON with every shipped teacher JSON.

    python tests/bench/memory.py             # two ranks, teacher and student of 50M parameters; about an hour
    python tests/bench/memory.py --layers 22 --width 1024 --student_layers 11     # 400M and 200M
    python tests/bench/memory.py --layers 22 --width 1024 --student_layers 11 --students zero2 --short
    python tests/bench/memory.py --students zero2 zero3_offload --teachers sharded host_cpu
    python tests/bench/memory.py --pixels 480 832 --num_frames 81        # latents of a video, for GPUs
    python tests/bench/memory.py --short --pixels 256 256 --num_frames 9 --context_parallel 2

Each run prepares, trains two steps, saves, draws and exports. A row has planned and measured MiB of the
largest rank in each phase: resident memory, or on a GPU torch's allocator's. Ended runs are kept in
FOLDER and not repeated. Ends with 1 if a run's peak is not within -5 and +10 % of the plan.
"""

import json
import sys
from pathlib import Path

from common import head, parser, row
from planned import measured, pipeline, predicted, recipe
from ranks import STUDENTS
from ranks import TEACHERS as PLACEMENTS

TEACHERS = [name for name in PLACEMENTS if not name.startswith("device_map") and not name.endswith("_node")]


def kept(file: Path, given: dict, ranks: int) -> dict[str, int]:
    """Measured MiB of a run by phase; it is run unless it was."""
    if not file.is_file():
        file.write_text(json.dumps(measured(given, ranks)))
    return json.loads(file.read_text())


def shortened(given: dict) -> dict:
    """The same run with two prompts and two micro-steps a step, which takes as much memory."""
    data = Path(given["data_path"])
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:2]))
    engine = json.loads(Path(given["deepspeed_config"]).read_text()) | {"gradient_accumulation_steps": 2}
    return given | {"deepspeed_config": engine}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, default=Path("runs/bench_memory"))
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--width", type=int, default=512)
    made.add_argument("--layers", type=int, default=11)
    made.add_argument("--student_layers", type=int, default=11)
    made.add_argument("--pixels", type=int, nargs=2, default=(64, 64))
    made.add_argument("--num_frames", type=int, default=1)
    made.add_argument("--context_parallel", type=int, default=1)
    made.add_argument("--students", nargs="+", default=STUDENTS)
    made.add_argument("--teachers", nargs="+", default=TEACHERS)
    help_of_short = "fewer prompts and micro-steps: a run's height stays (1 %% at 50M)"
    made.add_argument("--short", action="store_true", help=help_of_short)
    args = made.parse_args()
    folder = args.folder.absolute()
    wan = pipeline(folder, args.width, args.layers)
    ratios: list[float] = []
    for student in args.students:
        for teacher in args.teachers:
            size = {"height": args.pixels[0], "width": args.pixels[1], "num_frames": args.num_frames}
            sharing = {"context_parallel": args.context_parallel}
            given = recipe(folder, wan, args.student_layers, student, teacher, **size, **sharing)
            given = shortened(given) if args.short else given
            form = "_{height}x{width}x{num_frames}".format(**size)
            shared = f"_{args.context_parallel}_together" * (args.context_parallel > 1)
            apart = form * (form != "_64x64x1") + shared + "_short" * args.short
            sizes = f"{args.width}x{args.layers}x{args.student_layers}_{args.ranks}"
            name = f"{sizes}_{student}_{teacher}{apart}.json"
            actual, expected = kept(folder / name, given, args.ranks), predicted(given, args.ranks)
            phases = [phase for phase in expected if phase in actual]
            ratios.append(max(expected[p] for p in phases) / max(actual[p] for p in phases))
            if len(ratios) == 1:
                head("student", "teacher", *phases, "planned / measured at the highest")
            each = (f"{expected[phase]} / {actual[phase]}" for phase in phases)
            row(student, teacher, *each, f"{ratios[-1]:.3f}")
    print(f"planned / measured: {min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} runs")
    sys.exit(not all(0.95 <= ratio <= 1.1 for ratio in ratios))


if __name__ == "__main__":
    main()
