"""Save, find and load checkpoints: float32 weights and moments by parameter, so that any layout can go on from any other.

    step_00000500/
      manifest.json                     every file, its size and checksum
      run_state.json                    the step, and what the run is
      transformer/engine.json           counters, schedule, loss scale of an engine
      transformer/rank_00000.safetensors  what this rank kept: pieces named KIND/START/PARAMETER
      frozen/transformer.safetensors    weights that are not trained; a hard link
"""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wandistiller import distributed, manifest
from wandistiller.batch import Expert
from wandistiller.ema import Ema
from wandistiller.engine_state import read_engine, write_engine
from wandistiller.files import atomic, link_or_copy, write_json
from wandistiller.fragments import WEIGHTS, Part, Trained
from wandistiller.phase import doing
from wandistiller.problems import ConfigError, StorageError
from wandistiller.stream import Pieces, Spec, Stamp, piece_name, stamp_of, write_stream
from wandistiller.student import Student

STATE = "run_state.json"
ENGINE = "engine.json"
FROZEN = "frozen"
"""Folder with the weights that are not trained, float32: beside the checkpoints, and by hard links in each."""
AT_ONCE = 32
"""Tensors that are read before the files are closed and opened anew."""
AVERAGE = "average"
FORMAT = 2
"""Grows when older checkpoints can no longer be read; 1 were DeepSpeed's own."""


class Saver:
    """Writes checkpoints. Training waits only for the writing; flushing, checking and renaming go on behind it."""

    def __init__(self, output: Path, keep: int):
        """`keep`: newest checkpoints that are not deleted."""
        self._folder, self._keep = output / "checkpoints", keep
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self._frozen: dict[str, Stamp] = {}
        self._part_is_done, self._stop = threading.Event(), threading.Event()

    def save(self, student: Student, step: int, state: dict[str, Any]) -> Path:
        """Write the checkpoint of `step` finished steps. Collective.

        Args:
            state: {"identity", "facts", ...} of the run.
        Raises:
            StorageError: on all ranks; this one, or the one before, could not be written.
        """
        self.finish()
        target = self._folder / f"{manifest.STEP}{step:08d}"
        if distributed.from_rank_0(target.exists()):  # the run went on from here, and nothing was learned since
            return target
        folder, rank = target.with_name(f".{target.name}.tmp"), distributed.rank()
        doing(f"saving the checkpoint of step {step}")
        with distributed.same_problems(StorageError):
            written = self._write(student, folder, {"format": FORMAT, "step": step, **state})
        self._part_is_done.clear()
        self._thread = threading.Thread(target=self._behind, args=(folder, target, rank, written), daemon=True)
        self._thread.start()
        return target

    def _write(self, student: Student, folder: Path, state: dict[str, Any]) -> dict[str, Stamp]:
        """This rank's files; paths within `folder` -> what they must be. Collective."""
        written: dict[str, Stamp] = {}
        problem = None
        try:
            if distributed.rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
                for expert in student.trained:
                    (folder / expert.value).mkdir(parents=True)
                if (self._folder / FROZEN).exists():
                    link_or_copy(self._folder / FROZEN, folder / FROZEN)
        except OSError as error:
            problem = error
        distributed.barrier()
        try:
            for expert, trained in student.trained.items():
                name = f"{expert.value}/{rank_file(distributed.rank())}"
                specs, tensors = _content(trained, student.averages.get(expert))
                written[name] = write_stream(folder / name, specs, tensors)
            if distributed.rank() == 0:
                files = {f"{e.value}/{ENGINE}": read_engine(t) for e, t in student.trained.items()} | {STATE: state}
                for name, content in files.items():
                    write_json(folder / name, content)
                    written[name] = stamp_of(folder / name)
                written |= self._stamps_of_frozen(folder)
        except OSError as error:
            problem = problem or error
        if problem:
            shutil.rmtree(folder, ignore_errors=True)
            raise StorageError(f"{folder.parent}: the checkpoint of step {state['step']} could not be written: {problem}. "
                               "Free space or mend the disk; the same command then goes on from the last one.")  # fmt: skip
        return written

    def _stamps_of_frozen(self, folder: Path) -> dict[str, Stamp]:
        """Read once; the files never change."""
        if not self._frozen:
            files = sorted((folder / FROZEN).glob("*")) if (folder / FROZEN).exists() else []
            self._frozen = {f"{FROZEN}/{f.name}": stamp_of(f) for f in files}
        return self._frozen

    def _behind(self, folder: Path, target: Path, rank: int, written: dict[str, Stamp]) -> None:
        try:
            manifest.finish_part(folder, rank, written)
            self._part_is_done.set()
            if rank == 0:
                manifest.publish(folder, target, distributed.world_size(), self._stop.is_set)
                manifest.settle(target, self._keep)
                distributed.log0("saved %s", target)
        except OSError as error:
            self._failed = StorageError(f"{target}: could not be saved: {error}")
        except Exception as error:  # for the main thread to say
            self._failed = error
        finally:
            self._part_is_done.set()

    def finish(self) -> None:
        """Wait until the last checkpoint is safe. Collective.

        Raises:
            StorageError: on all ranks; it could not be saved.
        """
        if not self._thread:
            return
        doing("waiting until the checkpoint is on disk")
        self._part_is_done.wait()
        try:
            self._raise_if_failed()  # before rank 0 is waited for, which would wait for the part that failed
        except StorageError:
            self._stop.set()
            raise
        finally:
            self._thread.join()
        self._thread = None
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        with distributed.same_problems(StorageError):
            if self._failed:
                raise self._failed


