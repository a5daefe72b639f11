"""Read checkpoints: weights, moments and averages by parameter, into any layout."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from wandistiller.batch import STUDENT
from wandistiller.checkpoint.safetensors_stream import ShardedTensors
from wandistiller.engine.optimizer_state import WEIGHTS, Fragment, MasterWeights, write_engine
from wandistiller.experts import Expert
from wandistiller.objectives.base import Role
from wandistiller.student.learner import Ema, Learner
from wandistiller.utils.errors import ConfigError

FORMAT = 2
"""Grows when older checkpoints can no longer be read; 1 was DeepSpeed's own."""
STATE = "run_state.json"
ENGINE = "engine.json"
FROZEN = "frozen"
"""Folder of the weights that are not trained, float32: next to the checkpoints, and by hard links in each."""
CARRIED = "carried"
"""Folder, and kind, of the states from which the samples of the student's next update go on."""
AVERAGE = "average"
"""Kind of tensors: the moving average of the weights."""


def load(
    learners: dict[str, Learner],
    folder: Path,
    changed: set[str] = frozenset(),
    roles: Mapping[str, Role] = MappingProxyType({}),
) -> int:
    """Load a checkpoint, whatever ranks, stage and offload wrote it; return its finished steps. Collective.

    Each rank reads only the pieces that it owns.

    Args:
        changed: keys of the run's identity that may differ from the checkpoint's.
        roles: settings of the networks beside the student, whose updates may be more or fewer than before.
    """
    step = read_state(folder)["step"]
    for role, learner in learners.items():
        # the objective has a critic's learning rate
        renewed = role != STUDENT and "objective" in changed
        of_role = changed | {"optimizer"} if renewed else changed
        for expert, trained in learner.trained.items():
            updates = step * roles[role].updates if role in roles else step
            place = updates if renewed and role in roles and step else None
            network = folder / network_name(role, expert)
            _load_network(trained, learner.averages.get(expert), network, of_role, updates, place)
    return step


def network_name(role: str, expert: Expert) -> str:
    """Return a network's folder in a checkpoint; the student's is that of a pipeline."""
    return expert.value if role == STUDENT else f"{role}/{expert.value}"


def _load_network(
    trained: MasterWeights,
    average: Ema | None,
    folder: Path,
    changed: set[str],
    updates: int,
    place: int | None,
) -> None:
    """Fill one network, and go on in its schedule.

    Args:
        updates: of the network, after which a schedule goes on if there was none.
        place: updates after which one goes on if there was one; None: those of the checkpoint.
    """
    saved = json.loads((folder / ENGINE).read_text())
    place = place if saved["scheduler"] else updates
    pieces = ShardedTensors(folder)
    kinds = [k for k in pieces.kinds() if k not in (WEIGHTS, AVERAGE)]
    for flat in trained.flats:
        with trained.opened(flat, changed=True):
            trained.make_state(flat, kinds, saved["steps"])
            tensors = trained.tensors(flat)
            for kind in (WEIGHTS, *kinds):
                _fill(tensors[kind], flat.parts, pieces, kind)
            if average:
                kind = AVERAGE if AVERAGE in pieces.kinds() else WEIGHTS
                _fill(average.of(flat), flat.parts, pieces, kind)
    trained.publish()
    write_engine(trained, saved, changed, place)


def _fill(flat: Tensor, parts: list[Fragment], pieces: ShardedTensors, kind: str) -> None:
    """Read one kind of all parameters of a flat tensor; those that the checkpoint lacks stay as they are."""
    known = set(pieces.names(kind))
    for part in parts:
        if part.numel and part.name in known:
            saved = pieces.read(kind, part.name, part.start, part.numel)
            flat.narrow(0, part.offset, part.numel).copy_(saved)


def read_state(folder: Path) -> dict[str, Any]:
    """Read {"step", "identity", "facts", ...} of a checkpoint.

    Raises:
        ConfigError: its format is an earlier one.
    """
    state = json.loads((folder / STATE).read_text())
    if state.get("format") != FORMAT:
        remedy = "Export it with that one, or --resume never."
        raise ConfigError(f"{folder}: was made by another version of wandistiller. {remedy}")
    return state


def load_frozen(models: dict[Expert, nn.Module], folder: Path) -> None:
    for expert, model in models.items():
        frozen = {name: p.data for name, p in model.named_parameters() if not p.requires_grad}
        for name, value in (load_file(frozen_file(folder, expert)) if frozen else {}).items():
            frozen[name].copy_(value)


def frozen_file(folder: Path, expert: Expert) -> Path:
    return folder / FROZEN / f"{expert.value}.safetensors"


def read_weights(folder: Path, expert: Expert, averaged: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each weight of one expert, joined from all ranks' pieces: float32, on the CPU.

    Values may be views of a mapped file, which is memory of this process as long as they are held: copy them.

    Args:
        averaged: yield the moving average of the trained weights.
    """
    engine = folder / expert.value / ENGINE  # none of an expert that is not trained
    shapes = json.loads(engine.read_text())["shapes"] if engine.is_file() else {}
    pieces = ShardedTensors(folder / expert.value)
    for name, shape in shapes.items():
        yield name, pieces.read(AVERAGE if averaged else WEIGHTS, name).view(shape)
    if frozen_file(folder, expert).is_file():
        with safe_open(frozen_file(folder, expert), "pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name).to(torch.float32)
