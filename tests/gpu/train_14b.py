"""Steps of a student of a tenth of a random 14B, whose teacher streams from CPU memory, beside their plan.

    python tests/gpu/train_14b.py    # one GPU, 60 GB of CPU memory, 50 GB of disk; stream_14b.py's teacher
    python tests/gpu/train_14b.py --layers 2 --small  # tiny sizes, to see that it runs

The whole of a run: prompts, two steps of rollouts, the student cut from its teacher, steps with guidance, a
checkpoint, a picture and the student. Seconds are the median of steps after the second; memory is that of the
highest phase.
"""

import argparse
import shutil
import sys
from pathlib import Path
from statistics import median

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS.parent)]

import torch
from gpu import KIND
from planned import predicted
from ranks import metrics, wandistiller
from recipes import recipe, recipe_file
from small_wan import make_large_wan
from stream_14b import CONFIG, SMALL

from wandistiller.utils.files import read_json

STUDENT = {"init": "teacher", "num_layers": 0.1}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=Path("runs/stream_14b"))
    made.add_argument("--layers", type=int, default=40)
    made.add_argument(
        "--batches", nargs="+", default=["16x1", "1x16"], help="samples x micro-steps of a step"
    )
    made.add_argument("--steps", type=int, default=6)
    made.add_argument("--student", default="zero2_offload")
    made.add_argument("--teacher", default="streamed")
    made.add_argument("--small", action="store_true", help="narrow blocks and small pictures")
    args = made.parse_args()
    config = CONFIG | (SMALL if args.small else {}) | {"num_layers": args.layers}
    wan = make_large_wan(args.folder.absolute() / f"{args.layers}_layers", torch.bfloat16, "5GB", **config)
    print("| student, teacher | samples x micro-steps | seconds a step | loss | GPU GiB planned | measured |")
    print("|---|---|---|---|---|---|", flush=True)
    for batch in args.batches:
        samples, micro_steps = map(int, batch.split("x"))
        ds = read_json(f"ds_configs/student/{args.student}.json")
        ds |= {"train_micro_batch_size_per_gpu": samples, "gradient_accumulation_steps": micro_steps}
        name = f"{args.student}_{args.teacher}_{batch}"
        more = {
            "student_config": STUDENT,
            "deepspeed_config": ds,
            "teacher_deepspeed_config": f"ds_configs/teacher/{args.teacher}.json",
            "height": 32 if args.small else 480,
            "width": 32 if args.small else 832,
            "max_steps": args.steps,
            "rollout_steps": 2,
            "sample_prompts": ["a red circle"],
            "resume": "never",
        }
        given = recipe(args.folder, wan, output_dir=str(args.folder / name), **more)
        planned = max(predicted(given, 1).values()) / 1024
        file = recipe_file(args.folder, wan, name, **more)
        # the plan counts the checkpoints of steps that take longer than `save_minutes`; here is one
        wandistiller("train", "--recipe", file, "--despite_plan", accelerator=KIND)
        shutil.rmtree(args.folder / name / "checkpoints")
        steps, peaks = metrics(args.folder / name), read_json(args.folder / name / "memory.json")
        counted = "peak" if KIND == "cuda" else "host_peak"
        measured = max(max(kinds[counted]) for kinds in peaks.values() if counted in kinds)
        took = median(line["seconds"] for line in steps[2:])
        kinds = f"{args.student}, {args.teacher} | {batch} | {took:.2f} | {steps[-1]['loss']:.4f}"
        print(f"| {kinds} | {planned:.2f} | {measured:.2f} |", flush=True)
        print(f"=> {batch}: {took:.2f} s a step, {measured:.2f} of {planned:.2f} GiB planned", flush=True)


if __name__ == "__main__":
    main()
