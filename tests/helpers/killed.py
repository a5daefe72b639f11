"""Launches that are killed: their phases, the moment of a kill, and what their output says."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

STEPS, SAVE_EVERY = 6, 2
DMD2 = {"name": "dmd2", "steps": 2, "critic_updates": 1, "critic_lr": 2e-3}
STAGES = [
    {"name": "match"},
    {"name": "consistency", "objective": {"name": "consistency", "edges": 2}},
    {"name": "dmd2", "objective": DMD2},
]
"""Of a recipe in stages, each of STEPS steps."""
ADAPTERS = {
    "student_config": {},
    "lora": {"rank": 4},
    "objective": DMD2,
    "teacher_deepspeed_config": {"wandistiller": {"placement": "streamed"}},
}
"""Of a run of adapters on the teacher's own weights."""


class Phase(NamedTuple):
    """A part of a run, between two patterns of its debug log; an empty first one is the process's start."""

    begin: str
    end: str = "doing: "


PHASES = {
    "start-up": Phase("", "doing: checking the checkpoint"),
    "encoding the prompts": Phase("doing: (encoding|text)", "text: 1/1"),
    "loading the teacher": Phase("doing: loading the teacher"),
    "rollouts": Phase("doing: latents from the teacher", r"latents from the teacher: (\d+)/\1,"),
    "building the student": Phase("doing: (building the student|measuring the student)"),
    "forward": Phase(r"doing: step \d+, the (teacher|student)'s forward pass"),
    "backward": Phase(r"doing: step \d+, the student's backward pass"),
    "critic's pass": Phase(r"doing: step \d+, the (critic's (forward|backward) pass|student's sampling)"),
    "optimizer's step": Phase(r"doing: (step \d+, the optimizer's step|finishing step \d+)"),
    "checkpoint write": Phase(r"doing: saving the checkpoint of step \d+"),
    "checkpoint publication": Phase(r"doing: saving the checkpoint of step \d+", r"saved \S*/step_\d+"),
    "drawing": Phase(r"doing: drawing pictures after step \d+", r"drew \S+"),
    "export": Phase("doing: exporting the student", r"metrics +\S+"),
}
RESUMING, LOADING = "loading the checkpoint", "doing: loading .*/checkpoints/"
"""A phase that only a resumed run has, and its pattern."""


class Kill(NamedTuple):
    """SIGKILL, `delay` seconds after the `count`-th line that matches `words`, or after the start."""

    words: str
    count: int
    delay: float
    victim: str
    """Among: rank (a random one), all, launcher."""


class Line(NamedTuple):
    at: float
    """Seconds from the start."""
    text: str


@dataclass
class Launch:
    """One process, or one launcher and its ranks, from start to end."""

    code: int
    lines: list[Line]
    seen: int | None
    """Number of lines before the kill; None if it ended by itself."""
    orphans: int
    """Processes that had to be killed after their launcher had ended."""
    seconds: float

    def resumed_from(self) -> int | None:
        """Return the finished steps of all stages at the start; None if it was killed before that line."""
        last = None
        for what, done in self._moments():
            if what == "step":
                return done - 1
            last = done
        return last

    def reached(self) -> int:
        """Return the last finished step, counted over all stages."""
        return max((done for what, done in self._moments() if what == "step"), default=0)

    def _moments(self) -> Iterator[tuple[str, int]]:
        """Yield `step` or `resumed` and the finished steps of all stages, from the lines that say so."""
        before, names = 0, [stage["name"] for stage in STAGES]
        for line in self.lines:
            if m := re.match(r"stage +(\w+)$", line.text):
                before = STEPS * names.index(m[1])
            elif m := re.match(rf"step (\d+)/{STEPS} ", line.text):
                yield "step", before + int(m[1])
            elif m := re.search(rf"resumed .*: (\d+) of {STEPS} steps", line.text):
                yield "resumed", before + int(m[1])
            elif re.search("all .* steps are done", line.text):
                yield "resumed", before + STEPS

    def until_first_step(self) -> float | None:
        return next((line.at for line in self.lines if re.match(rf"step \d+/{STEPS} ", line.text)), None)

    def logged(self, pattern: str) -> bool:
        return any(re.search(pattern, line.text) for line in self.lines)

    @property
    def hit(self) -> bool:
        """True if the kill came before the end."""
        return self.seen is not None

    def ended_in(self) -> str:
        """Return the phase in which it was killed, by its last lines."""
        lines = [line.text for line in self.lines[: self.seen]]
        last = next((text for text in reversed(lines) if "doing: " in text), "")
        begins = ((name, phase.begin) for name, phase in PHASES.items() if phase.begin)
        phase = next((name for name, begin in begins if re.search(begin, last)), "start-up")
        saving = [
            m[1] for text in lines if (m := re.search(r"doing: saving the checkpoint of step (\d+)", text))
        ]
        saved = {int(m[1]) for text in lines if (m := re.search(r"^saved .*/step_(\d+)$", text))}
        if phase not in ("checkpoint write", "export") and saving and int(saving[-1]) not in saved:
            return "checkpoint publication"  # by another thread
        return RESUMING if re.search(LOADING, last) else phase
