"""Runs that are killed at drawn moments and started again until they end; for test_faults.py and bench/faults.py."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from live import Live, live
from ranks import launcher, write_json
from recipes import ADAM, recipe
from small_wan import make_wan

STEPS, SAVE_EVERY = 6, 2
WITHOUT_KILL = 240.0
"""Seconds after which an undisturbed launch is given up."""
ORPHANS = 90.0
"""Seconds that ranks may take to end after their launcher."""


class Phase(NamedTuple):
    """Lines of the debug log between which a process is in it; an empty first one is the start of the process."""

    begin: str
    end: str = "doing: "


PHASES = {
    "start-up": Phase("", "doing: checking the checkpoint"),
    "encoding the prompts": Phase("doing: (encoding|text)", "text: 1/1"),
    "loading the teacher": Phase("doing: (loading the teacher|tensors of)"),
    "rollouts": Phase("doing: latents from the teacher", r"latents from the teacher: (\d+)/\1,"),
    "building the student": Phase("doing: (building the student|measuring the student)"),
    "forward": Phase(r"doing: step \d+, the (teacher|student)'s forward pass"),
    "backward": Phase(r"doing: step \d+, the student's backward pass"),
    "optimizer's step": Phase(r"doing: (step \d+, the optimizer's step|finishing step \d+)"),
    "checkpoint write": Phase(r"doing: saving the checkpoint of step \d+"),
    "checkpoint publication": Phase(r"doing: saving the checkpoint of step \d+", r"saved \S*/step_\d+"),
    "drawing": Phase(r"doing: drawing pictures after step \d+", r"drew \S+"),
    "export": Phase("doing: exporting the student", r"metrics +\S+"),
}
RESUMING = "loading the checkpoint"
"""Happens only in a run that was cut before."""


class Kill(NamedTuple):
    """SIGKILL, so many seconds after the `count`-th line that ends in `words`, or after the start."""

    words: str
    count: int
    delay: float
    victim: str
    """"rank": one of them; "all": every process; "launcher"."""


class Line(NamedTuple):
    """What a run said, and when: seconds from its start."""

    at: float
    text: str


@dataclass
class Launch:
    """One process, or one launcher and its ranks, from start to end."""

    code: int
    lines: list[Line]
    seen: int | None
    """Lines before the kill; None if it ended by itself."""
    orphans: int
    """Processes that had to be killed after their launcher had ended."""
    seconds: float

    def resumed_from(self) -> int | None:
        """Finished steps at the start; None if it was killed before that could be seen."""
        if self.said("all .* steps are done"):
            return STEPS
        found = (re.search(rf"resumed .*: (\d+) of {STEPS} steps", line.text) for line in self.lines)
        return next((int(m[1]) for m in found if m), 0 if self.said(f"^step 1/{STEPS} ") else None)

    def reached(self) -> int:
        """The last step that it finished."""
        return max((int(m[1]) for line in self.lines if (m := re.match(rf"step (\d+)/{STEPS} ", line.text))), default=0)

    def until_first_step(self) -> float | None:
        """Seconds from the start to the end of the first new step."""
        return next((line.at for line in self.lines if re.match(rf"step \d+/{STEPS} ", line.text)), None)

    def said(self, pattern: str) -> bool:
        return any(re.search(pattern, line.text) for line in self.lines)

    @property
    def hit(self) -> bool:
        """Whether the kill came before the end."""
        return self.seen is not None

    def ended_in(self) -> str:
        """The phase in which it was killed, as its last words say."""
        lines = [line.text for line in self.lines[: self.seen]]
        doing = [text for text in lines if "doing: " in text]
        last, known = doing[-1] if doing else "", {name: p.begin for name, p in PHASES.items() if p.begin}
        found = next((name for name, begin in known.items() if re.search(begin, last)), "start-up")
        saving = [text.rpartition(" ")[2] for text in lines if re.search(known["checkpoint publication"], text)]
        if found not in ("checkpoint write", "export") and saving and f"step_{int(saving[-1]):08d}" not in _saved(lines):
            return "checkpoint publication"  # behind the main thread
        return RESUMING if re.search("doing: loading .*/checkpoints/", last) else found


def _saved(lines: list[str]) -> set[str]:
    """The names of the checkpoints that were published."""
    return {m[1] for text in lines if (m := re.search(r"^saved .*/(step_\d+)$", text))}


@dataclass
class Outcome:
    """A run that was killed and started again until it ended by itself."""

    launches: list[Launch] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """In what it differs from the run that nobody disturbed; what else went wrong."""

    def kills(self) -> list[tuple[str, int, float | None]]:
        """Of each: in which phase, how many finished steps were done again, seconds to the first new step after it."""
        found = []
        for killed, *later in (self.launches[i:] for i in range(len(self.launches) - 1)):
            again = next((start for launch in later if (start := launch.resumed_from()) is not None), 0)
            found.append((killed.ended_in(), max(0, killed.reached() - again), later[0].until_first_step()))
        return found


class Campaign:
    """Small runs of one recipe in `folder`, on one number of ranks, in one precision."""

    def __init__(self, folder: Path, ranks: int, precision: str):
        self.folder, self.ranks, self.precision = folder, ranks, precision
        self.folder.mkdir(parents=True, exist_ok=True)
        self.timeline: list[Line] = []
        if not (folder / "wan").exists():
            make_wan(folder / ".wan", layers=3, heads=8)
            (folder / ".wan").rename(folder / "wan")

    @property
    def reference(self) -> Path:
        """The output of the run that nobody disturbs."""
        return self.folder / "whole"

    def command(self, name: str) -> list[str]:
        """The run whose output, with a cache of its own, is the folder `name`."""
        engine = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "optimizer": ADAM,
                  "bf16": {"enabled": self.precision == "bf16"},
                  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}  # fmt: skip
        settings = {
            "output_dir": str(self.folder / name), "cache_dir": str(self.folder / name / "cache"), "max_steps": STEPS,
            "save_every": SAVE_EVERY, "sample_every": 3, "keep_checkpoints": 2, "ema": 0.9, "deepspeed_config": engine,
            "sample_prompts": ["a red circle", "a blue square"], "log_level": "debug",
        }  # fmt: skip
        file = write_json(self.folder / f"{name}.json", recipe(self.folder, self.folder / "wan", **settings))
        words = launcher(self.ranks) if self.ranks > 1 else [sys.executable]
        return [*words, "-m", "wandistiller", "train", "--recipe", str(file)]

    def measure(self) -> None:
        """Make the reference, and learn when what happens."""
        done = self.folder / "timeline.json"
        if not done.exists():
            shutil.rmtree(self.reference, ignore_errors=True)
            whole = launch(self.command("whole"), self.folder / "whole.log")
            if whole.code:
                raise RuntimeError("\n".join(line.text for line in whole.lines))
            write_json(done, whole.lines)
        self.timeline = [Line(*line) for line in json.loads(done.read_text())]

    def kill_in(self, phase: str, draw: random.Random) -> Kill:
        """A random moment within one of the times that the reference was in a phase."""
        victim = draw.choice(["all"] if self.ranks == 1 else ["rank", "rank", "all", "launcher"])
        if phase == RESUMING:
            return Kill("doing: loading .*/checkpoints/", 1, draw.uniform(0, 0.3), victim)
        begin, end = PHASES[phase]
        places = [i for i, line in enumerate(self.timeline) if re.search(begin, line.text)] if begin else [0]
        place = draw.choice(places)
        began = self.timeline[place].at if begin else 0.0
        later = (line.at for line in self.timeline[place + 1 :] if re.search(end, line.text))
        words = re.escape(self.timeline[place].text) if begin else ""
        return Kill(words, draw.randint(1, 2) if phase in ("forward", "backward") else 1,
                    draw.uniform(0, next(later, began) - began), victim)  # fmt: skip

    def kill_anywhere(self, draw: random.Random) -> Kill:
        """A random moment of the whole run."""
        return Kill("", 1, draw.uniform(0, self.timeline[-1].at), draw.choice(["all", "rank"]))

    def run(self, name: str, kills: list[Kill], draw: random.Random, say: Callable[[str], None] = print) -> Outcome:
        """Start, kill, start again, and compare what is there at the end with the reference."""
        outcome, kills = Outcome(), list(kills)
        while not (ended := outcome.launches and not outcome.launches[-1].hit):
            kill = kills.pop(0) if kills else None
            done = launch(self.command(name), self.folder / f"{name}.log", kill, draw)
            outcome.launches.append(done)
            say(f"    {self.ranks} rank(s), {self.precision}: {'killed in ' + done.ended_in() if done.hit else 'ended'} after "
                f"{done.seconds:.1f} s; went on from {done.resumed_from() or 0}, reached {done.reached()}")  # fmt: skip
            if done.orphans:
                outcome.wrong.append(f"{done.orphans} orphans")
            if not done.hit and done.code:
                outcome.wrong.append(f"exit code {done.code}: " + "\n".join(line.text for line in done.lines[-30:]))
        if ended and not outcome.wrong:
            outcome.wrong += differences(self.reference, self.folder / name)
        return outcome


def launch(words: list[str], log: Path, kill: Kill | None = None, draw: random.Random | None = None) -> Launch:
    """Run a command to its end, which `kill` may bring about; leaves no process behind."""
    with live(words, log) as run:
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
                if _end([pid for pid in victims if pid in run.processes()] or _victims(run, kill.victim, draw)):
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


def _victims(run: Live, victim: str, draw: random.Random) -> list[int]:
    """The processes that a kill is meant for; all, where the one that was meant is not there yet."""
    there = run.processes()
    ranks = [pid for pid, words in there.items() if "-m wandistiller" in words and "torch.distributed.run" not in words]
    if victim == "rank" and ranks:
        return [draw.choice(sorted(ranks))]
    if victim == "launcher" and run.process.pid in there:
        return [run.process.pid]
    return list(there)


def _end(pids: list[int]) -> bool:
    """Kill at once; whether any was there."""
    there = False
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            there = True
        except ProcessLookupError:
            continue
    return there


def _new_lines(log: Path) -> Iterator[str]:
    """Whole lines as they come; an empty one while there is none."""
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


APART = ("cache/", "resolved/", "logs/", "metrics.jsonl", "memory.json", ".lock", "DONE")
"""Files that hold times, memory or the folder's own name, or metadata in any order; only that they are there is compared."""
ALARMS = "alarms.jsonl"
"""Of a slow rank, where a machine is busy."""


