"""Runs killed at drawn moments and restarted until they end; for test_faults.py and bench/faults.py."""

import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from background_run import BackgroundRun, background_run
from killed import ADAPTERS, LOADING, PHASES, RESUMING, SAVE_EVERY, STAGES, STEPS, Kill, Launch, Line
from ranks import launcher, metrics, write_json
from recipes import ADAM, recipe
from safetensors import safe_open
from small_wan import make_wan

WITHOUT_KILL = 240.0
"""Seconds after which an undisturbed launch is given up."""
ORPHANS = 90.0
"""Seconds that ranks may take to end after their launcher."""

APART = ("cache/", "resolved/", "logs/", "metrics.jsonl", "memory.json", ".lock", "DONE")
"""Files of times, memory, folder names or metadata in any order; only their presence is compared."""
CLOCKS = ("seconds", "samples_per_second", "memory_gib")
"""Keys of metrics.jsonl that a clock or the machine's memory decides."""
ALARMS = "alarms.jsonl"
"""Of a slow rank, where a machine is busy."""


@dataclass
class Outcome:
    """A run that was killed and started again until it ended by itself."""

    launches: list[Launch] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Differences from the undisturbed run, and other failures."""

    def kills(self) -> list[tuple[str, int, float | None]]:
        """Return of each kill: its phase, finished steps that were repeated, seconds to the next new step."""
        outcomes = []
        for killed, *later in (self.launches[i:] for i in range(len(self.launches) - 1)):
            again = next((start for launch in later if (start := launch.resumed_from()) is not None), 0)
            restart = later[0].until_first_step()
            outcomes.append((killed.ended_in(), max(0, killed.reached() - again), restart))
        return outcomes


class Campaign:
    """Small runs of one recipe in `folder`, on one number of ranks, in one precision."""

    def __init__(
        self, folder: Path, ranks: int, precision: str, *, staged: bool = False, adapters: bool = False
    ):
        """Make the pipeline.

        Args:
            staged: the recipe has three stages, the last with a critic.
            adapters: student and critic are adapters on the teacher's own weights, which are streamed.
        """
        self.folder, self.ranks, self.precision = folder, ranks, precision
        self.staged, self.adapters = staged, adapters
        self.folder.mkdir(parents=True, exist_ok=True)
        self.timeline: list[Line] = []
        if not (folder / "wan").exists():
            make_wan(folder / ".wan", layers=3, heads=8)
            (folder / ".wan").rename(folder / "wan")

    @property
    def reference(self) -> Path:
        """The output of the undisturbed run."""
        return self.folder / "whole"

    def command(self, name: str) -> list[str]:
        """Return the command of the run whose output, with a cache of its own, is the folder `name`."""
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        engine = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
        engine |= {
            "optimizer": ADAM,
            "bf16": {"enabled": self.precision == "bf16"},
            "zero_optimization": zero,
            "activation_checkpointing": {"partition_activations": False},
        }
        settings = {
            "output_dir": str(self.folder / name),
            "cache_dir": str(self.folder / name / "cache"),
            "max_steps": STEPS,
            "save_every": SAVE_EVERY,
            "sample_every": 3,
            "keep_checkpoints": 2,
            "ema": 0.9,
            "deepspeed_config": engine,
            "sample_prompts": ["a red circle", "a blue square"],
            "log_level": "debug",
        }
        settings |= {"stages": STAGES} if self.staged else {}
        settings |= ADAPTERS if self.adapters else {}
        file = write_json(self.folder / f"{name}.json", recipe(self.folder, self.folder / "wan", **settings))
        words = launcher(self.ranks) if self.ranks > 1 else [sys.executable]
        return [*words, "-m", "wandistiller", "train", "--recipe", str(file)]

    def measure(self) -> None:
        """Make the reference, and read the times of its phases."""
        done = self.folder / "timeline.json"
        if not done.exists():
            shutil.rmtree(self.reference, ignore_errors=True)
            whole = launch(self.command("whole"), self.folder / "whole.log")
            if whole.code:
                raise RuntimeError("\n".join(line.text for line in whole.lines))
            write_json(done, whole.lines)
        self.timeline = [Line(*line) for line in json.loads(done.read_text())]

    def kill_in(self, phase: str, draw: random.Random) -> Kill:
        """Return a random moment within one of the reference's passages through a phase."""
        victim = draw.choice(["all"] if self.ranks == 1 else ["rank", "rank", "all", "launcher"])
        if phase == RESUMING:
            return Kill(LOADING, 1, draw.uniform(0, 0.3), victim)
        begin, end = PHASES[phase]
        moments = [i for i, line in enumerate(self.timeline) if re.search(begin, line.text)] if begin else [0]
        place = draw.choice(moments)
        began = self.timeline[place].at if begin else 0.0
        later = (line.at for line in self.timeline[place + 1 :] if re.search(end, line.text))
        words = re.escape(self.timeline[place].text) if begin else ""
        count = draw.randint(1, 2) if phase in ("forward", "backward") else 1
        return Kill(words, count, draw.uniform(0, next(later, began) - began), victim)

    def kill_anywhere(self, draw: random.Random) -> Kill:
        """Return a random moment of the whole run."""
        return Kill("", 1, draw.uniform(0, self.timeline[-1].at), draw.choice(["all", "rank"]))

    def run(
        self, name: str, kills: list[Kill], draw: random.Random, say: Callable[[str], None] = print
    ) -> Outcome:
        """Start, kill and restart a run, and compare its output with the reference."""
        outcome, kills = Outcome(), list(kills)
        while not (ended := outcome.launches and not outcome.launches[-1].hit):
            kill = kills.pop(0) if kills else None
            done = launch(self.command(name), self.folder / f"{name}.log", kill, draw)
            outcome.launches.append(done)
            end = f"killed in {done.ended_in()}" if done.hit else "ended"
            say(
                f"    {self.ranks} rank(s), {self.precision}: {end} after {done.seconds:.1f} s; "
                f"resumed from {done.resumed_from() or 0}, reached {done.reached()}"
            )
            if done.orphans:
                outcome.wrong.append(f"{done.orphans} orphans")
            if not done.hit and done.code:
                last = "\n".join(line.text for line in done.lines[-30:])
                outcome.wrong.append(f"exit code {done.code}: {last}")
        if ended and not outcome.wrong:
            runs = [f"{n}_{stage['name']}" for n, stage in enumerate(STAGES, 1)] if self.staged else ["."]
            outcome.wrong += [
                f"{run}: {wrong}"
                for run in runs
                for wrong in _differences(self.reference / run, self.folder / name / run)
            ]
        return outcome

    @property
    def phases(self) -> list[str]:
        """The phases that its runs have."""
        return [*(p for p in PHASES if self.staged or self.adapters or p != "critic's pass"), RESUMING]


