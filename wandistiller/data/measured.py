"""Results of measurements before training, on disk, so that a run that was stopped does not repeat them."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from wandistiller.batch import Batch
from wandistiller.data.tensor_cache import BROKEN
from wandistiller.distributed import collectives
from wandistiller.utils.files import atomic, digest


class Measured:
    """Tensors by name in one folder, a file each; the folder's name covers all that they depend on."""

    def __init__(self, folder: Path | None):
        """Name the folder, or None to keep nothing; nothing is read or written yet."""
        self._folder = folder

    def of(self, name: str, measure: Callable[[], Tensor]) -> Tensor:
        """Return rank 0's result of `measure`, kept or new, on the CPU. Collective."""
        kept = collectives.broadcast_object(self.read(name) if collectives.rank() == 0 else None)
        if kept:
            return kept["result"]
        result = collectives.broadcast_object(measure().cpu())
        if collectives.rank() == 0:
            self.write(name, {"result": result})
        return result

    def read(self, name: str) -> dict[str, Tensor]:
        """Read tensors as this rank finds them; {} if there are none, or the file is damaged."""
        if not self._folder:
            return {}
        try:
            with safe_open(self._file(name), "pt") as opened:
                return {key: opened.get_tensor(key).clone() for key in opened.keys()}
        except BROKEN:
            return {}

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        if self._folder:
            with atomic(self._file(name)) as temporary:
                save_file({key: t.cpu().contiguous() for key, t in tensors.items()}, temporary)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"


def batches_digest(batches: list[Batch]) -> str:
    """Hash the inputs of a network in `batches`, which results depend on."""
    hashes = []
    for t in (t for b in batches for t in b.tensors()):
        data = t.detach().cpu().contiguous().view(torch.uint8).numpy()
        hashes.append([str(t.dtype), hashlib.blake2b(data, digest_size=8).hexdigest()])
    return digest(*hashes)
