"""Alarms: a loss that diverges, unusual gradients, pictures unlike the teacher's, slow data."""

import logging
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple

from wandistiller.distributed.collectives import log0, rank
from wandistiller.experts import Expert
from wandistiller.monitoring.health_checks import HealthChecks, SampleStats
from wandistiller.monitoring.metrics import MetricsLine, append_line, keep_lines, read_lines
from wandistiller.objectives.base import Limit

SHORT_WINDOW = 10
"""Steps of a mean that smooths single steps."""
LONG_WINDOW = 200
"""Steps that the last ones are compared with; twice as many losses."""
BLOWN_UP = 3.0
"""Times the least mean of SHORT_WINDOW steps so far, by more than two standard errors of the mean."""
UNUSUAL = 1.5
"""Times the mean of recent steps: a noisy loss, as of consistency, has low and high means by chance."""
LARGE, SMALL = 20.0, 1e-3
"""Times the usual gradient norm."""
STARVED = 0.2
"""Share of a step spent reading data."""
WAITING = 10
"""Means of SHORT_WINDOW steps that all must be above it: a machine that others use too is slow at times."""
REPEAT_AFTER = 500
"""Steps before an alarm of the same kind is repeated."""
FILE = "alarms.jsonl"


class Seconds(NamedTuple):
    """Seconds that one rank spent in a step."""

    data: float
    """Reading the data."""
    step: float
    """All micro-steps."""


class _Curve:
    """Losses and gradient norms of the steps of one expert, whose scale is not the other's."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=2 * LONG_WINDOW)
        self.norms: deque[float] = deque(maxlen=LONG_WINDOW)
        self.least = (math.inf, 0)
        """Least mean of SHORT_WINDOW losses so far, and its step."""

    def add_loss(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        if len(self.losses) >= SHORT_WINDOW:
            self.least = min(self.least, (mean(list(self.losses)[-SHORT_WINDOW:]), step))


class Alarms:
    """Check every step and picture; log alarms and append them to OUTPUT/alarms.jsonl, on rank 0."""

    def __init__(self, output: Path, limits: Sequence[Limit] = ()):
        """`limits` are those of the objective's numbers."""
        self._file = output / FILE
        self._curves: defaultdict[str, _Curve] = defaultdict(_Curve)
        """By expert."""
        self._slowest: deque[Seconds] = deque(maxlen=WAITING * SHORT_WINDOW)
        self._raised: dict[tuple[str, str], int] = {}
        """The step of the last alarm, by kind and expert."""
        self._checks = HealthChecks(limits)

    def go_on_from(self, start: int, lines: list[MetricsLine]) -> None:
        """Drop the alarms after step `start`, which is repeated; go on as if the run had not stopped.

        Times and pictures are compared anew: they may be those of another machine.

        Args:
            lines: the run's, of metrics.jsonl up to there.
        """
        for line in lines:
            curve, loss, norm = self._curves[line.get("expert", "")], line.get("loss"), line.get("grad_norm")
            if loss is not None:
                curve.add_loss(line["step"], loss)
            if norm is not None:
                curve.norms.append(norm)
        self._checks.go_on_from(lines)
        raised = read_lines(self._file, start)
        self._raised = {(line["kind"], line.get("expert", "")): line["step"] for line in raised}
        keep_lines(self._file, start)

    def step(
        self,
        step: int,
        loss: float,
        grad_norm: float | None,
        seconds: list[Seconds],
        watched: dict[str, float] | None = None,
        expert: str = "",
    ) -> None:
        """Check optimizer step `step`, counted from 1.

        Args:
            seconds: of each rank.
            watched: numbers of an objective that has some.
            expert: whose step it is; it is compared with the steps of the same.
        """
        self._slowest.append(Seconds(*map(max, zip(*seconds, strict=True))))
        curve = self._curves[expert]
        if math.isfinite(loss):
            curve.add_loss(step, loss)
            self._loss(step, curve, expert)
        if grad_norm is not None:
            self._gradient(step, curve.norms, expert, grad_norm)
            curve.norms.append(grad_norm)
        if len(self._slowest) == self._slowest.maxlen and step % SHORT_WINDOW == 0:
            self._time(step)
        for kind, text in self._checks.step(step, watched or {}, grad_norm):
            self._alarm(kind, step, text)

    def samples(self, step: int, teacher: SampleStats, student: SampleStats) -> None:
        for kind, text in self._checks.samples(teacher, student):
            self._alarm(kind, step, text)

    def _loss(self, step: int, curve: _Curve, expert: str) -> None:
        losses, (least, at), whose = list(curve.losses), curve.least, self._of(expert)
        if len(losses) < SHORT_WINDOW:
            return
        now = mean(losses[-SHORT_WINDOW:])
        error = stdev(losses[-SHORT_WINDOW:]) / math.sqrt(SHORT_WINDOW)
        if now - 2 * error > BLOWN_UP * least and now > UNUSUAL * mean(losses):
            remedy = "Try a lower learning rate or gradient_clipping, from an earlier checkpoint."
            text = f"The loss{whose} has grown to {now:.4g}, {now / least:.1f} times the {least:.4g}"
            self._alarm("blow-up", step, f"{text} of step {at}. {remedy}", expert)

    def _gradient(self, step: int, norms: deque[float], expert: str, norm: float) -> None:
        if len(norms) < LONG_WINDOW // 4:
            return
        usual, whose = median(norms), self._of(expert)
        if norm > LARGE * usual > 0:
            remedy = "`gradient_clipping` in the student's JSON bounds such a step."
            text = f"The gradient norm{whose} is {norm:.3g}, {norm / usual:.0f} times the usual {usual:.3g}."
            self._alarm("gradient", step, f"{text} {remedy}", expert)
        if norm < SMALL * usual:
            text = f"The gradient norm{whose} is {norm:.3g}, usually {usual:.3g}: nothing is learned now."
            self._alarm("no gradient", step, text, expert)

    def _of(self, expert: str) -> str:
        """Return whose curve it is, in words, if there are two."""
        return f" of the {Expert(expert).in_words}" if len(self._curves) > 1 else ""

    def _time(self, step: int) -> None:
        """Compare the time for reading data with all of it, in each of the last SHORT_WINDOWs.

        Each step takes as long as its slowest rank, for which the others wait.
        """
        slowest = list(self._slowest)
        windows = [slowest[i : i + SHORT_WINDOW] for i in range(0, len(slowest), SHORT_WINDOW)]
        sums = [Seconds(*map(sum, zip(*window, strict=True))) for window in windows]
        if all(seconds.data > STARVED * seconds.step for seconds in sums):
            data, whole = map(sum, zip(*sums, strict=True))
            remedy = "Put --cache_dir on a faster disk, or one of the node's own."
            text = f"{data / whole:.0%} of each step is spent reading data"
            self._alarm("data", step, f"{text}, {data / len(slowest):.2g} s a step. {remedy}")

    def _alarm(self, kind: str, step: int, text: str, expert: str = "") -> None:
        """Log and append an alarm, unless one of its kind, of the same expert, was raised lately."""
        if step - self._raised.get((kind, expert), -REPEAT_AFTER) < REPEAT_AFTER:
            return
        self._raised[kind, expert] = step
        log0("ALARM     after step %d: %s", step, text, level=logging.WARNING)
        if rank() == 0:
            whose = {"expert": expert} if expert else {}
            append_line(self._file, {"step": step, "kind": kind, "alarm": text} | whose)