def save(student: Student, output: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write one checkpoint and wait for it. Collective; arguments as for `Saver`."""
    saver = Saver(output, keep)
    folder = saver.save(student, step, state)
    saver.finish()
    return folder


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _content(trained: Trained, average: Ema | None) -> tuple[list[Spec], Iterator[Tensor]]:
    """What a rank writes of one engine: each of its parts of the weights, of what the optimizer keeps, of the average."""
    specs = []
    for flat in trained.flats:
        dtypes = {kind: t.dtype for kind, t in trained.tensors(flat).items()} | ({AVERAGE: torch.float32} if average else {})
        specs += [Spec(piece_name(kind, p.name, p.start), dtypes[kind], p.numel) for kind in dtypes for p in trained.own(flat)]

    def tensors() -> Iterator[Tensor]:
        for flat in trained.flats:
            with trained.opened(flat):
                kinds = trained.tensors(flat) | ({AVERAGE: average.of(flat)} if average else {})
                for tensor in kinds.values():
                    yield from (tensor.narrow(0, p.offset, p.numel) for p in trained.own(flat))

    return specs, tensors()


def load(student: Student, folder: Path, changed: set[str] = frozenset()) -> int:
    """Go on from a checkpoint, whatever ranks, stage and offload wrote it; returns the finished steps. Collective.

    Each rank reads the pieces that it keeps, and no more.

    Args:
        changed: keys of the run's identity that may differ from the checkpoint's.
    """
    for expert, trained in student.trained.items():
        saved = json.loads((folder / expert.value / ENGINE).read_text())
        pieces = Pieces(sorted((folder / expert.value).glob("rank_*.safetensors")))
        same_optimizer = _family(saved["optimizer"]) == _family(type(trained.optimizer(trained.flats[0])).__name__)
        kinds = [k for k in pieces.kinds() if k not in (WEIGHTS, AVERAGE)] if same_optimizer else []
        for flat in trained.flats:
            with trained.opened(flat, changed=True):
                if same_optimizer:
                    trained.make_state(flat, kinds, saved["steps"])
                tensors = trained.tensors(flat)
                average = {AVERAGE: student.averages[expert].of(flat)} if expert in student.averages else {}
                for kind in (WEIGHTS, *kinds):
                    _fill(tensors[kind], flat.parts, pieces, kind)
                for tensor in average.values():
                    _fill(tensor, flat.parts, pieces, AVERAGE if AVERAGE in pieces.kinds() else WEIGHTS)
        trained.publish()
        write_engine(trained, saved, changed)
    return read_state(folder)["step"]


def _fill(flat: Tensor, parts: list[Part], pieces: Pieces, kind: str) -> None:
    """Read one kind of all parameters of a flat; what the checkpoint does not know stays as it is."""
    known = set(pieces.names(kind))
    for part in parts:
        if part.numel and part.name in known:
            flat.narrow(0, part.offset, part.numel).copy_(pieces.read(kind, part.name, part.start, part.numel))


def _family(optimizer: str | None) -> str:
    """Optimizers whose moments mean the same: DeepSpeed takes another class for each place where they live."""
    return next((f for f in ("Adam", "Lion") if optimizer and f in optimizer), str(optimizer))


def read_state(folder: Path) -> dict[str, Any]:
    """{"step", "identity", "facts", ...} of a checkpoint.

    Raises:
        ConfigError: it is of an earlier format.
    """
    state = json.loads((folder / STATE).read_text())
    if state.get("format") != FORMAT:
        raise ConfigError(f"{folder}: was made by another version of wandistiller. Export it with that one, or --resume never.")
    return state


def load_frozen(models: dict[Expert, nn.Module], folder: Path) -> None:
    """Put a checkpoint's weights that are not trained in the place of the models' own."""
    for expert, model in models.items():
        frozen = {name: p.data for name, p in model.named_parameters() if not p.requires_grad}
        for name, value in (load_file(_frozen_file(folder, expert)) if frozen else {}).items():
            frozen[name].copy_(value)


def keep_frozen(models: dict[Expert, nn.Module], output_dir: Path, resume_from: Path | None) -> None:
    """Store the weights that are not trained, once for all checkpoints and before an engine casts them. Collective.

    Args:
        resume_from: a checkpoint, whose frozen weights the models have.
    """
    folder = output_dir / "checkpoints" / FROZEN
    if distributed.rank() == 0 and folder.exists():
        shutil.rmtree(folder)
    for expert, model in models.items():
        frozen = {name: p.data for name, p in model.named_parameters() if not p.requires_grad}
        if frozen and not resume_from and distributed.rank() == 0:
            with atomic(_frozen_file(folder.parent, expert)) as temporary:
                save_file(frozen, temporary)
    if resume_from and (resume_from / FROZEN).exists() and distributed.rank() == 0:
        link_or_copy(resume_from / FROZEN, folder)
    distributed.barrier()


def _frozen_file(folder: Path, expert: Expert) -> Path:
    return folder / FROZEN / f"{expert.value}.safetensors"


def weights(folder: Path, expert: Expert, averaged: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The float32 weights of one expert with their names, one by one, each put together from all ranks' pieces, on the CPU.

    They may lie in a file that is mapped, of which the system counts as this process's memory what was read until it is closed:
    copy them, so that it can be.

    Args:
        averaged: take the moving average of those that are trained.
    """
    shapes = json.loads((folder / expert.value / ENGINE).read_text())["shapes"]
    files = sorted((folder / expert.value).glob("rank_*.safetensors"))
    for number, (name, shape) in enumerate(shapes.items()):
        if number % AT_ONCE == 0:
            pieces = Pieces(files)
        yield name, pieces.read(AVERAGE if averaged else WEIGHTS, name).view(shape)
    if _frozen_file(folder, expert).is_file():
        with safe_open(_frozen_file(folder, expert), "pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name).to(torch.float32)
