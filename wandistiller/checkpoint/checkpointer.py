"""Write checkpoints: float32 weights and moments by parameter, from which any layout can resume.

step_00000500/
  manifest.json                     every file, its size and checksum
  run_state.json                    the step, and the run's identity and settings
  transformer/engine.json           counters, schedule, loss scale of an engine
  transformer/rank_00000.safetensors  the pieces that this rank owns, named KIND/START/PARAMETER
  critic/transformer/               the same of the critic, if there is one
  carried/rank_00000.safetensors    states of this rank's samples that go on in the student's next update
  frozen/transformer.safetensors    weights that are not trained; a hard link
"""

import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from wandistiller.checkpoint import manifest
from wandistiller.checkpoint.loading import (
    AVERAGE,
    CARRIED,
    ENGINE,
    FORMAT,
    FROZEN,
    STATE,
    frozen_file,
    network_name,
)
from wandistiller.checkpoint.safetensors_stream import FileChecksum, Spec, checksum, write_stream
from wandistiller.distributed import collectives
from wandistiller.engine.optimizer_state import MasterWeights, read_engine
from wandistiller.experts import Expert
from wandistiller.network.adapters import is_adapter
from wandistiller.student.learner import Ema, Learner
from wandistiller.utils.errors import StorageError
from wandistiller.utils.files import as_json, atomic, link_or_copy
from wandistiller.utils.logging import set_activity


