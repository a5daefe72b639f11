"""Few-step adapters by dmd2 for fewer and fewer passes: what a step costs, and what the student is worth.

    python tests/bench/passes.py                         # pictures in 4 steps, 150 updates each
    python tests/bench/passes.py --updates 38 -- "carried, projected, mixed"
    python tests/bench/passes.py --world i2v --steps 2 --seeds 0 1 -- "5:1" "carried, projected, mixed"

Trains adapters of an embedded teacher's low-noise expert, for all noise levels, in each way, and evaluates
them. Prints a Markdown table: forward passes of all networks for a sample of one step and of the whole run, a
backward pass counted as two, without recomputation; then `evaluate`'s figures. It goes on from what its
folder holds.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT, head, on_cpu, parser, row

on_cpu()

from ranks import environment
from reading import read_run

from wandistiller.config.validate import read_job
from wandistiller.planner.passes import passes_asked

SHARED = {"critic_updates": 1, "shared": True}
CARRIED = SHARED | {"carried": True}
MIXED = CARRIED | {"projected": True, "compare": "mixed", "critic_lr": 9e-4}
WAYS: dict[str, dict[str, Any]] = {
    "5:1": {"critic_updates": 5},
    "1:1": {"critic_updates": 1},
    "1:1, follows": {"critic_updates": 1, "critic_follows": 0.03},
    "shared, follows": SHARED | {"critic_follows": 0.03},
    "carried, follows": CARRIED | {"critic_follows": 0.03},
    "carried, projected, mixed": MIXED,
    "the same, guidance on half": MIXED | {"guidance_share": 0.5},
}
WORLDS = {
    "pictures": ("lora", "tiny:held_out"),
    "clips": ("lora_video", "tiny-video:held_out"),
    "i2v": ("lora_i2v", "tiny-i2v:held_out"),
}
"""Recipe of adapters, and prompts."""
FIGURES = ("fully_right", "blotched", "picture_error", "latent_spread", "variety", "motion")


def command(*words: object) -> None:
    line = [sys.executable, "-m", "wandistiller", *map(str, words)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=environment())
    if done.returncode:
        sys.exit(f"{' '.join(line)}:\n{done.stderr[-3000:]}")


def passes(recipe: Path, flags: dict[str, Any]) -> float:
    """Return the forward passes for a sample of one step."""
    asked = passes_asked(read_job(read_run(str(recipe), flags), 1)).values()
    return sum(each.forward + 2 * each.backward for each in asked)


def figures(folder: Path, prompts: str, steps: int) -> list[str]:
    """Return `evaluate`'s figures of a student in its steps."""
    if not (file := folder / "evaluation.json").is_file():
        command("evaluate", "--student_path", folder, "--prompts", prompts, "--steps", steps)
    found = json.loads(file.read_text())
    student, ratio = found["student"], found["ratio"]
    cells = [f"{student[name]['count']} of {found['prompts']}" for name in FIGURES[:2]]
    return cells + [f"{ratio[name]['value']:.3f}" if name in ratio else "-" for name in FIGURES[2:]]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("ways", nargs="*", default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    made.add_argument("--world", choices=WORLDS, default="pictures")
    made.add_argument("--steps", type=int, default=4)
    made.add_argument("--updates", type=int, default=150)
    made.add_argument("--lr", type=float, default=3e-4)
    made.add_argument("--seeds", nargs="+", type=int, default=[0])
    made.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench_passes")
    given = made.parse_args()
    name, prompts = WORLDS[given.world]
    recipe = ROOT / "ds_configs" / "recipes" / f"{name}.json"
    of_teacher = [f"{name}, of the teacher's" for name in FIGURES[2:]]
    head("dmd2", "updates", "seed", "passes a step", "of the run", *FIGURES[:2], *of_teacher)
    for way in given.ways:
        for seed in given.seeds:
            file = "_".join(map(str, (name, given.steps, given.updates, seed, way)))
            output = given.folder / file.replace(", ", "_").replace(" ", "_").replace(":", "_")
            flags = {
                "objective": {"name": "dmd2", "steps": given.steps} | WAYS[way],
                "student_config": {"experts": "one"},
                "max_steps": given.updates,
                "lr": given.lr,
                "seed": seed,
                "output_dir": str(output),
                "cache_dir": str(given.folder / f"cache_{name}_{seed}"),
            }
            words = {key: json.dumps(v) if isinstance(v, dict) else v for key, v in flags.items()}
            command("train", "--recipe", recipe, *(w for key, v in words.items() for w in (f"--{key}", v)))
            made = passes(recipe, flags)
            number = f"{made:.3g}", f"{given.updates * made:.0f}"
            row(way, given.updates, seed, *number, *figures(output, prompts, given.steps))


if __name__ == "__main__":
    main()
