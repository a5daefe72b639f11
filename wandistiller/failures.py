"""What the end of a run means to people: one message, an exit code, and word to the other ranks and to the launcher."""

import gc
import re
import sys
import traceback

from torch.distributed import DistError

from wandistiller import distributed
from wandistiller.advice import advice
from wandistiller.exhausted import Spent, chain, is_out_of_memory, what_ran_out
from wandistiller.files import system_error
from wandistiller.job import Job
from wandistiller.logs import keep
from wandistiller.machine import memory_line
from wandistiller.phase import now
from wandistiller.problems import ConfigError, NonFinite, Problems, StorageError
from wandistiller.watch import Notice, tell_torchrun

OK, FAULT, WRONG_INPUT, OUT_OF_MEMORY, NOT_FINITE, STORAGE, AGAIN = 0, 1, 2, 3, 4, 74, 75
"""Exit codes; the last two are EX_IOERR and EX_TEMPFAIL of sysexits.h."""
CODES = {ConfigError: WRONG_INPUT, NonFinite: NOT_FINITE, StorageError: STORAGE}
LOST_CONTACT = re.compile(r"connection (closed|reset|refused)|broken pipe|timed? ?out|gloo|nccl|socket", re.IGNORECASE)
"""What backends say when another rank is gone; some say it in a plain RuntimeError."""


class Failures:
    """Says why this rank fails, or why it follows another that did."""

    def __init__(self) -> None:
        self.job: Job | None = None
        """The run, once it is known: advice is computed for it."""

    def report(self, error: BaseException) -> int:
        """Tell people, the launcher and the other ranks; returns the exit code."""
        for_file = ""
        if isinstance(error, Problems):
            code, text = CODES[type(error)], "\n".join(f"error: {p}" for p in error.problems)
            spoken = text if distributed.rank() == 0 else ""  # the others found the same, or rank 0's watch says it
            for_file = f"exit code {code}; the lines above that begin with `error:` say why"  # torchrun repeats each rank's
        elif is_out_of_memory(error):
            code, text, helps = OUT_OF_MEMORY, *self._memory(error)
            spoken = "\n".join([text, *helps]) if distributed.rank() == 0 else text
            for_file = "\n".join([text, *helps])
        elif refused := system_error(error):
            code, text = STORAGE, f"error: rank {distributed.rank()}, {now.what}: {_in_words(refused)}"
            spoken = text
        elif _lost_contact(error) and (notice := distributed.who_failed()):
            code, text = notice.code, distributed.followed(notice)
            spoken = text
        else:
            code, text = FAULT, f"rank {distributed.rank()}, {now.what}: {type(error).__name__}: {error}"
            spoken = "".join(traceback.format_exception(error)) + text
        print(spoken, end="\n" if spoken else "", file=sys.stderr, flush=True)
        keep(spoken if code == FAULT else text)
        tell_torchrun(for_file or text)
        distributed.leave(code, text)
        return code

    def explain(self, notice: Notice) -> str:
        """What this rank adds to its line when another has failed: the whole reason on rank 0, and how memory stands."""
        text = notice.text if distributed.rank() == 0 else notice.text.partition("\n")[0]
        if notice.code != OUT_OF_MEMORY:
            return text
        spent = Spent.DEVICE if distributed.device().type == "cuda" else Spent.HOST
        helps = self._advice(spent) if distributed.rank() == 0 else []
        return "\n".join([text, memory_line(distributed.rank()), *helps])

    def _memory(self, error: BaseException) -> tuple[str, list[str]]:
        """What ran out where and how memory stands, and what would help."""
        said = str(error).strip().partition("\n")[0]
        text = f"Out of memory on rank {distributed.rank()}, {now.what}: {said}"
        spent = what_ran_out(error)
        for held in chain(error):  # let go of what the frames hold, or there is no room to say more
            held.__traceback__ = None
        gc.collect()
        return f"{text}\n{memory_line(distributed.rank())}", self._advice(spent)

    def _advice(self, spent: Spent) -> list[str]:
        if not self.job:
            return []
        try:
            lines = advice(self.job, spent, preparing=now.phase == "prepare")
        except MemoryError:
            return ["There is no room left to work out what helps."]
        return ["What helps, in order of cost:", *(f"  {line}" for line in lines)]


def _lost_contact(error: BaseException) -> bool:
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and LOST_CONTACT.search(str(error)) is not None)


def _in_words(error: OSError) -> str:
    """What failed, where, and what to do."""
    where = f"{error.filename}: " if error.filename else ""
    return (f"{where}{error.strerror or error}. A disk is full, or a file or folder went away or was changed while the run used "
            "it. Mend that; the same command then goes on from the last checkpoint.")  # fmt: skip
