"""Steps of LoRAs on a random 14B, and of a tenth of it, beside their plan.

    python tests/gpu/train_14b.py    # one GPU, 60 GB of CPU memory, 50 GB of disk; stream_14b.py's teacher
    python tests/gpu/train_14b.py --layers 2 --small  # tiny sizes, to see that it runs

A row SAMPLESxMICRO-STEPS is a run of a student cut from its teacher, which streams. The others are the
shipped recipe for 16 GB, its three roles on one base, and what differs from it; such a run may take no more
of its GPU than that. A step is 4 samples, of clips in 4 micro-steps; `simpletuner` has that tool's shape and
one sample. Seconds are the median of steps after the first third without the last, whose kernels are listed.
"""

import argparse
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS.parent)]

import active_peaks
import torch
from gpu import KIND, REHEARSAL
from planned import job_here, predicted
from ranks import metrics, run, write_json
from recipes import recipe
from small_wan import make_large_wan
from stream_14b import CONFIG, SMALL

from wandistiller.planner.peak_memory import CONTEXT
from wandistiller.planner.time import Times, usual_rates
from wandistiller.utils.files import read_json

CLIP = {"num_frames": 17, "batch_size": 1}
TUNER = {"objective": {"name": "velocity", "data_weight": 1}, "lora": {"rank": 16}, "rollout_steps": 1}
TUNER |= {"num_frames": 81, "batch_size": 1, "height": 384, "width": 592}
SIZE = {"height": 480, "width": 832}
LORAS: dict[str, tuple[int, dict[str, Any]]] = {  # GB of the GPU, and what differs from the recipe
    "images": (16, {}),
    "images_compiled": (16, {}),
    "images_adam_compiled": (16, {}),
    "images_int8": (16, {"teacher_deepspeed_config": "stream8"}),
    "images_80_adam_compiled": (80, {"teacher_deepspeed_config": "gpu"}),
    "clips_17": (24, CLIP),
    "clips_17_compiled": (24, CLIP),
    "simpletuner": (24, TUNER),
}
"""In rows of `adam` the optimizer is on the GPU, and of 80 GB all activations stay."""


def of_row(name: str, layers: int) -> dict[str, Any]:
    """The shipped recipe with what a row says: by "auto" all memory of the GPU would count, not its GB."""
    given, (memory, more) = read_json("ds_configs/machines/1x16_wan2.1_14b_lora.json"), LORAS[name]
    engine = read_json(given["deepspeed_config"])
    engine["train_batch_size"] = 1 if more is TUNER else 4
    engine["zero_optimization"]["offload_optimizer"]["device"] = "none" if "adam" in name else "cpu"
    engine["wandistiller"] |= {"compile": "compiled" in name, "checkpoint_but_last": layers * (memory == 80)}
    return given | SIZE | {"deepspeed_config": engine, "sample_prompts": []} | more


def of_student(batch: str) -> dict[str, Any]:
    samples, micro_steps = map(int, batch.split("x"))
    ds = read_json("ds_configs/student/zero2_offload.json")
    ds |= {"train_micro_batch_size_per_gpu": samples, "gradient_accumulation_steps": micro_steps}
    teacher = {"teacher_deepspeed_config": "stream"}
    return {"student_config": {"init": "teacher", "num_layers": 0.1}, "deepspeed_config": ds} | teacher


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=Path("runs/stream_14b"))
    made.add_argument("--layers", type=int, default=40)
    made.add_argument("--rows", nargs="*", default=[*LORAS], help=f"16x1, {', '.join(LORAS)}")
    made.add_argument("--steps", type=int, default=3)
    made.add_argument("--small", action="store_true", help="narrow blocks and small pictures")
    args = made.parse_args()
    folder, steps = args.folder.absolute(), args.steps
    small = {"height": 32, "width": 32, "num_frames": 5} if args.small else {}
    config = CONFIG | (SMALL if args.small else {}) | {"num_layers": args.layers}
    wan = make_large_wan(folder / f"{args.layers}_layers", torch.bfloat16, "5GB", **config)
    print("| row | of GB | seconds a step | planned | loss | GPU GiB planned | measured |\n|" + "---|" * 7)
    for name in args.rows:
        output, is_lora = folder / f"{name}_{args.layers}", name in LORAS
        data = {key: recipe(folder, wan)[key] for key in ("teacher_path", "data_path")}
        given = of_row(name, args.layers) if is_lora else recipe(folder, wan) | SIZE | of_student(name)
        own = {"output_dir": str(output), "max_steps": steps, "save_every": steps, "resume": "never"}
        given |= small | data | own
        planned, (job, machine) = max(predicted(given, 1).values()) / 1024, job_here(given, 1)
        about = Times(job, machine, usual_rates(machine)).step()
        file = write_json(output.with_suffix(".json"), given)
        words = [active_peaks.__file__, "train", "--recipe", str(file), "--despite_plan"]
        memory = LORAS[name][0] if is_lora else "all"
        most = {"MOST_GPU_BYTES": str(int(memory * 1e9) - CONTEXT)} if is_lora and not REHEARSAL else {}
        done = run([sys.executable, *words], DS_ACCELERATOR=KIND, PROFILED_STEP=str(steps - 1), **most)
        lines, peaks = metrics(output), read_json(output / "memory.json")
        shutil.rmtree(output)
        counted = "peak" if KIND == "cuda" else "host_peak"
        measured = max(max(kinds[counted]) for kinds in peaks.values() if counted in kinds)
        took = median(line["seconds"] for line in lines[steps // 3 : -1] or lines)
        figures = f"{lines[-1]['loss']:.3g} | {planned:.2f} | {measured:.2f}"
        print(f"| {name} | {memory} | {took:.2f} | {about:.2f} | {figures} |")
        text = f"{took:.1f} s a step, about {about:.1f} planned, {measured:.2f} of {planned:.2f} GiB planned"
        kernels = [line for line in done.stdout.splitlines() if line.startswith(active_peaks.KINDS_OF)]
        print(*kernels, sep="\n")
        print(f"=> {name}: {text}", flush=True)


if __name__ == "__main__":
    main()
