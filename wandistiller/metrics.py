"""What a person sees while it runs, and what a program reads afterwards."""

import json
import math
import time
from pathlib import Path
from typing import Any

from wandistiller.distributed import log0, rank
from wandistiller.files import atomic
from wandistiller.phase import alive, doing
from wandistiller.stream import flush
from wandistiller.usage import GIB, Usage, in_gib, worst


def clock(seconds: float) -> str:
    """Seconds as 1h02m, 3m07s or 12s."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if minutes else f"{s}s"


class Progress:
    """One line at most every few seconds: how far, how fast, how long still. Speaks on rank 0."""

    def __init__(self, what: str, total: int, every_seconds: float = 5.0):
        self._what, self._total, self._every = what, total, every_seconds
        self._done, self._started, self._spoke = 0, time.monotonic(), 0.0
        doing(what)

    def advance(self) -> None:
        alive()
        self._done += 1
        now = time.monotonic()
        if self._done == self._total or now - self._spoke >= self._every:
            self._spoke = now
            left = (now - self._started) / self._done * (self._total - self._done)
            log0("%s: %d/%d, %s left", self._what, self._done, self._total, clock(left))


def finite_or_none(value: Any) -> Any:
    """A JSON value with null for each number in it that is not finite."""
    if isinstance(value, dict):
        return {key: finite_or_none(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(value: Any, name: str = "") -> dict[str, float]:
    """The numbers of a line, and of what is in it, by names for TensorBoard and its like: memory_gib/train/host_peak/rank_1."""
    if isinstance(value, dict):
        inner = {f"{name}/{key}" if name else key: v for key, v in value.items() if key != "step"}
    elif isinstance(value, list):
        inner = {f"{name}/rank_{i}": v for i, v in enumerate(value)}
    else:
        return {name: value} if type(value) in (int, float) and math.isfinite(value) else {}
    return {n: number for key, v in inner.items() for n, number in scalars(v, key).items()}


def read_lines(file: Path, last: float = math.inf) -> list[dict[str, Any]]:
    """What a file of JSON lines holds up to step `last`; a line that a kill cut off, or that is being written, is left out."""
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [entry for entry in found if entry["step"] <= last]


def write_lines(file: Path, entries: list[dict[str, Any]]) -> None:
    """Write a file of JSON lines, atomically."""
    with atomic(file) as temporary:
        temporary.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries), encoding="utf-8")


class Metrics:
    """metrics.jsonl and the line a step. Only rank 0 writes."""

    def __init__(self, file: Path, *, start: int, max_steps: int, global_batch: int):
        """Lines of `start` and later, which a resumed run will write again, are dropped from the file."""
        self._file, self._max_steps, self._global_batch = file, max_steps, global_batch
        self._start, self._began, self._last = start, time.monotonic(), time.monotonic()
        if rank() == 0:
            write_lines(file, read_lines(file, start) if start else [])

    def step(self, step: int, *, loss: float, grad_norm: float | None, lr: float, memory: dict[str, list[Usage]],
             **more: Any) -> dict[str, Any]:  # fmt: skip
        """Record one finished optimizer step, counted from 1, and give its line; numbers that are not finite are null in JSON.

        Args:
            memory: of each rank, by phase; the step's own is that of `train`.
        """
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        left = (now - self._began) / (step - self._start) * (self._max_steps - step)
        entry = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "seconds": seconds,
                 "samples_per_second": self._global_batch / seconds,
                 "memory_gib": {phase: in_gib(ranks) for phase, ranks in memory.items()}, **more}  # fmt: skip
        if rank() == 0:
            with self._file.open("a") as out:
                out.write(json.dumps(finite_or_none(entry)) + "\n")
        holder, most = worst(memory["train"])
        log0("step %d/%d  %sloss %.5f  lr %.2e  %.1f samples/s  %.2f GiB on rank %d  %s left", step, self._max_steps,
             "SKIPPED  " if more.get("skipped") else "", loss, lr, self._global_batch / seconds, most / GIB, holder,
             clock(left))  # fmt: skip
        return entry

    def flush(self) -> None:
        """Have all lines on the disk, as a checkpoint that stands for them is about to be."""
        if rank() == 0:
            flush(self._file)

    def pause(self) -> None:
        """Forget the time since the last step: pictures and checkpoints are no training time."""
        self._last = time.monotonic()
