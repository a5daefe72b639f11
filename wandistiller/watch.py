"""Each rank's watch over the others: a rank that fails, dies or hangs ends all of them, and is named with what it was doing.

A thread beside the main one tells the others what its rank is doing, over a store of its own, and looks for theirs. It needs
no collective, so it works while the main threads wait in one.
"""

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore

from wandistiller.logs import keep
from wandistiller.phase import doing, now
from wandistiller.stopping import stopping

LOOK_SECONDS = 1.0
BEAT_SECONDS = 2.0
LOST_SECONDS = 60.0
"""Without a sign of a rank's process for so long, it is taken for dead."""
LEAVE_SECONDS = 5.0
"""What the other ranks have to leave by themselves after one has failed."""
FAULT, AGAIN = 1, 75


class Notice(NamedTuple):
    """Why a rank left before its work was done."""

    rank: int
    code: int
    """Exit code."""
    text: str


class Watch:
    """Tells what this rank is doing, and ends it when another has failed."""

    def __init__(self, rank: int, world: int, timeout: float):
        """`timeout`: seconds without any sign of life from any rank's main thread after which the run is taken for hung."""
        self.rank, self.world, self.timeout = rank, world, timeout
        self._store: TCPStore | None = None
        self._unanswered = 0
        """Looks since the store, which is on rank 0, last answered."""
        self._ended = threading.Event()
        self._heard: dict[int, tuple[int, float]] = {}
        self._beats: dict[int, dict[str, Any]] = {}
        self.explain: Callable[[Notice], str] = lambda notice: notice.text if rank == 0 else notice.text.partition("\n")[0]
        """What this rank says of another's failure."""

    def start(self) -> None:
        """Begin, before the ranks know each other: one whose launcher is gone would wait for the others for ever."""
        threading.Thread(target=self._run, daemon=True).start()

    def join(self, store: TCPStore) -> None:
        """All ranks are there; `store` is this thread's own way to what they say."""
        self._store = store
        threading.Thread(target=self._talk, daemon=True).start()

    def stop(self) -> None:
        """The work is done; the others may leave as they like."""
        self._ended.set()

    def leave(self, code: int, text: str) -> None:
        """Tell the others that this rank leaves, and let them say so before a launcher ends them. No collective.

        A rank that is gone has been counted by rank 0 when it said so.
        """
        if self._store is None or self._ended.is_set():
            return
        self.stop()
        doing(f"leaving: {text.splitlines()[0] if text else ''}")
        telling = threading.Thread(target=self._say_that_it_leaves, args=(Notice(self.rank, code, text),), daemon=True)
        telling.start()
        telling.join(3 * LEAVE_SECONDS)  # a host that is gone answers nothing, and TCP waits for a quarter of an hour

    def _say_that_it_leaves(self, notice: Notice) -> None:
        try:
            self._tell(notice)
            until = time.monotonic() + 2 * LEAVE_SECONDS
            while self._store.add("left", 0) < self.world and time.monotonic() < until:
                time.sleep(0.05)
        except RuntimeError:
            return  # rank 0, which keeps the store, has left already

    def who_failed(self) -> Notice | None:
        """After a collective broke: the rank because of which, as far as it can be known."""
        if self._store is None:
            return None
        until = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < until:
            try:
                if notice := self._first_notice():
                    return notice
                self._listen()
            except RuntimeError:
                return self._lost(0)
            for rank, beat in self._beats.items():
                if rank != self.rank and beat["host"] == platform.node() and not is_alive(beat["pid"]):
                    return self._tell(self._lost(rank)) if self.rank == 0 else self._lost(rank)
            time.sleep(0.2)
        return None

    def _run(self) -> None:
        """What needs no other rank, and so is never kept waiting."""
        while not self._ended.wait(LOOK_SECONDS):
            stopping.look()
            if self._store is None:
                if self.world > 1 and stopping.reason:
                    self._end(Notice(self.rank, AGAIN, f"Stopped before all ranks were there, by {stopping.reason}."))
                continue
            self._unanswered += 1  # looks, not seconds: a process that was itself held up has not heard for long either
            if self._unanswered * LOOK_SECONDS > LOST_SECONDS:
                self._end(self._lost(0))

    def _talk(self) -> None:
        """Say and hear how it stands; a call waits for ever if rank 0's host is gone without a word."""
        beaten = 0.0
        while not self._ended.wait(LOOK_SECONDS):
            try:
                if time.monotonic() - beaten >= BEAT_SECONDS:
                    beaten = time.monotonic()
                    self._beat()
                    self._listen()
                notice = self._first_notice() or self._missing()
                self._unanswered = 0
            except RuntimeError:  # the store is on rank 0
                notice = self._lost(0)
            if notice and not self._ended.wait(LEAVE_SECONDS):
                self._end(notice)

    def _beat(self) -> None:
        mine = {"what": now.what, "moves": now.moves, "pid": os.getpid(), "host": platform.node(), "at": time.monotonic()}
        self._store.set(f"beat/{self.rank}", json.dumps(mine))

    def _listen(self) -> None:
        """Hear what the others say; rank 0 hears all, the others rank 0, which is enough to name it."""
        for rank in range(self.world) if self.rank == 0 else (0,):
            if self._store.check([f"beat/{rank}"]):
                beat = json.loads(self._store.get(f"beat/{rank}"))
                if rank not in self._beats or beat["at"] != self._beats[rank]["at"]:
                    moved = rank not in self._heard or beat["moves"] != self._beats[rank]["moves"]
                    self._heard[rank] = (time.monotonic(), time.monotonic() if moved else self._heard[rank][1])
                    self._beats[rank] = beat

    def _first_notice(self) -> Notice | None:
        if self._store.add("left", 0) and self._store.check(["notice/1"]):
            return Notice(*json.loads(self._store.get("notice/1")))
        return None

    def _missing(self) -> Notice | None:
        """On rank 0: a rank whose process is silent, or that no main thread has moved for too long."""
        if self.rank or len(self._heard) < self.world:
            return None
        clock = time.monotonic()
        for rank, (heard, _) in self._heard.items():
            if clock - heard > LOST_SECONDS:
                return self._tell(self._lost(rank))
        if all(clock - moved > self.timeout for _, moved in self._heard.values()):
            behind = min(self._beats, key=lambda r: self._beats[r]["moves"])
            where = "; ".join(f"rank {r}: {b['what']}" for r, b in sorted(self._beats.items())[:8])
            return self._tell(Notice(behind, FAULT, f"Nothing has moved for {self.timeout:.0f} s; rank {behind} is the least "
                                     f"far. {where}. `timeout` in the recipe is what the longest step may take."))  # fmt: skip
        return None

    def _lost(self, rank: int) -> Notice:
        beat = self._beats.get(rank)
        where = f" (process {beat['pid']} on {beat['host']}), last heard of in: {beat['what']}" if beat else ""
        return Notice(rank, FAULT, f"Rank {rank} is gone{where}. Its own last lines say why, or its node's kernel log "
                      "(`dmesg`), which names processes killed for memory.")  # fmt: skip

    def _tell(self, notice: Notice) -> Notice:
        self._store.set(f"notice/{self._store.add('left', 1)}", json.dumps(notice))
        return notice

    def _end(self, notice: Notice) -> None:
        """Leave from beside a main thread that cannot."""
        text = f"rank {self.rank}: stopped in: {now.what}; because of rank {notice.rank}. {notice.text}"
        with suppress(Exception):  # what is added may find no memory either
            text = self.followed(notice)
        print(text, file=sys.stderr, flush=True)
        keep(text)
        tell_torchrun(text)
        os._exit(notice.code)

    def followed(self, notice: Notice) -> str:
        """That this rank ends because another does."""
        return f"rank {self.rank}: stopped in: {now.what}; because of rank {notice.rank}. {self.explain(notice)}"


def is_alive(pid: int) -> bool:
    """Whether a process of this machine still runs; one that its parent has not yet buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def open_store(rank: int, world: int, host: str, port: int) -> TCPStore:
    """Rank 0 keeps it, at any free port if `port` is 0."""
    return TCPStore(host, port, world, rank == 0, timedelta(seconds=LOST_SECONDS), wait_for_workers=False)


def tell_torchrun(text: str) -> None:
    """torchrun ends with what each rank leaves in this file, else with a line that says nothing."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        try:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(json.dumps({"message": about}))
        except OSError:
            return  # it was said on stderr
