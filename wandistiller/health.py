"""Alarms in plain words: a loss that blows up or stands still; gradients, pictures, ranks, data not as they should be."""

import json
import logging
import math
from collections import deque
from pathlib import Path
from statistics import mean, median, median_low, stdev
from typing import Any, NamedTuple

from torch import Tensor

from wandistiller.distributed import log0, rank
from wandistiller.metrics import clock, read_lines, write_lines

SOON = 10
"""Steps of which a mean is taken where a single step says nothing."""
LONG = 200
"""Steps that are compared with as many before them."""
BLOWN_UP = 3.0
"""Times the least mean of SOON steps so far."""
STILL = 0.01
"""Share by which the loss falls within LONG steps, or stands still."""
LARGE, SMALL = 20.0, 1e-3
"""Times the usual gradient norm."""
SLOW, STARVED = 1.5, 0.2
"""Times that a rank takes for what the others do; share of a step that goes by with reading data."""
PACES = 5
"""Measurements of each rank's pace that are looked at together, SOON steps apart."""
PALE, GARISH, CLIPPED = 0.6, 1.6, 0.2
"""Student's contrast over the teacher's; share of clipped pixels above the teacher's."""
QUIET = 500
"""Steps in which an alarm of the same kind is not repeated."""
FILE = "alarms.jsonl"


class Spent(NamedTuple):
    """Seconds of a rank in a step."""

    data: float = 0.0
    """Reading the data."""
    pace: float = 0.0
    """For a fixed piece of work, as `pace.pace` has it; 0 where none was measured."""
    all: float = 0.0


class Look(NamedTuple):
    """What pictures are like, a mean over them."""

    contrast: float
    """Standard deviation of the pixels, which are in [0, 1]."""
    clipped: float
    """Share of pixels' channels at an end of the range."""


def look(images: list[Tensor]) -> Look:
    """Of image_CHW in [0, 1]."""
    contrast = mean(image_CHW.float().std().item() for image_CHW in images)
    clipped = mean(((image_CHW < 0.01) | (image_CHW > 0.99)).float().mean().item() for image_CHW in images)
    return Look(contrast, clipped)