class Checkpointer:
    """Writes checkpoints. Training waits only for the writing; a thread flushes, checks and renames them."""

    def __init__(self, output: Path, keep: int):
        """`keep`: newest checkpoints that are not deleted."""
        self._folder, self._keep = output / "checkpoints", keep
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._frozen: dict[str, FileChecksum] = {}
        self._part_is_done, self._stop = threading.Event(), threading.Event()

    def save(
        self,
        learners: dict[str, Learner],
        step: int,
        state: dict[str, Any],
        carried: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> Path:
        """Write the checkpoint of `step` finished steps. Collective.

        Args:
            state: {"identity", "facts", ...} of the run.
            carried: states of this rank's samples that go on, by the number of the first in an update.

        Raises:
            StorageError: on all ranks; this checkpoint, or the one before, could not be written.
        """
        self.finish()
        target = self._folder / manifest.folder_name(step)
        if collectives.broadcast_object(collectives.rank() == 0 and target.exists()):
            return target  # the run resumed from it, and nothing was learned since
        folder = manifest.temporary_name(target)
        set_activity(f"saving the checkpoint of step {step}")
        with collectives.raise_on_all_ranks(StorageError):
            written = self._write(learners, folder, {"format": FORMAT, "step": step, **state}, carried)
        self._part_is_done.clear()
        self._thread = threading.Thread(target=self._commit, args=(folder, target, written), daemon=True)
        self._thread.start()
        return target

    def _write(
        self, learners: dict[str, Learner], folder: Path, state: dict[str, Any], carried: Mapping[int, Tensor]
    ) -> dict[str, FileChecksum]:
        """Write this rank's files; return their checksums by path within `folder`. Collective."""
        networks = {
            network_name(role, expert): (trained, learner.averages.get(expert))
            for role, learner in learners.items()
            for expert, trained in learner.trained.items()
        }
        written: dict[str, FileChecksum] = {}
        first, error = collectives.rank() == 0, None
        try:
            if first:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                if (self._folder / FROZEN).exists():
                    link_or_copy(self._folder / FROZEN, folder / FROZEN)
        except OSError as refused:
            error = refused
        collectives.barrier()

        def write(network: str) -> None:
            # a client of NFS may remember that it was not there, until it makes it
            (folder / network).mkdir(parents=True, exist_ok=True)
            name = f"{network}/rank_{collectives.rank():05d}.safetensors"
            written[name] = write_stream(folder / name, *_content(*networks[network]))

        try:
            with ThreadPoolExecutor(2) as pool:  # a checksum takes a core; so student and critic at once
                [*pool.map(write, networks)]
            if carried:
                (folder / CARRIED).mkdir(exist_ok=True)
                starts = {number * x_BCFHW[0].numel(): x_BCFHW for number, x_BCFHW in carried.items()}
                specs = [Spec(f"{CARRIED}/{i}/x", x.dtype, x.numel()) for i, x in starts.items()]
                name = f"{CARRIED}/rank_{collectives.rank():05d}.safetensors"
                written[name] = write_stream(folder / name, specs, map(torch.flatten, starts.values()))
            if first:
                engines = {f"{name}/{ENGINE}": read_engine(t) for name, (t, _) in networks.items()}
                for name, content in (engines | {STATE: state}).items():  # flushed by `_commit`, as all
                    (folder / name).write_text(as_json(content), encoding="utf-8")
                    written[name] = checksum(folder / name)
                frozen = sorted((folder / FROZEN).glob("*"))  # read once, as they never change
                self._frozen = self._frozen or {f"{FROZEN}/{file.name}": checksum(file) for file in frozen}
                written |= self._frozen
        except OSError as refused:
            error = error or refused
        if error:
            shutil.rmtree(folder, ignore_errors=True)
            raise StorageError(
                f"{folder.parent}: the checkpoint of step {state['step']} could not be written: {error}. "
                "Free space or fix the disk; the same command then goes on from the last one."
            )
        return written

    def _commit(self, folder: Path, target: Path, written: dict[str, FileChecksum]) -> None:
        """Flush and check this rank's files; on rank 0 rename the folder after all ranks'. In a thread."""
        try:
            manifest.finish_part(folder, collectives.rank(), written)
            self._part_is_done.set()
            if collectives.rank() == 0:
                manifest.commit(folder, target, collectives.world_size(), self._stop.is_set)
                manifest.rotate(target, self._keep)
                collectives.log0("saved %s", target)
        except OSError as error:
            self._error = StorageError(f"{target}: could not be saved: {error}")
        except Exception as error:  # raised by the main thread
            self._error = error
        finally:
            self._part_is_done.set()

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk. Collective.

        Raises:
            StorageError: on all ranks; it could not be saved.
        """
        if not self._thread:
            return
        set_activity("waiting until the checkpoint is on disk")
        self._part_is_done.wait()
        try:
            self._raise_error()  # before rank 0's thread is joined, which would wait for the part that failed
        except StorageError:
            self._stop.set()
            raise
        finally:
            self._thread.join()
        self._thread = None
        self._raise_error()

    def _raise_error(self) -> None:
        with collectives.raise_on_all_ranks(StorageError):
            if self._error:
                raise self._error


def _content(trained: MasterWeights, average: Ema | None) -> tuple[list[Spec], Iterator[Tensor]]:
    """Return the tensors of a rank's file: its part of an engine's weights, optimizer state and average."""
    specs = []
    for flat in trained.flats:
        dtypes = {kind: t.dtype for kind, t in trained.tensors(flat).items()}
        dtypes |= {AVERAGE: torch.float32} if average else {}
        for kind, dtype in dtypes.items():
            specs += [Spec(f"{kind}/{p.start}/{p.name}", dtype, p.numel) for p in trained.written(flat)]

    def tensors() -> Iterator[Tensor]:
        for flat in trained.flats:
            with trained.opened(flat):
                kinds = trained.tensors(flat) | ({AVERAGE: average.of(flat)} if average else {})
                for tensor in kinds.values():
                    yield from (tensor.narrow(0, p.offset, p.numel) for p in trained.written(flat))

    return specs, tensors()


def keep_frozen(
    models: dict[Expert, nn.Module],
    output_dir: Path,
    resume_from: Path | None,
    *,
    adapters_alone: bool = False,
) -> None:
    """Store the frozen weights, once for all checkpoints and before an engine casts them. Collective.

    Args:
        resume_from: the checkpoint from which the models have their frozen weights.
        adapters_alone: all others are the teacher's, which has them.
    """
    folder = output_dir / "checkpoints" / FROZEN
    if collectives.rank() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        for expert, model in models.items() if not resume_from else ():
            frozen = {name: p.data for name, p in model.named_parameters() if not p.requires_grad}
            if frozen := {n: t for n, t in frozen.items() if not adapters_alone or is_adapter(n)}:
                with atomic(frozen_file(folder.parent, expert)) as temporary:
                    save_file(frozen, temporary)
        if resume_from and (resume_from / FROZEN).exists():
            link_or_copy(resume_from / FROZEN, folder)
    collectives.barrier()
