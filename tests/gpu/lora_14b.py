"""Few-step LoRAs of a random 14B, its three roles on one streamed base, by the shipped recipe for 16 GB.

    python tests/gpu/lora_14b.py    # one GPU, 60 GB of CPU memory, 30 GB of disk; stream_14b.py's teacher
    python tests/gpu/lora_14b.py --layers 2 --small  # tiny sizes, to see that it runs

Training may take no more of the GPU than a row's GB. Seconds are the median of steps after the first; memory
is that in use at the highest, beside its plan. A step is 4 samples of 480x832, of clips in 4 micro-steps.
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
from small_wan import make_large_wan
from stream_14b import CONFIG, SMALL

from wandistiller.planner.peak_memory import CONTEXT
from wandistiller.planner.time import Times, usual_rates
from wandistiller.utils.files import read_json

RECIPE = "ds_configs/machines/1x16_wan2.1_14b_lora.json"
ROWS: dict[str, tuple[int, dict[str, Any]]] = {  # GB of the GPU, and what differs from the recipe
    "images": (16, {}),
    "images_int8": (16, {"teacher_deepspeed_config": "stream8"}),
    "clips_17": (24, {"num_frames": 17, "batch_size": 1}),
    "clips_81": (24, {"num_frames": 81, "batch_size": 1}),
}


def settings(folder: Path, wan: Path, name: str, small: bool, steps: int) -> dict[str, Any]:
    """The shipped recipe for some steps, with the whole critic from the first."""
    given = read_json(RECIPE)
    engine = read_json(given["deepspeed_config"])
    # by "auto" all memory of the GPU would count, not a row's GB
    engine["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    (prompts := folder / "prompts.txt").write_text("a red circle\na blue square\n" * 2)
    size = {"height": 32, "width": 32, "num_frames": 5} if small else {"height": 480, "width": 832}
    own = {"teacher_path": str(wan), "data_path": str(prompts), "output_dir": str(folder / name)}
    own |= {"objective": given["objective"] | {"critic_warmup": 0}, "max_steps": steps, "save_every": steps}
    own["deepspeed_config"] = engine
    more = ROWS[name][1] | ({"num_frames": 5} if small else {})
    return given | size | {"sample_prompts": [], "resume": "never"} | more | own


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=Path("runs/stream_14b"))
    made.add_argument("--layers", type=int, default=40)
    made.add_argument("--rows", nargs="+", default=["images", "images_int8", "clips_17"], choices=ROWS)
    made.add_argument("--steps", type=int, default=3)
    made.add_argument("--small", action="store_true", help="narrow blocks and small pictures")
    args = made.parse_args()
    config = CONFIG | (SMALL if args.small else {}) | {"num_layers": args.layers}
    wan = make_large_wan(args.folder.absolute() / f"{args.layers}_layers", torch.bfloat16, "5GB", **config)
    print("| run | of GB | seconds a step | planned | loss | GPU GiB planned | measured |\n|" + "---|" * 7)
    for name in args.rows:
        given, memory = settings(args.folder.absolute(), wan, name, args.small, args.steps), ROWS[name][0]
        planned, (job, machine) = max(predicted(given, 1).values()) / 1024, job_here(given, 1)
        about = Times(job, machine, usual_rates(machine)).step()
        file = write_json(args.folder / f"{name}.json", given)
        words = [active_peaks.__file__, "train", "--recipe", str(file), "--despite_plan"]
        most = {} if REHEARSAL else {"MOST_GPU_BYTES": str(int(memory * 1e9) - CONTEXT)}
        run([sys.executable, *words], DS_ACCELERATOR=KIND, **most)
        output = Path(given["output_dir"])
        steps, peaks = metrics(output), read_json(output / "memory.json")
        shutil.rmtree(output)
        counted = "peak" if KIND == "cuda" else "host_peak"
        measured = max(max(kinds[counted]) for kinds in peaks.values() if counted in kinds)
        took = median(line["seconds"] for line in steps[1:])
        figures = f"{steps[-1]['loss']:.3g} | {planned:.2f} | {measured:.2f}"
        print(f"| {name} | {memory} | {took:.2f} | {about:.2f} | {figures} |")
        text = f"{took:.1f} s a step, about {about:.1f} planned, {measured:.2f} of {planned:.2f} GiB planned"
        print(f"=> {name}: {text}", flush=True)


if __name__ == "__main__":
    main()