class Health:
    """Sees every step and picture; speaks, and writes OUTPUT/alarms.jsonl, on rank 0."""

    def __init__(self, output: Path):
        self._file = output / FILE
        self._losses: deque[float] = deque(maxlen=2 * LONG)
        self._norms: deque[float] = deque(maxlen=LONG)
        self._spent: deque[list[Spent]] = deque(maxlen=SOON)
        self._paces: deque[list[float]] = deque(maxlen=PACES)
        self._least = (math.inf, 0)
        self._looks: dict[str, Look] = {}
        self._said: dict[str, int] = {}

    def go_on_from(self, start: int) -> None:
        """Drop the alarms after step `start`, which the run will come to again; those before it are not repeated soon."""
        kept = read_lines(self._file, start)
        self._said = {entry["kind"]: entry["step"] for entry in kept}
        if rank() == 0 and self._file.is_file():
            write_lines(self._file, kept)

    def step(self, step: int, loss: float, grad_norm: float | None, lr: float, spent: list[Spent]) -> None:
        """After optimizer step `step`; `spent` is of each rank."""
        self._spent.append(spent)
        if math.isfinite(loss):
            self._losses.append(loss)
            self._loss(step, lr)
        if grad_norm is not None:
            self._gradient(step, grad_norm)
            self._norms.append(grad_norm)
        if spent[0].pace:
            self._paces.append([s.pace for s in spent])
            self._pace(step)
        if len(self._spent) == SOON:
            self._time(step)

    def pictures(self, step: int, rows: dict[str, list[Tensor]]) -> None:
        """After pictures were drawn: the teacher's and the student's."""
        now = {name: look(images) for name, images in rows.items()}
        before, self._looks = self._looks, now
        if not {"teacher", "student"} <= before.keys() & now.keys():
            return
        teacher, student, earlier = now["teacher"], now["student"], before["student"]
        ratio = student.contrast / max(teacher.contrast, 1e-6)
        if ratio < PALE and student.contrast <= earlier.contrast or ratio > GARISH and student.contrast >= earlier.contrast:
            kind = "paler" if ratio < 1 else "more garish"
            self._alarm("contrast", step, f"The student's pictures are {kind} than the teacher's: {ratio:.2f} times the "
                        "contrast. Look at the samples; a lower learning rate, or `ema`, may help.")  # fmt: skip
        if student.clipped > teacher.clipped + CLIPPED and student.clipped >= earlier.clipped:
            self._alarm("clipped", step, f"{student.clipped:.0%} of the student's pixels are at an end of their range, "
                        f"{teacher.clipped:.0%} of the teacher's. Look at the samples; check guidance_scale.")  # fmt: skip

    def _loss(self, step: int, lr: float) -> None:
        losses = list(self._losses)
        now = mean(losses[-SOON:])
        least, at = self._least
        if len(losses) >= SOON and now < least:
            self._least = (now, step)
        elif now > BLOWN_UP * least:
            self._alarm("blow-up", step, f"The loss has grown to {now:.4g}, {now / least:.1f} times the {least:.4g} of step "
                        f"{at}. Try a lower learning rate or gradient_clipping, from an earlier checkpoint.")  # fmt: skip
        if len(losses) == 2 * LONG:
            first, last = losses[:LONG], losses[LONG:]
            noise = math.hypot(stdev(first), stdev(last)) / math.sqrt(LONG)
            if mean(first) - mean(last) < max(STILL * mean(first), noise) and mean(first) - mean(last) > -noise:
                self._alarm("plateau", step, f"The loss stands still: {mean(last):.4g} in the last {LONG} steps, "
                            f"{mean(first):.4g} in the {LONG} before, at a learning rate of {lr:.2g}.")  # fmt: skip

    def _gradient(self, step: int, norm: float) -> None:
        if len(self._norms) < LONG // 4:
            return
        usual = median(self._norms)
        if norm > LARGE * usual > 0:
            self._alarm("gradient", step, f"The gradient norm is {norm:.3g}, {norm / usual:.0f} times the usual "
                        f"{usual:.3g}. `gradient_clipping` in the student's JSON bounds such a step.")  # fmt: skip
        if norm < SMALL * usual:
            self._alarm("no gradient", step, f"The gradient norm is {norm:.3g}, usually {usual:.3g}: nothing is learned now.")

    def _pace(self, step: int) -> None:
        """Over the last measurements; one alone may fall into a moment of something else."""
        paces = [median(of_rank) for of_rank in zip(*self._paces, strict=True)]
        slowest, usual = max(paces), median_low(paces)
        if len(self._paces) == PACES and slowest > SLOW * usual:
            self._alarm("slow rank", step, f"Rank {paces.index(slowest)} takes {slowest / usual:.1f} times as long as the others "
                        "for the same work, and all wait for it. Look for other work on its node, or a hot GPU.")  # fmt: skip

    def _time(self, step: int) -> None:
        """Over the last SOON steps."""
        ranks = [Spent(*map(sum, zip(*steps, strict=True))) for steps in zip(*self._spent, strict=True)]
        whole = max(r.all for r in ranks)
        data = max(r.data for r in ranks)
        if data > STARVED * whole:
            self._alarm("data", step, f"{data / whole:.0%} of each step goes by with reading data, {clock(data / SOON)} a step. "
                        "Put --cache_dir on a faster disk, or one of the node's own.")  # fmt: skip

    def _alarm(self, kind: str, step: int, words: str) -> None:
        if step - self._said.get(kind, -QUIET) < QUIET:
            return
        self._said[kind] = step
        log0("ALARM     after step %d: %s", step, words, level=logging.WARNING)
        if rank() == 0:
            entry: dict[str, Any] = {"step": step, "kind": kind, "alarm": words}
            with self._file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(entry, ensure_ascii=False) + "\n")
