"""A client of an NFS server with default mount options, in this process: it remembers what was not there.

A name that it did not find stays away for half a minute, here for good, until this client opens the folder in
which it is, or makes it itself, if only to hear that it is there. Source: nfs(5), `lookupcache`; Linux,
fs/nfs/dir.c, `nfs_neg_need_reval`, and `nfs_lookup_verify_inode`, which asks anew about what is opened.
"""

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


class _Client:
    """What a client does with the path of a system call; further arguments are those after the path."""

    def __init__(self, root: Path):
        self.root, self.away, self.lstat = root, set(), os.lstat

    def see(self, path: Path, *_: Any, **__: Any) -> None:
        """Look for each folder on the way to `path`, then for that."""
        for part in (*reversed(path.parents), path):
            if self.root in part.parents:
                if part not in self.away:
                    try:
                        self.lstat(part)
                        continue
                    except FileNotFoundError:
                        self.away.add(part)
                raise FileNotFoundError(2, "No such file or directory", str(path))

    def list(self, path: Path, *_: Any) -> None:
        self.see(path)
        self.away = {name for name in self.away if name.parent != path}

    def make(self, path: Path, *_: Any, **__: Any) -> None:
        self.see(path.parent)
        self.away.discard(path)

    def open(self, path: Path, mode: Any = "r", *_: Any, **__: Any) -> None:
        creates = mode & os.O_CREAT if isinstance(mode, int) else set(mode) & set("wxa")
        (self.make if creates else self.see)(path)


def _after(act: Callable[..., None], call: Callable[..., Any], place: int = 0) -> Callable[..., Any]:
    """Return a system call before which a client acts on the path that is its argument at `place`."""

    def called(*args: Any, **kwargs: Any) -> Any:
        path = args[place] if args else "."
        if isinstance(path, str | Path):
            act(Path(path).absolute(), *args[place + 1 :], **kwargs)
        return call(*args, **kwargs)

    return called


@contextmanager
def nfs_client(root: Path) -> Iterator[None]:
    """Let this process's own look-ups below `root` go through a client; those of libraries in Rust do not."""
    client = _Client(root.absolute())
    acts = {"stat": client.see, "lstat": client.see, "unlink": client.see, "mkdir": client.make}
    acts |= {"scandir": client.list, "listdir": client.list, "open": client.open}
    acts |= {"rename": client.make, "replace": client.make}
    with ExitStack() as patches:
        for name, act in acts.items():
            of_os = _after(act, getattr(os, name), int(name in ("rename", "replace")))
            patches.enter_context(patch.object(os, name, of_os))
        for module in (io, builtins):
            patches.enter_context(patch.object(module, "open", _after(client.open, io.open)))
        yield
