"""Puts the simulated GPU into every process with this folder on PYTHONPATH, right after `import torch`."""

import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TORCH = "2.13.0"


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as always, once, and installs when it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        import_torch = spec.loader.exec_module

        def import_and_install(module: ModuleType) -> None:
            import_torch(module)
            if not module.__version__.startswith(TORCH):
                raise ImportError(
                    f"the simulated GPU is made for torch {TORCH}, here is {module.__version__}"
                )
            import simulated_gpu

            simulated_gpu.install()

        spec.loader.exec_module = import_and_install
        return spec


if "SIMULATED_GPUS" in os.environ:
    sys.meta_path.insert(0, AfterTorch())
