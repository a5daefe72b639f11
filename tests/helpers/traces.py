"""Traces of networks that all processes of a test run share: what one has counted, no other counts again."""

import atexit
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from wandistiller.utils import memoize

FOLDER = "TRACES_OF_TESTS"
"""Environment variable that names the folder of their files."""
PURE = """
    network.activation_memory network.config network.flops network.network wan.checks wan.fake_tensor_memory
""".split()
"""Modules whose memoized functions depend on their arguments alone."""


def share() -> None:
    """Keep results of PURE in files, too; to be called before these are imported."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="traces_of_tests_")
        atexit.register(shutil.rmtree, os.environ[FOLDER])
    folder, in_memory = Path(os.environ[FOLDER]), memoize.once_for_each

    def in_both(f: Callable[..., Any]) -> Callable[..., Any]:
        is_pure = f.__module__.removeprefix("wandistiller.") in PURE
        return in_memory(_in_files(f, folder) if is_pure else f)

    memoize.once_for_each = in_both


def _in_files(f: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    @wraps(f)
    def read_or_made(*args: Any, **kwargs: Any) -> Any:
        key = f"{f.__module__}.{f.__qualname__} {args} {kwargs}"
        file = folder / hashlib.sha256(key.encode()).hexdigest()
        if file.exists():
            return pickle.loads(file.read_bytes())
        result = f(*args, **kwargs)
        folder.mkdir(exist_ok=True)  # another process may have removed it
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(pickle.dumps(result))
        temporary.rename(file)
        return result

    return read_or_made
