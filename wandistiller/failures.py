"""What the end of a run means to people: one message, an exit code, and word to the other ranks and to the launcher."""

import gc
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

from torch.distributed import DistError

from wandistiller import distributed
from wandistiller.advice import advice
from wandistiller.exhausted import Spent, is_out_of_memory, what_ran_out
from wandistiller.job import Job
from wandistiller.machine import memory_line
from wandistiller.phase import now
from wandistiller.problems import ConfigError, Problems, StorageError
from wandistiller.watch import Notice

OK, FAULT, WRONG_INPUT, OUT_OF_MEMORY, STORAGE, AGAIN = 0, 1, 2, 3, 74, 75
"""Exit codes; the last two are EX_IOERR and EX_TEMPFAIL of sysexits.h."""
CODES = {ConfigError: WRONG_INPUT, StorageError: STORAGE}
LOST_CONTACT = re.compile(r"connection (closed|reset|refused)|broken pipe|timed? ?out|gloo|nccl|socket", re.IGNORECASE)
"""What backends say when another rank is gone; some say it in a plain RuntimeError."""


class Failures:
    """Says why this rank fails, or why it follows another that did."""

    def __init__(self) -> None:
        self.job: Job | None = None
        """The run, once it is known: advice is computed for it."""

    def report(self, error: BaseException) -> int:
        """Tell people, the launcher and the other ranks; returns the exit code."""
        if isinstance(error, Problems):
            code, text = CODES[type(error)], "\n".join(f"error: {p}" for p in error.problems)
            spoken = text if distributed.rank() == 0 else ""  # the others found the same, or rank 0's watch says it
        elif is_out_of_memory(error):
            code, text = OUT_OF_MEMORY, self._memory(error)
            spoken = text
        elif isinstance(error, OSError):
            code, text = STORAGE, f"error: rank {distributed.rank()}, {now.what}: {_in_words(error)}"
            spoken = text
        elif _lost_contact(error) and (notice := distributed.who_failed()):
            code, text = notice.code, distributed.followed(notice)
            spoken = text
        else:
            code, text = FAULT, f"rank {distributed.rank()}, {now.what}: {type(error).__name__}: {error}"
            spoken = "".join(traceback.format_exception(error)) + text
        print(spoken, end="\n" if spoken else "", file=sys.stderr, flush=True)
        _tell_torchrun(text)
        distributed.leave(code, text)
        return code

    def explain(self, notice: Notice) -> str:
        """What this rank adds to its line when another has failed: the whole reason on rank 0, and how memory stands."""
        text = notice.text if distributed.rank() == 0 else notice.text.partition("\n")[0]
        if notice.code != OUT_OF_MEMORY:
            return text
        spent = Spent.DEVICE if distributed.device().type == "cuda" else Spent.HOST
        return "\n".join([text, memory_line(distributed.rank()), *self._advice(spent)])

    def _memory(self, error: BaseException) -> str:
        said = str(error).strip().partition("\n")[0]
        lines = [f"Out of memory on rank {distributed.rank()}, {now.what}: {said}"]
        spent = what_ran_out(error)
        while error is not None:  # let go of what the frames hold, or there is no room to say more
            error.__traceback__, error = None, error.__context__
        gc.collect()
        return "\n".join([*lines, memory_line(distributed.rank()), *self._advice(spent)])

    def _advice(self, spent: Spent) -> list[str]:
        """On rank 0, what would help."""
        if distributed.rank() or not self.job:
            return []
        return ["What helps, in order of cost:", *(f"  {line}" for line in advice(self.job, spent))]


def _lost_contact(error: BaseException) -> bool:
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and LOST_CONTACT.search(str(error)) is not None)


def _in_words(error: OSError) -> str:
    """What failed, where, and what to do."""
    where = f"{error.filename}: " if error.filename else ""
    return (f"{where}{error.strerror or error}. A disk is full, or a file or folder went away or was changed while the run used "
            "it. Mend that; the same command then goes on from the last checkpoint.")  # fmt: skip


def _tell_torchrun(text: str) -> None:
    """torchrun ends with what each rank leaves in this file, else with a line that says nothing."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"message": text, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
        try:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(json.dumps({"message": about}))
        except OSError:
            return  # it was said on stderr
