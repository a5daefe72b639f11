"""What the settings of the C library's allocator, and other allocators, do to a run's memory and speed on the CPU.

    python tests/bench/allocator.py --rounds 1 --steps 6 --side 128      # two ranks, 25M parameters each; a quarter of an hour

The rows of a round run one after the other; a number is the median of all rounds. Peak: the highest resident memory of a rank
while it trains, of the rank with most. After: what it holds when training has ended.
"""

import argparse
import ctypes.util
import json
import os
import shutil
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

from planned import pipeline, recipe  # noqa: E402
from ranks import launcher, run, write_json  # noqa: E402

SETTINGS = {
    "glibc as it is": {"MALLOC_PERTURB_": "0"},  # says nothing, but that the user has said something
    "as settled: blocks over 1 MiB are returned": {},
    "MALLOC_ARENA_MAX=2": {"MALLOC_ARENA_MAX": "2"},
    "MALLOC_MMAP_THRESHOLD_=8 MiB": {"MALLOC_MMAP_THRESHOLD_": str(2**23)},
}


def preloads() -> dict[str, dict[str, str]]:
    """Other allocators that this machine has."""
    found = {name: ctypes.util.find_library(name) for name in ("tcmalloc_minimal", "jemalloc")}
    return {name: {"LD_PRELOAD": library} for name, library in found.items() if library}


def once(folder: Path, given: dict, env: dict[str, str]) -> tuple[float, float, float]:
    """Peak and last MiB of a rank in training, and the seconds of a step in the middle."""
    output = Path(given["output_dir"])
    shutil.rmtree(output, ignore_errors=True)
    run([*launcher(2), "-m", "wandistiller", "train", "--recipe", str(write_json(folder / "run.json", given))], **env)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    peak = max(json.loads((output / "memory.json").read_text())["train"]["host_peak"])
    return 1024 * peak, 1024 * max(lines[-1]["memory_gib"]["train"]["host"]), statistics.median(l["seconds"] for l in lines[2:])  # noqa: E741


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=Path("runs/bench_allocator"))
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--student", default="zero2_offload")
    made.add_argument("--teacher", default="zero_inference_cpu")
    made.add_argument("--steps", type=int, default=12)
    made.add_argument("--side", type=int, default=64)
    args = made.parse_args()
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    often = dict.fromkeys(("max_steps", "save_every", "sample_every"), args.steps)
    often |= {"height": args.side, "width": args.side, "num_frames": 1}
    given = recipe(folder, pipeline(folder, 512, 6), 6, args.student, args.teacher) | often
    settings = SETTINGS | preloads()
    found = {name: [] for name in settings}
    for _ in range(args.rounds):
        for name, env in settings.items():
            found[name].append(once(folder, given, env))
    print("| allocator | peak, MiB | after, MiB | s a step | peak, ratio | step, ratio |\n|---|---|---|---|---|---|")
    base = [statistics.median(each) for each in zip(*found["glibc as it is"], strict=True)]
    for name, runs in found.items():
        peak, after, step = (statistics.median(each) for each in zip(*runs, strict=True))
        print(f"| {name} | {peak:.0f} | {after:.0f} | {step:.2f} | {peak / base[0]:.3f} | {step / base[2]:.3f} |")
    print(f"cores: {os.cpu_count()}")


if __name__ == "__main__":
    main()