def launch(
    words: list[str], log: Path, kill: Kill | None = None, draw: random.Random | None = None
) -> Launch:
    """Run a command until it ends or `kill` ends it; no process is left."""
    with background_run(words, log) as run:
        began, lines, due, matched = time.monotonic(), [], math.inf, 0
        seen, victims = None, []
        if kill and not kill.words:
            due = began + kill.delay
        follow = _new_lines(log)
        while (running := run.process.poll() is None) or (text := next(follow)):
            while text := next(follow):
                lines.append(Line(time.monotonic() - began, text))
                if kill and kill.words and due == math.inf and re.search(kill.words, text):
                    matched += 1
                    if matched == kill.count:
                        victims, due = _victims(run, kill.victim, draw), time.monotonic() + kill.delay
            if time.monotonic() >= due and seen is None and running:
                alive = [pid for pid in victims if pid in run.processes()]
                if _end(alive or _victims(run, kill.victim, draw)):
                    seen = len(lines)
            if seen is None and time.monotonic() - began > WITHOUT_KILL:
                raise TimeoutError(f"{words} did not end:\n{log.read_text()}")
            time.sleep(0.001)
        until = time.monotonic() + ORPHANS
        while (orphans := run.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        lines += [Line(time.monotonic() - began, text) for text in iter(lambda: next(follow), "")]
        code = run.process.returncode
        return Launch(code, lines, seen if code else None, len(orphans), time.monotonic() - began)


def _victims(run: BackgroundRun, victim: str, draw: random.Random) -> list[int]:
    """Return the processes to kill; all of them if the intended one has not started."""
    there = run.processes()
    program, starter = "-m wandistiller", "torch.distributed.run"
    ranks = [pid for pid, words in there.items() if program in words and starter not in words]
    if victim == "rank" and ranks:
        return [draw.choice(sorted(ranks))]
    if victim == "launcher" and run.process.pid in there:
        return [run.process.pid]
    return list(there)


def _end(pids: list[int]) -> bool:
    """Kill the processes; return whether any existed."""
    killed = []
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return bool(killed)


def _new_lines(log: Path) -> Iterator[str]:
    """Yield whole lines as they come; an empty one while there is none."""
    with log.open(errors="replace") as file:
        text = ""
        while True:
            text += file.readline()
            if text.endswith("\n"):
                if text.strip():
                    yield text.rstrip("\n")
                text = ""
            else:
                yield ""


def _differences(reference: Path, output: Path) -> list[str]:
    """Return the differences of an output folder from the undisturbed run's, in all bytes except times."""
    expected, actual = (
        {str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} - {ALARMS} for f in (reference, output)
    )
    for early, replaced in _early_checkpoints(reference, output):
        actual = {name for name in actual if not name.startswith(early)}
        expected = {name for name in expected if not name.startswith(replaced)}
    wrong = [f"{name} is missing" for name in sorted(expected - actual)]
    wrong += [f"{name} is too much" for name in sorted(actual - expected)]
    for name in sorted(expected & actual):
        if not name.startswith(APART) and not _equal(reference / name, output / name):
            wrong.append(f"{name} differs")
    lines, same = (
        [{k: v for k, v in line.items() if k not in CLOCKS} for line in metrics(f)]
        for f in (reference, output)
    )
    return wrong + ["metrics.jsonl differs"] * (lines != same)


def _equal(first: Path, second: Path) -> bool:
    """Compare the bytes of files; of LoRA files tensors and metadata, which safetensors puts in any order."""
    if not first.name.startswith("lora"):
        return first.read_bytes() == second.read_bytes()
    contents = []
    for file in (first, second):
        with safe_open(file, "pt") as opened:
            tensors = {key: opened.get_tensor(key).tolist() for key in opened.keys()}
            contents.append((opened.metadata(), tensors))
    return contents[0] == contents[1]


def _early_checkpoints(reference: Path, output: Path) -> Iterator[tuple[str, str]]:
    """Pair checkpoints that ranks without a launcher saved at once with those that they replaced."""
    expected, actual = (
        {f"checkpoints/{p.name}/" for p in (f / "checkpoints").glob("step_*")} for f in (reference, output)
    )
    return zip(sorted(actual - expected), sorted(expected - actual), strict=False)
