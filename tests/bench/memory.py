"""Host memory as `wandistiller plan` says it and as it then is: every shipped student JSON with every shipped teacher JSON.

    python tests/bench/memory.py                      # two ranks, teacher and student of 50M parameters; about an hour
    python tests/bench/memory.py --layers 22 --width 1024 --student_layers 11     # 400M and 200M
    python tests/bench/memory.py --students zero2 zero3_offload --teachers sharded host_cpu

Each run prepares, trains two steps, saves and draws. A row has the greatest peak of a rank over all phases, in MiB: resident
memory, as the kernel counts it. Ended runs are kept in FOLDER and not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from recipes import PROMPTS  # noqa: E402
from small_wan import make_wan, transformer  # noqa: E402

from wandistiller.check import read_job  # noqa: E402
from wandistiller.config import RunConfig  # noqa: E402
from wandistiller.machine import machine_now  # noqa: E402
from wandistiller.planner import plan  # noqa: E402

STUDENTS = ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_offload_all", "zero3_nvme"]
TEACHERS = ["replicated", "sharded", "zero_inference_cpu", "zero_inference_nvme", "host_cpu", "owner"]


def pipeline(folder: Path, width: int, layers: int) -> Path:
    """A pipeline of one expert of this width."""
    made = folder / f"wan_{width}x{layers}"
    if not (made / "done").is_file():
        make_wan(made, experts=1)
        sizes = {"num_attention_heads": width // 64, "attention_head_dim": 64, "ffn_dim": 4 * width}
        transformer(1, layers, **sizes).save_pretrained(made / "transformer")
        (made / "done").touch()
    return made


def run(output: Path, recipe: dict, ranks: int) -> dict[str, dict[str, list[float]]]:
    """What each phase of a run took of each rank, GiB."""
    found = output / "memory.json"
    if not found.is_file():
        output.mkdir(parents=True, exist_ok=True)
        (output / "recipe.json").write_text(json.dumps(recipe))
        words = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "-m", "wandistiller", "train",
                 "--recipe", str(output / "recipe.json"), "--output_dir", str(output / "run"), "--resume", "never"]  # fmt: skip
        env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu"} | os.environ
        done = subprocess.run(words, capture_output=True, text=True, env=env | {"PYTHONPATH": str(ROOT)}, cwd=ROOT)
        if done.returncode:
            sys.exit(f"{output}:\n{done.stderr}")
        (output / "run" / "memory.json").rename(found)
        subprocess.run(["rm", "-rf", str(output / "run")], check=True)
    return json.loads(found.read_text())


def predicted(recipe: dict, ranks: int) -> dict[str, int]:
    """MiB of CPU memory that a rank is said to take, by phase."""
    job = read_job(RunConfig(**recipe), ranks)
    peaks = {phase: p.peak() for phase, p in plan(job, replace(machine_now(), ranks=ranks, ranks_on_node=ranks)).items()}
    return {phase: round((b.host + b.node) / 2**20) for phase, b in peaks.items()}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=Path("runs/bench_memory"))
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--width", type=int, default=512)
    made.add_argument("--layers", type=int, default=11)
    made.add_argument("--student_layers", type=int, default=11)
    made.add_argument("--students", nargs="+", default=STUDENTS)
    made.add_argument("--teachers", nargs="+", default=TEACHERS)
    args = made.parse_args()
    folder = args.folder.absolute()
    wan = pipeline(folder, args.width, args.layers)
    (folder / "prompts.txt").write_text(PROMPTS)
    for student in args.students:
        for teacher in args.teachers:
            name = f"{args.width}x{args.layers}x{args.student_layers}_{args.ranks}_{student}_{teacher}"
            recipe = {
                "teacher_path": str(wan), "data_path": str(folder / "prompts.txt"),
                "student_config": {"num_layers": args.student_layers}, "deepspeed_config": f"ds_configs/student/{student}.json",
                "teacher_deepspeed_config": f"ds_configs/teacher/{teacher}.json", "height": 64, "width": 64, "max_steps": 2,
                "rollout_steps": 2, "sample_steps": 2, "save_every": 1, "sample_every": 1, "sample_prompts": ["a red circle"],
            }  # fmt: skip
            found = run(folder / name, recipe, args.ranks)
            said = predicted(recipe | {"output_dir": str(folder / name / "run")}, args.ranks)
            print(name, {phase: [said.get(phase), *(round(1024 * gib) for gib in kinds["host_peak"])]
                         for phase, kinds in found.items()}, flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
