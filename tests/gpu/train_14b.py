"""Steps on a random 14B that streams from CPU memory, beside their plan: of a tenth of it, and of LoRAs.

    python tests/gpu/train_14b.py    # one GPU, 60 GB of CPU memory, 50 GB of disk; stream_14b.py's teacher
    python tests/gpu/train_14b.py --layers 2 --small  # tiny sizes, to see that it runs

A row SAMPLESxMICRO-STEPS is the whole run of a student cut from its teacher: prompts, rollouts, steps with
guidance, a checkpoint, a picture and the student. The other rows are the shipped recipe for 16 GB, its three
roles on one base; such a run may take no more of the GPU than its GB. Its step is 4 samples, of clips in 4
micro-steps. Seconds are the median of steps after the first third; memory is that in use at the highest.
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

RECIPE = "ds_configs/machines/1x16_wan2.1_14b_lora.json"
LORAS: dict[str, tuple[int, dict[str, Any]]] = {  # GB of the GPU, and what differs from the recipe
    "images": (16, {}),
    "images_int8": (16, {"teacher_deepspeed_config": "stream8"}),
    "clips_17": (24, {"num_frames": 17, "batch_size": 1}),
    "clips_81": (24, {"num_frames": 81, "batch_size": 1}),
}


def of_lora(name: str) -> dict[str, Any]:
    """The shipped recipe, with the optimizer in CPU memory."""
    given = read_json(RECIPE)
    engine = read_json(given["deepspeed_config"])
    # by "auto" all memory of the GPU would count, not a row's GB
    engine["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    engine["wandistiller"]["checkpoint_but_last"] = 0
    return given | {"deepspeed_config": engine, "sample_prompts": []} | LORAS[name][1]


def of_student(batch: str) -> dict[str, Any]:
    samples, micro_steps = map(int, batch.split("x"))
    ds = read_json("ds_configs/student/zero2_offload.json")
    ds |= {"train_micro_batch_size_per_gpu": samples, "gradient_accumulation_steps": micro_steps}
    teacher = {"teacher_deepspeed_config": "ds_configs/teacher/streamed.json"}
    return {"student_config": {"init": "teacher", "num_layers": 0.1}, "deepspeed_config": ds} | teacher


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=Path("runs/stream_14b"))
    made.add_argument("--layers", type=int, default=40)
    rows = ["16x1", "1x16", "images", "images_int8", "clips_17"]
    made.add_argument("--rows", nargs="+", default=rows, help=f"of LoRAs: {', '.join(LORAS)}")
    made.add_argument("--steps", type=int, help="3 of LoRAs and 6 of a student")
    made.add_argument("--small", action="store_true", help="narrow blocks and small pictures")
    args = made.parse_args()
    folder, small = args.folder.absolute(), {"height": 32, "width": 32}
    config = CONFIG | (SMALL if args.small else {}) | {"num_layers": args.layers}
    wan = make_large_wan(folder / f"{args.layers}_layers", torch.bfloat16, "5GB", **config)
    print("| row | of GB | seconds a step | planned | loss | GPU GiB planned | measured |\n|" + "---|" * 7)
    for name in args.rows:
        memory, steps = LORAS.get(name, ("all",))[0], args.steps or (3 if name in LORAS else 6)
        size = small if args.small else {"height": 480, "width": 832}
        paths = {"teacher_path": str(wan), "output_dir": str(folder / name), "resume": "never"}
        base = recipe(folder, wan) if name not in LORAS else {"data_path": recipe(folder, wan)["data_path"]}
        given = base | (of_lora if name in LORAS else of_student)(name) | size | paths
        given |= {"data_path": base["data_path"], "max_steps": steps, "save_every": steps}
        given |= {"num_frames": 5} if args.small and name in LORAS else {}
        planned, (job, machine) = max(predicted(given, 1).values()) / 1024, job_here(given, 1)
        about = Times(job, machine, usual_rates(machine)).step()
        file = write_json(folder / f"{name}.json", given)
        words = [active_peaks.__file__, "train", "--recipe", str(file), "--despite_plan"]
        is_limited = name in LORAS and not REHEARSAL
        most = {"MOST_GPU_BYTES": str(int(memory * 1e9) - CONTEXT)} if is_limited else {}
        run([sys.executable, *words], DS_ACCELERATOR=KIND, **most)
        output = Path(given["output_dir"])
        lines, peaks = metrics(output), read_json(output / "memory.json")
        shutil.rmtree(output)
        counted = "peak" if KIND == "cuda" else "host_peak"
        measured = max(max(kinds[counted]) for kinds in peaks.values() if counted in kinds)
        took = median(line["seconds"] for line in lines[steps // 3 :])
        figures = f"{lines[-1]['loss']:.3g} | {planned:.2f} | {measured:.2f}"
        print(f"| {name} | {memory} | {took:.2f} | {about:.2f} | {figures} |")
        text = f"{took:.1f} s a step, about {about:.1f} planned, {measured:.2f} of {planned:.2f} GiB planned"
        print(f"=> {name}: {text}", flush=True)


if __name__ == "__main__":
    main()