def differences(reference: Path, output: Path) -> list[str]:
    """In what an output folder differs from that of the run that nobody disturbed; every byte counts but for times."""
    wanted, found = ({str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} - {ALARMS} for f in (reference, output))
    for extra, replaced in _between(reference, output).items():  # saved where it was, by ranks whose launcher was killed
        found = {name for name in found if not name.startswith(extra)}
        wanted = {name for name in wanted if not name.startswith(replaced)}
    wrong = [f"{name} is missing" for name in sorted(wanted - found)] + [f"{name} is too much" for name in sorted(found - wanted)]
    for name in sorted(wanted & found):
        if not name.startswith(APART) and (reference / name).read_bytes() != (output / name).read_bytes():
            wrong.append(f"{name} differs")
    if metrics(reference) != metrics(output):
        wrong.append("metrics.jsonl differs")
    if [row["step"] for row in metrics(output)] != list(range(1, STEPS + 1)):
        wrong.append(f"metrics.jsonl has the steps {[row['step'] for row in metrics(output)]}")
    return wrong


def _between(reference: Path, output: Path) -> dict[str, str]:
    """Checkpoints between two that are due, and the older one that each took the place of, as the number kept is fixed."""
    wanted, found = ({f"checkpoints/{p.name}/" for p in (f / "checkpoints").glob("step_*")} for f in (reference, output))
    return dict(zip(sorted(found - wanted), sorted(wanted - found), strict=False))


def metrics(output: Path) -> list[dict]:
    """The lines of metrics.jsonl, without what a clock or the machine's memory says."""
    clocks = ("seconds", "samples_per_second", "memory_gib")
    rows = (json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in clocks} for row in rows]
