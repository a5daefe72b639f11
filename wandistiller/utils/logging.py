"""Logging to stderr and to each rank's file, results to stdout; the activity that messages name."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger("wandistiller")
_deepspeed = logging.getLogger("DeepSpeed")
_file_only = logging.getLogger("wandistiller.file")
_file_only.propagate = False
_file_only.setLevel(logging.DEBUG)
FORMAT = "%(asctime)s %(levelname)s %(message)s"
NOISE = {
    "DeepSpeed": ("before it has started", "Setting accelerator to CPU"),
    "torchao": ("Failed to load",),
    "torch.utils._pytree": ("is an Enum subclass",),
    "transformers.utils.import_utils": ("requires torchvision (not installed); falling back",),
    "diffusers.quantizers.torchao.torchao_quantizer": ("Unable to import `torchao` Tensor objects",),
}
"""Logger -> parts of its warnings in every run. deepspeed 0.19.8 reads its schedules' rate before the first
step, and there is no GPU, as `plan` and `doctor` say. Where torchao 0.18 is installed, diffusers 0.42.1
imports it: it has kernels for other GPUs and Pythons, and no longer all the names. transformers 5.23 reads
images without torchvision too."""


class _AboveBars(logging.StreamHandler):
    """Lines on stderr, above the progress bar if one is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # here, as it reads its environment when it is imported, which `main` sets

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)
        current.spoke = time.monotonic()


def setup_logging(level: str) -> None:
    """Log to stderr from `level` on; DeepSpeed's lines only from warning on, unless `level` is debug."""
    logging.basicConfig(format="%(message)s", force=True, handlers=[_AboveBars()])
    logging.root.handlers[0].setLevel(level.upper())
    log.setLevel(min(logging.INFO, getattr(logging, level.upper())))  # files get info too
    # deepspeed 0.19.8 writes to stdout, where results stand alone
    _deepspeed.handlers = [h for h in _deepspeed.handlers if isinstance(h, logging.FileHandler)]
    _deepspeed.propagate = True
    _deepspeed.setLevel(logging.INFO if level == "debug" else logging.WARNING)
    drop_noise()
    # deepspeed 0.19.8 calls deprecated functions
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def drop_noise() -> None:
    """Drop libraries' warnings that recur in every run; call it before they are imported too."""
    for name in NOISE:
        logging.getLogger(name).addFilter(_is_no_noise)  # once: adding a filter again has no effect


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not any(part in record.getMessage() for part in NOISE[record.name])


def write_result(text: str) -> None:
    """Write to stdout; a reader that has left, as `head` does, is no error."""
    from tqdm import tqdm  # as in `_AboveBars`

    try:
        with tqdm.external_write_mode(file=sys.stdout):
            print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    current.spoke = time.monotonic()


class _LogFile(logging.FileHandler):
    """A log file whose own errors are ignored: the run itself reports a disk that is full or gone."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error."""


def add_log_file(file: Path) -> None:
    """Append all later lines to `file` too, with the time; it replaces an earlier log file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(file, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter(FORMAT))
    for logger in (log, _deepspeed, _file_only):
        for old in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
            logger.removeHandler(old)
        logger.addHandler(handler)


def log_to_file(text: str) -> None:
    """Log to the file alone, if there is one."""
    if text and _file_only.handlers:  # without a handler Python would write to stderr
        _file_only.info("%s", text.encode(errors="backslashreplace").decode())


@dataclass(slots=True)
class Status:
    """The main thread's place in the run; only that thread writes, others may read."""

    activity: str = "starting"
    is_of_step: bool = False
    """True if the activity recurs in each training step."""
    began: float = field(default_factory=time.monotonic)
    """When the activity began, in seconds on the monotonic clock, which a change of the wall clock does not
    affect; as all times here."""
    spoke: float = field(default_factory=time.monotonic)
    """When the last line was logged to stderr."""
    phase: str = "start"
    """Among: start, prepare, load, train, checkpoint, draw, export."""
    heartbeats: int = 0
    step: int = 0
    """The training step that runs, counted from 1."""
    step_began: float = 0.0
    due: float = 0.0
    """When the step, or the unit of work, that runs is expected to end; 0 if that is not known."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent in each activity of the step that runs."""


current = Status()


def set_activity(name: str, *, of_step: bool = False) -> None:
    """Name what the main thread does; if it recurs in each step, it is too often for the log file."""
    current.activity, current.is_of_step, current.began = name, of_step, time.monotonic()
    heartbeat()
    log.debug("doing: %s", name)
    if not of_step:
        current.due = 0.0
        log_to_file(f"doing: {name}")


def heartbeat() -> None:
    """Show the watchdog progress within a long activity."""
    current.heartbeats += 1


def begin_step(step: int) -> None:
    """Begin training step `step`, counted from 1, with no time spent in it."""
    now, before = time.monotonic(), sum(current.seconds.values())
    current.due = now + before if before else 0.0
    current.step, current.step_began, current.seconds = step, now, {}


@contextmanager
def activity(name: str) -> Iterator[None]:
    """Name a part of the training step and add up its seconds. After an error the name stays."""
    set_activity(f"step {current.step}, {name}", of_step=True)
    began = time.perf_counter()
    yield
    current.seconds[name] = current.seconds.get(name, 0.0) + time.perf_counter() - began


def step_seconds() -> float:
    return time.monotonic() - current.step_began
