"""Ranks on simulated GPUs: builds tests/helpers/simulated_gpu once, and reads what its checks found.

    eval "$(python tests/helpers/simulated.py FOLDER GPUS MIB)"

gives them to all that is started from this shell; FOLDER takes the reports.
"""

import fcntl
import hashlib
import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import get_default_build_root, is_ninja_available

SOURCES = Path(__file__).with_name("simulated_gpu")
TORCH = "2.13.0"
BUILD = """
import sys
from torch.utils.cpp_extension import load
flags = ["-O1", "-g0", "-std=c++20", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
load("simulated_gpu_C", [sys.argv[1]], extra_cflags=flags, build_directory=sys.argv[2], is_python_module=True)
"""


def why_not() -> str:
    """Return why there are no simulated GPUs here, or nothing."""
    if torch.__version__ != f"{TORCH}+cpu":
        return f"the simulated GPU is made for a CPU build of torch {TORCH}; here is {torch.__version__}"
    return "" if is_ninja_available() else "ninja is missing"


simulated_gpu = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")


@cache
def library() -> Path:
    """The folder of the built library, one for each state of its sources; it takes a minute, once."""
    sources = hashlib.sha256(b"".join(f.read_bytes() for f in sorted(SOURCES.glob("*.[hc]*")))).hexdigest()
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    (folder := root / f"simulated_gpu_{sources[:16]}").mkdir(parents=True, exist_ok=True)
    with (folder / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "built").exists():  # what processes have loaded is not written again
            return folder
        words = [sys.executable, "-c", BUILD, str(SOURCES / "simulated_gpu.cpp"), str(folder)]
        done = subprocess.run(
            words, capture_output=True, text=True, env=os.environ | {"DS_ACCELERATOR": "cpu"}
        )
        assert done.returncode == 0, f"the simulated GPU does not build:\n{done.stdout}\n{done.stderr}"
        (folder / "built").touch()
    return folder


class Simulated:
    """Devices that ranks are started on, and what was found on them."""

    def __init__(
        self, folder: Path, gpus: int = 1, mib: int | tuple[int, ...] = 4096, *, waits: bool = False
    ):
        """Name them; they are there in processes that have their `environment`.

        Args:
            folder: takes the reports.
            mib: memory of all, or of each.
            waits: note where the host waits for a device.
        """
        self.folder, self.gpus, self.mib = folder, gpus, mib if isinstance(mib, tuple) else (mib,)
        self._notes_waits = waits

    def environment(self) -> dict[str, str]:
        """Variables for a process that is to have them; what installs them is first on PYTHONPATH."""
        path = os.pathsep.join(map(str, (SOURCES, library(), SOURCES.parents[2])))
        return {
            "DS_ACCELERATOR": "cuda",
            "PYTHONPATH": path,
            "SIMULATED_GPUS": str(self.gpus),
            "SIMULATED_GPU_MIB": ",".join(map(str, self.mib)),
            "SIMULATED_GPU_REPORTS": str(self.folder),
            "SIMULATED_GPU_SHARED": str(self.folder / "shared"),
            "SIMULATED_GPU_WAITS": str(int(self._notes_waits)),
        }

    def reports(self) -> str:
        """Accesses that nothing orders, uses of freed memory, ranks that disagree."""
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("*.report")))

    def waits(self, package: str) -> list[str]:
        """The innermost line of a package, `FILE:LINE FUNCTION`, of each wait that has one."""
        waits = "".join(file.read_text() for file in self.folder.glob("*.waits")).split("wait: ")[1:]
        lines = ([line.strip() for line in wait.splitlines() if f"/{package}/" in line] for wait in waits)
        return [in_package[0] for in_package in lines if in_package]


def main() -> None:
    folder, gpus, mib = Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in Simulated(folder, gpus, mib).environment().items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
