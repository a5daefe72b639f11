"""The log line and the entry of metrics.jsonl for each step."""

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from wandistiller.distributed.collectives import log0, rank
from wandistiller.distributed.progress import bar, clock, speed
from wandistiller.monitoring.memory_usage import Usage, in_gib, worst
from wandistiller.utils.files import atomic, flush
from wandistiller.utils.logging import log_to_file
from wandistiller.utils.system_memory import GIB


def finite_or_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite_or_none(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(value: Any, name: str = "") -> dict[str, float]:
    """Flatten a line of metrics for TensorBoard and the like: memory_gib/train/host_peak/rank_1."""
    if isinstance(value, dict):
        inner = {f"{name}/{key}" if name else key: v for key, v in value.items() if key != "step"}
    elif isinstance(value, list):
        inner = {f"{name}/rank_{i}": v for i, v in enumerate(value)}
    else:
        return {name: value} if type(value) in (int, float) and math.isfinite(value) else {}
    return {n: number for key, v in inner.items() for n, number in scalars(v, key).items()}


class MetricsLine(TypedDict, total=False):
    """A line of metrics.jsonl; all fields of StepResult are in it by name, these ones are read again."""

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    expert: str
    skipped: bool
    watched: dict[str, float | None]
    seconds: float
    memory_gib: dict[str, dict[str, list[float]]]
    """Phase -> kind of memory -> that of each rank."""


def read_lines(file: Path, last: float = math.inf) -> list[dict[str, Any]]:
    entries = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return [entry for entry in entries if entry["step"] <= last]


def _text(entries: Iterable[Mapping[str, object]]) -> str:
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


def append_line(file: Path, entry: Mapping[str, object]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(_text([entry]))


def write_lines(file: Path, entries: Iterable[Mapping[str, object]]) -> None:
    with atomic(file) as temporary:
        temporary.write_text(_text(entries), encoding="utf-8")


def keep_lines(file: Path, last: int) -> None:
    """Drop the lines of a file after step `last`, if there is one, on rank 0."""
    if rank() == 0 and file.is_file():
        write_lines(file, read_lines(file, last))


SAMPLES = "samples.jsonl"
"""File of the statistics of sampled latents."""
EACH = 10
"""Steps at the start of a run, or where it goes on, that each have a log line; then every tenth has."""


class Metrics:
    """metrics.jsonl with a line a step, on rank 0; a bar in a terminal, or log lines."""

    def __init__(self, file: Path, *, start: int, max_steps: int, global_batch: int):
        """Drop the lines after step `start` from the file; a resumed run writes them again."""
        self._file, self._max_steps, self._global_batch = file, max_steps, global_batch
        self._start, self._began, self._logged = start, time.monotonic(), (start, time.monotonic())
        self._bar = bar("train", max_steps, start)
        self._log = log0 if self._bar.disable else log_to_file
        if rank() == 0:
            write_lines(file, read_lines(file, start) if start else [])

    def step(
        self, step: int, values: MetricsLine, memory: dict[str, list[Usage]], seconds: float
    ) -> MetricsLine:
        """Record a finished optimizer step, counted from 1; return its line, non-finite numbers as null.

        Args:
            values: loss, grad_norm, lr and whatever else is logged of the step, by name.
            memory: of each rank, by phase; the step's own is that of `train`.
            seconds: that the step took.
        """
        left = (time.monotonic() - self._began) / (step - self._start) * (self._max_steps - step)
        entry = {
            "step": step,
            **values,
            "seconds": seconds,
            "samples_per_second": self._global_batch / seconds,
            "memory_gib": {phase: in_gib(ranks) for phase, ranks in memory.items()},
        }
        if rank() == 0:
            append_line(self._file, finite_or_none(entry))
        skipped = "SKIPPED  " if values.get("skipped") else ""
        pace = speed(self._global_batch, seconds, "sample")
        text = f"{skipped}loss {values['loss']:.5f}  lr {values['lr']:.2e}  {pace}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        if step == self._max_steps:
            self._bar.close()
        if skipped or step - self._start <= EACH or step % 10 == 0 or step == self._max_steps:
            (last, at), now = self._logged, time.monotonic()
            self._logged = step, now
            since = f"  {now - at:.1f} s since step {last}" if step > last + 1 else ""
            largest, most = worst(memory["train"])
            text = f"step {step}/{self._max_steps}  {text}  {most / GIB:.2f} GiB on rank {largest}"
            self._log(f"{text}  {clock(left)} left{since}")  # to the file alone where the bar is shown
        return entry

    def flush(self) -> None:
        if rank() == 0:
            flush(self._file)
