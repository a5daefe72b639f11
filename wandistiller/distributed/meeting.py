"""The meeting of all ranks at the start, before a backend connects them."""

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed import Store, TCPStore

from wandistiller.distributed.watchdog import GRACE_SECONDS, Watchdog, listed
from wandistiller.utils.logging import log

MEETING_TIMEOUT = timedelta(minutes=30)
"""Time in which all ranks must come, from rank 0's on: one that fails before that cannot tell the others."""
CONNECT_TIMEOUT = timedelta(seconds=30)
"""Time for a store that listens to take one more rank."""
SAID_AFTER = 5.0
"""Seconds of waiting for other ranks after which they are named."""


class Meeting:
    """The place where ranks wait for each other, in Python: no signal reaches torch's waiting (2.13)."""

    def __init__(self, watchdog: Watchdog):
        self.rank, self.world, self._watchdog = watchdog.rank, watchdog.world, watchdog
        self.host, self.port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.address = f"{self.host}:{self.port}"

    def attend(self) -> Store:
        """Wait for all ranks; return the store in which they do. Collective.

        Raises:
            DistError: not all have come in time; the watchdog knows which.
        """
        store, absent = None, [0]
        try:
            store = self._open_store()
            met = dist.PrefixStore("met", store)
            missing = partial(self._missing, met)
            met.set(f"{self.rank}", "")
            if self.rank == 0:  # which decides for all
                self._wait(lambda: not missing(), MEETING_TIMEOUT, missing)
                met.set("absent", json.dumps(missing()))
            if self._wait(lambda: met.check(["absent"]), 2 * MEETING_TIMEOUT, missing):
                absent = json.loads(met.get("absent"))
            if absent:
                raise dist.DistStoreError("not all ranks have come")
        except dist.DistError:
            if store or self.rank:
                self._watchdog.miss(absent, self.address)
            time.sleep(GRACE_SECONDS * (self.rank == 0))  # the others read from here
            raise
        return store

    def _missing(self, met: Store) -> list[int]:
        ranks = range(self.world)
        return [] if met.check([f"{r}" for r in ranks]) else [r for r in ranks if not met.check([f"{r}"])]

    def _wait(self, is_done: Callable[[], bool], most: timedelta, missing: Callable[[], list[int]]) -> bool:
        """Ask until it is done, and return whether it is in time; one rank of each node names the missing."""
        began, said = time.monotonic(), False
        while not is_done():
            waited = time.monotonic() - began
            if waited > most.total_seconds():
                return False
            if waited > SAID_AFTER and not said and (ranks := missing()):
                said = True
                if os.environ.get("LOCAL_RANK", "0") == "0" and (self.rank == 0 or 0 in ranks):
                    text = "waiting for these of %d ranks: %s. They are not at %s yet; Ctrl-C ends this"
                    log.warning(text, self.world, listed(ranks), self.address)
            time.sleep(0.1)
        return True

    def _open_store(self) -> Store:
        """Open the store at the address that the launcher gives; it is on rank 0, or in torchrun."""
        is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_own = self.rank == 0 and not is_torchruns
        if not is_own:  # torchrun's listens before it starts ranks: where it does not, torchrun was killed
            self._wait(self._answers, CONNECT_TIMEOUT if is_torchruns else MEETING_TIMEOUT, lambda: [0])
        place = self.host, self.port, self.world, is_own, CONNECT_TIMEOUT
        store = TCPStore(*place, wait_for_workers=False, multi_tenant=True)
        os.environ["MASTER_PORT"] = f"{store.port}"
        # torchrun's keeps what ranks wrote before `--max_restarts` started them again (torch 2.13)
        return dist.PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection((self.host, self.port), timeout=1):
            return True
        return False
