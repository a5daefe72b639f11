"""Each rank's watch over the others: if one fails, dies or hangs, all end with its name and activity.

A thread next to the main one publishes this rank's activity in a store and reads the others'. It needs no
collective, so it works while the main threads wait in one.
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
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch.distributed import TCPStore

from wandistiller.distributed.shutdown import stopping
from wandistiller.utils import interrupts
from wandistiller.utils.logging import current, log_to_file, set_activity

HANG_SECONDS = 1800.0
"""Time without progress on any rank after which a run counts as hung; the recipe key `timeout` changes it."""
POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 2.0
GONE_SECONDS = 180.0
"""Time without a heartbeat from a rank's process after which it counts as dead, and not as suspended."""
GRACE_SECONDS = 5.0
"""Time for the other ranks to end by themselves after one has failed."""
FAULT, AGAIN = 1, 75


class FailureNotice(NamedTuple):
    """Why a rank ended before its work was done."""

    rank: int
    code: int
    """Exit code."""
    text: str


class Watchdog:
    """Publishes this rank's activity, and ends the process when another rank has failed."""

    def __init__(self, rank: int = 0, world: int = 1):
        self.rank, self.world, self.timeout = rank, world, HANG_SECONDS
        self._store: TCPStore | None = None
        self._missed: FailureNotice | None = None
        """Why this rank never joined the others."""
        self._unanswered = 0
        """Polls since the store, which is on rank 0, last answered."""
        self._ended, self._left = threading.Event(), threading.Event()
        self._own_notice: SimpleQueue[FailureNotice] = SimpleQueue()
        self._awake, self._polled = 0.0, time.monotonic()
        """Seconds in which this process was not suspended, and when they were last counted."""
        self._seen: dict[int, tuple[float, float]] = {}
        """Rank -> times of its last heartbeat and of its last progress, by `_awake`."""
        self._beats: dict[int, dict[str, Any]] = {}
        """Rank -> its last heartbeat."""
        self.failure_context: Callable[[FailureNotice], str] = lambda notice: (
            notice.text if rank == 0 else notice.text.partition("\n")[0]
        )
        """This rank's part of the message about another's failure."""

    def start(self) -> None:
        """Begin before the ranks know each other, or one whose launcher is gone would wait for ever."""
        threading.Thread(target=self._run, daemon=True).start()

    def join(self, store: TCPStore) -> None:
        """Connect to the other ranks; `store` is this thread's own connection."""
        self._store = store
        self._seen = dict.fromkeys(range(self.world), (self._awake, self._awake))  # one may be lost at once
        # both now: when memory has run out, no thread can be started
        for task in (self._watch, self._leave):
            threading.Thread(target=task, daemon=True).start()

    def miss(self, ranks: list[int], address: str) -> None:
        """Note which ranks are not where all meet; `who_failed` tells it."""
        seconds = time.monotonic() - self._polled
        text = (
            f"These of {self.world} ranks are not at {address} after {seconds:.0f} s: {listed(ranks)}. Their "
            "own last lines say why if they have failed; else their nodes have not started them, or do not "
            "reach that address and port."
        )
        self._missed = FailureNotice(ranks[0], FAULT, text)

    def stop(self) -> None:
        """End the watch: the work is done, and other ranks may end at any time."""
        self._ended.set()

    def announce_failure(self, code: int, text: str) -> None:
        """Publish this rank's failure; wait until the others have theirs, before a launcher kills them."""
        if self._store is None or self._ended.is_set():
            return
        self.stop()
        set_activity(f"leaving: {text.splitlines()[0] if text else ''}")
        self._own_notice.put(FailureNotice(self.rank, code, text))
        # to a host that is gone, TCP would try for a quarter of an hour
        self._left.wait(3 * GRACE_SECONDS)

    def _leave(self) -> None:
        """Publish this rank's failure, if it has one, and wait for the other ranks."""
        notice = self._own_notice.get()
        with suppress(RuntimeError):  # rank 0, which has the store, has ended already
            self._publish(notice)
            until = time.monotonic() + 2 * GRACE_SECONDS
            while self._store.add("left", 0) < self.world and time.monotonic() < until:
                time.sleep(0.05)
        self._left.set()

    def who_failed(self) -> FailureNotice | None:
        """Find the rank because of which a collective broke, as far as it can be known."""
        if self._store is None:
            return self._missed
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:
            try:
                if notice := self._first_notice():
                    return notice
                self._read_heartbeats()
            except RuntimeError:
                return self._lost(0)
            for rank, beat in self._beats.items():
                here = rank != self.rank and beat["host"] == platform.node()
                if here and interrupts.process_stat(beat["pid"])[0] == "Z":
                    return self._publish(self._lost(rank)) if self.rank == 0 else self._lost(rank)
            time.sleep(0.2)
        return None

    def _run(self) -> None:
        """Make the checks that do not wait for the store."""
        while not self._ended.wait(POLL_SECONDS):
            stopping.poll()
            if self._store is None:
                if self.world > 1 and stopping.reason:
                    text = f"Stopped before all ranks were there, by {stopping.reason}."
                    self._end(FailureNotice(self.rank, AGAIN, text))
                continue
            # polls, not seconds: a process that was itself suspended has received nothing for long either
            self._unanswered += 1
            if self._unanswered * POLL_SECONDS > GONE_SECONDS:
                self._end(self._lost(0))

    def _watch(self) -> None:
        """Exchange heartbeats. Calls to the store wait for ever if rank 0's host has vanished."""
        beaten = 0.0
        while not self._ended.wait(POLL_SECONDS):
            # the clock by which other ranks are judged; it stands still while this one is suspended
            now = time.monotonic()
            self._awake += min(now - self._polled, POLL_SECONDS + HEARTBEAT_SECONDS)
            self._polled = now
            try:
                if time.monotonic() - beaten >= HEARTBEAT_SECONDS:
                    beaten = time.monotonic()
                    beat = {"activity": current.activity, "progress": current.heartbeats, "at": beaten}
                    beat |= {"pid": os.getpid(), "host": platform.node(), "stops": stopping.reason}
                    self._store.set(f"beat/{self.rank}", json.dumps(beat))
                    self._read_heartbeats()
                notice = self._first_notice() or self._lost_or_hung()
                self._unanswered = 0
            except RuntimeError:  # the store is on rank 0
                notice = self._lost(0)
            if notice and not self._ended.wait(GRACE_SECONDS):
                self._end(notice)

    def _read_heartbeats(self) -> None:
        """Read all ranks' on rank 0; on the others rank 0's, which is enough to name it."""
        for rank in range(self.world) if self.rank == 0 else (0,):
            if not self._store.check([f"beat/{rank}"]):
                continue
            beat, last = json.loads(self._store.get(f"beat/{rank}")), self._beats.get(rank)
            now = self._awake
            if last is None or beat["at"] != last["at"]:
                advanced = last is None or beat["progress"] != last["progress"]
                self._seen[rank] = (now, now if advanced else self._seen[rank][1])
                self._beats[rank] = beat
            if beat["stops"]:  # so that a word comes from here if another rank alone was asked
                stopping.request_stop(beat["stops"])

    def _first_notice(self) -> FailureNotice | None:
        if self._store.add("left", 0) and self._store.check(["notice/1"]):
            return FailureNotice(*json.loads(self._store.get("notice/1")))
        return None

    def _lost_or_hung(self) -> FailureNotice | None:
        """On rank 0, find a rank without heartbeats, or the one least far when no rank makes progress."""
        if self.rank:
            return None
        now = self._awake
        for rank, (heartbeat, _) in self._seen.items():
            if now - heartbeat > GONE_SECONDS:
                return self._publish(self._lost(rank))
        if any(now - progress <= self.timeout for _, progress in self._seen.values()):
            return None
        behind = min(self._beats, key=lambda r: self._beats[r]["progress"])
        where = "; ".join(f"rank {r}: {b['activity']}" for r, b in sorted(self._beats.items())[:8])
        text = (
            f"Nothing has moved for {self.timeout:.0f} s; rank {behind} is furthest behind. {where}. "
            "`timeout` in the recipe is what the longest step may take."
        )
        return self._publish(FailureNotice(behind, FAULT, text))

    def _lost(self, rank: int) -> FailureNotice:
        beat = self._beats.get(rank)
        where = beat and f" (process {beat['pid']} on {beat['host']}), last heard of in: {beat['activity']}"
        text = (
            f"Rank {rank} is gone{where or ''}. Its own last lines say why, or its node's kernel log "
            "(`dmesg`), which names processes killed for memory."
        )
        return FailureNotice(rank, FAULT, text)

    def _publish(self, notice: FailureNotice) -> FailureNotice:
        self._store.set(f"notice/{self._store.add('left', 1)}", json.dumps(notice))
        return notice

    def _end(self, notice: FailureNotice) -> None:
        """End the process from this thread, since the main one waits."""
        text = self.message(notice)
        print(text, file=sys.stderr, flush=True)
        log_to_file(text)
        tell_torchrun(text)
        os._exit(notice.code)

    def message(self, notice: FailureNotice) -> str:
        context = notice.text
        with suppress(Exception):  # the context may run out of memory too
            context = self.failure_context(notice)
        return f"rank {self.rank}: stopped in: {current.activity}; because of rank {notice.rank}. {context}"


def listed(ranks: list[int]) -> str:
    """Write ranks in words, the first eight of many."""
    return ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)


def open_store(rank: int, world: int, host: str, port: int) -> TCPStore:
    """Open the store, which rank 0 has; there a `port` of 0 takes any free one."""
    return TCPStore(host, port, world, rank == 0, timedelta(seconds=GONE_SECONDS), wait_for_workers=False)


def tell_torchrun(text: str) -> None:
    """Write the file from which torchrun reads each rank's error; without it torchrun gives no reason."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        try:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(json.dumps({"message": message}))
        except OSError:
            return  # it is on stderr
