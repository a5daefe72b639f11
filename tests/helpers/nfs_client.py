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

Call = Callable[..., Any]


class _Client:
    def __init__(self, root: Path):
        self.root, self.away, self.lstat = root, set(), os.lstat

    def walk(self, path: Path) -> None:
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

    def seen(self, call: Call) -> Call:
        """Return a system call that looks for a name."""

        def looked(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | Path):
                self.walk(Path(path).absolute())
            return call(path, *args, **kwargs)

        return looked

    def listed(self, call: Call) -> Call:
        """Return a system call that opens a folder."""

        def opened(path: Any = ".", *args: Any) -> Any:
            if isinstance(path, str | Path):
                self.walk(folder := Path(path).absolute())
                self.away = {name for name in self.away if name.parent != folder}
            return call(path, *args)

        return opened

    def made(self, call: Call) -> Call:
        """Return a system call that makes a name, its last argument that is a path."""

        def makes(*args: Any, **kwargs: Any) -> Any:
            path = Path([a for a in args if isinstance(a, str | Path)][-1]).absolute()
            self.walk(path.parent)
            self.away.discard(path)
            return call(*args, **kwargs)

        return makes

    def opened(self, call: Call) -> Call:
        """Return a call that opens a file, to read it or as a new one."""

        def opens(path: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            creates = mode & os.O_CREAT if isinstance(mode, int) else set(mode) & set("wxa")
            if isinstance(path, str | Path) and creates:
                self.walk((new := Path(path).absolute()).parent)
                self.away.discard(new)
            elif isinstance(path, str | Path):
                self.walk(Path(path).absolute())
            return call(path, mode, *args, **kwargs)

        return opens


@contextmanager
def nfs_client(root: Path) -> Iterator[None]:
    """Let this process's own look-ups below `root` go through a client; those of libraries in Rust do not."""
    client = _Client(root.absolute())
    how = {"stat": client.seen, "lstat": client.seen, "unlink": client.seen, "scandir": client.listed}
    how |= {"listdir": client.listed, "mkdir": client.made, "rename": client.made, "replace": client.made}
    how |= {"open": client.opened}
    with ExitStack() as patches:
        for name, wrapped in how.items():
            patches.enter_context(patch.object(os, name, wrapped(getattr(os, name))))
        for module in (io, builtins):
            patches.enter_context(patch.object(module, "open", client.opened(io.open)))
        yield
