"""`wandistiller` with an address space limit on one rank.

Usage: limited.py RANK ROOM ACTIVITY train ...

The limit is the mapped memory plus ROOM MiB. It is set as soon as the activity of the rank
(wandistiller/utils/logging.py) contains these words. The kernel then refuses more to any library.
"""

import os
import resource
import sys
from pathlib import Path

from wandistiller.utils import logging


def limit_when(words: str, room: int) -> None:
    """Set the limit once, at an activity that contains `words`; call it before `set_activity` is imported."""
    set_activity, left = logging.set_activity, [room * 2**20]

    def doing(what: str, **how: bool) -> None:
        set_activity(what, **how)
        if words in what and left:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            allowed = pages * resource.getpagesize() + left.pop()
            resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))

    logging.set_activity = doing


if __name__ == "__main__":
    rank, room, activity, *words = sys.argv[1:]
    if os.environ.get("RANK", "0") == rank:
        limit_when(activity, int(room))
    import wandistiller.training.distil  # noqa: F401  what is imported is no part of the room
    from wandistiller.cli.main import main  # after the limit, as it takes `set_activity` by name

    sys.exit(main(words))
