"""`wandistiller` with an address space limit on one rank.

Usage: limited.py --rank 1 --room 64 [--at WORDS] -- train ...

The limit is the mapped memory when it is set plus `--room` MiB. It is set before the command starts or, with
`--at`, as soon as the activity of the rank (wandistiller/utils/logging.py) contains these words. The kernel
then refuses more to any library.
"""

import argparse
import os
import resource
import sys
from pathlib import Path

from wandistiller.utils import logging

MIB = 2**20


def mapped() -> int:
    """Bytes of address space that this process has."""
    pages, *_ = Path("/proc/self/statm").read_text().split()
    return int(pages) * resource.getpagesize()


def limit(room: int) -> None:
    """Leave this process `room` more MiB of address space."""
    allowed = mapped() + room * MIB
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    print(
        f"rank {os.environ.get('RANK', '0')} may map {room} MiB more than {mapped() // MIB}, "
        f"at: {logging.current.activity}",
        file=sys.stderr,
        flush=True,
    )


def limit_when(words: str, room: int) -> None:
    """Set the limit once, at an activity that contains `words`; call it before `set_activity` is imported."""
    set_activity, left = logging.set_activity, [room]

    def doing(what: str) -> None:
        set_activity(what)
        if words in what and left:
            limit(left.pop())

    logging.set_activity = doing


def main() -> int:
    own, command = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", default="0", help="the rank that is limited")
    parser.add_argument("--room", type=int, required=True, metavar="MIB")
    parser.add_argument("--at", metavar="WORDS")
    given = parser.parse_args(own)
    mine = os.environ.get("RANK", "0") == given.rank
    if mine and given.at:
        limit_when(given.at, given.room)
    import wandistiller.training.distil  # noqa: F401  what is imported is no part of the room
    from wandistiller.cli.main import main as run

    if mine and not given.at:
        limit(given.room)
    return run(command)


if __name__ == "__main__":
    sys.exit(main())
