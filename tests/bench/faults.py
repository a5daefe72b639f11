"""The fault campaign: runs killed at random moments and restarted, compared with an undisturbed one.

    python tests/bench/faults.py                             # 50 runs on one and two ranks, float32 and bf16
    python tests/bench/faults.py --staged --runs 20          # three stages, the last with a critic
    python tests/bench/faults.py --runs 8 --ranks 2 --folder DIR  # goes on from what DIR holds

Each run is killed with SIGKILL in a phase drawn in turn, some again at any moment: one rank, all of them, or
their launcher. Every byte of its output must be that of the undisturbed run, except for times.
Prints a line for each launch, then a table.
"""

import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from common import head, on_cpu, parser, row

on_cpu()

from faults import Campaign, Outcome
from killed import PHASES, RESUMING

AGAIN = (0.5, 0.3)
"""Chances of a second and of a third kill."""

CUT = "drawing"
"""A phase after the first checkpoint, for a run that is to be killed while it loads one."""


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--runs", type=int, default=50)
    made.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    made.add_argument("--precision", nargs="+", default=["float32", "bf16"], choices=("float32", "bf16"))
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--staged", action="store_true", help="a recipe of three stages: match, consistency, dmd2"
    )
    made.add_argument("--folder", type=Path, help="kept, with the outputs of the runs that went wrong")
    args = made.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        found = campaign(folder, args.runs, args.ranks, args.precision, args.seed, staged=args.staged)
    print_table(found)
    return int(any(row["wrong"] for row in found))


def campaign(
    folder: Path, runs: int, ranks: list[int], precisions: list[str], seed: int, *, staged: bool
) -> list[dict]:
    """Return the outcome of each run, {"kills", "wrong", ...}; runs found in `folder` are not repeated."""
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / f"results_{seed}.jsonl"
    found = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    kinds = list(itertools.product(ranks, precisions))
    phases = Campaign(folder / "phases", 1, "float32", staged=staged).phases
    made: dict[tuple[int, str], Campaign] = {}
    for number in range(len(found), runs):
        kind, phase = kinds[(number + number // len(phases)) % len(kinds)], phases[number % len(phases)]
        if kind not in made:
            made[kind] = Campaign(folder / f"{kind[1]}_{kind[0]}", *kind, staged=staged)
            made[kind].measure()
        print(f"run {number + 1} of {runs}: {phase}", flush=True)
        outcome = one(made[kind], f"{seed}_{number}", phase, random.Random(f"{seed} {number}"))
        for wrong in outcome.wrong:
            print(f"    WRONG: {wrong}", flush=True)
        found.append({"kills": outcome.kills(), "wrong": outcome.wrong, "kind": kind, "phase": phase})
        with results.open("a") as out:
            out.write(json.dumps(found[-1]) + "\n")
    return found


def one(small: Campaign, name: str, phase: str, draw: random.Random) -> Outcome:
    """A run that is killed in `phase`, and may be again; its folder is kept only if something went wrong."""
    while True:
        shutil.rmtree(small.folder / name, ignore_errors=True)
        kills = [small.kill_in(p, draw) for p in ((CUT, RESUMING) if phase == RESUMING else (phase,))]
        for chance in AGAIN:
            if draw.random() < chance:
                kills.append(small.kill_anywhere(draw))
        outcome = small.run(name, kills, draw, say=lambda text: print(text, flush=True))
        if outcome.kills() or outcome.wrong:
            break
        print("    it ended before the kill; once more", flush=True)
    if not outcome.wrong:
        shutil.rmtree(small.folder / name)
    return outcome


def print_table(found: list[dict]) -> None:
    """Print by phase: kills, runs that ended equal among those hit, most steps lost, seconds to resume."""
    heads = ["killed in", "faults", "runs hit", "of them equal", "most steps lost"]
    head(*heads, "s to first new step, median (worst)")
    for phase in [*PHASES, RESUMING, "all"]:
        hits = [(run, kill) for run in found for kill in run["kills"] if phase in (kill[0], "all")]
        if not hits:
            continue
        runs = {id(run): run for run, _ in hits}.values()
        seconds = [kill[2] for _, kill in hits if kill[2] is not None]
        times = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else "-"
        equal = sum(not run["wrong"] for run in runs)
        row(phase, len(hits), len(runs), equal, max(kill[1] for _, kill in hits), times)


if __name__ == "__main__":
    sys.exit(main())
