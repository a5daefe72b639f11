"""What a run says: plain lines for people on stderr, and all that a rank says in a file of its own, with the time."""

import logging
import warnings
from pathlib import Path

log = logging.getLogger("wandistiller")
THIRD = "DeepSpeed"
"""The logger of a library that says more than people want to read; it has a stream of its own."""
CHATTER = ("before it has started",)
"""Parts of what it warns of in every run (deepspeed 0.19.8: its schedules, asked for a rate before the first step)."""
FORMAT = "%(asctime)s %(levelname)s %(message)s"


def start(level: str) -> None:
    """Lines from `level` on to stderr, from info on to the file; those of third parties from warnings on, or all for debug."""
    logging.basicConfig(format="%(message)s", force=True)
    logging.root.handlers[0].setLevel(level.upper())
    log.setLevel(min(logging.INFO, getattr(logging, level.upper())))
    third = logging.getLogger(THIRD)
    third.setLevel(logging.INFO if level == "debug" else logging.WARNING)
    third.removeFilter(_wanted)
    third.addFilter(_wanted)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # deepspeed 0.19.8's calls


def _wanted(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in CHATTER)


class _File(logging.FileHandler):
    """A disk that is full or gone is said by the run itself."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing."""


def to_file(file: Path) -> None:
    """From here on, all of it goes to the end of `file` too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = _File(file, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter(FORMAT))
    for logger in (log, logging.getLogger(THIRD), _file_only):
        for old in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
            logger.removeHandler(old)
        logger.addHandler(handler)


_file_only = logging.getLogger("wandistiller.file")
_file_only.propagate = False
_file_only.setLevel(logging.DEBUG)


def keep(text: str) -> None:
    """To the file alone: what is said to people in another way, or not at all."""
    if text and _file_only.handlers:  # without, Python would put it on stderr
        _file_only.info("%s", text.encode(errors="backslashreplace").decode())
