"""The student's initial weights: the teacher's, cut where it is narrower; random; or those of a folder."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from wandistiller.distributed import collectives
from wandistiller.experts import Expert
from wandistiller.network.config import NetworkConfig
from wandistiller.network.folder import Folder
from wandistiller.network.names import in_block, split_name
from wandistiller.network.weight_reader import WeightReader
from wandistiller.student import pruning
from wandistiller.student.config import StudentConfig, kept_layers, source_expert, transformer_folder
from wandistiller.student.pruning import CalibrationStats, WidthSlicer
from wandistiller.utils.errors import ConfigError


def _reader(student: StudentConfig, folder: Folder, expert: Expert) -> WeightReader:
    """Read the headers of the weights that a student's network starts from."""
    if student.init == "teacher":
        return folder.reader(source_expert(student, folder, expert))
    return WeightReader(transformer_folder(student.init, expert))


def _read(reader: WeightReader, name: str) -> Tensor:
    """Read a tensor, float32 on the CPU."""
    reader.read(name, value := torch.empty(reader.stored[name].shape))
    return value


def start_weights(
    student: StudentConfig,
    config: NetworkConfig,
    folder: Folder,
    expert: Expert,
    seed: int,
    cuts: WidthSlicer | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a new student's network, float32 on the CPU, equal on every rank. Collective.

    Args:
        cuts: result of `plan_cuts`, for a student that is narrower than the teacher it starts from.
    Raises:
        ConfigError: on every rank, if weights are unreadable or not finite on any.
    """
    if student.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield from config.new().named_parameters()
        return
    copied = student.init == "teacher"
    layers = kept_layers(student, config, folder) if copied else list(range(config.num_layers))
    reader, cuts = _reader(student, folder, expert), cuts or WidthSlicer()
    for name, module in config.meta().named_modules():
        number, inside = split_name(name)
        source = name if number is None else in_block(layers[number], inside)
        names = {leaf: f"{source}.{leaf}".strip(".") for leaf, _ in module.named_parameters(recurse=False)}
        # of a second time there may be none; `complete` gives it some
        values = {leaf: _read(reader, stored) for leaf, stored in names.items() if stored in reader.stored}
        for leaf, value in cuts.cut(source, values).items():
            # contiguous, as DeepSpeed views parameters as bytes
            yield f"{name}.{leaf}".strip("."), value.contiguous()
    if problems := collectives.gather_problems(reader.faults):
        raise ConfigError(*problems)


def copied_weights(folder: Folder, expert: Expert) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of one of the teacher's networks, as `start_weights`. Collective."""
    whole = StudentConfig(experts="two" if folder.boundary is not None else "one")
    yield from start_weights(whole, folder.configs[expert], folder, expert, 0)


def plan_cuts(
    student: StudentConfig, config: NetworkConfig, folder: Folder, expert: Expert, stats: CalibrationStats
) -> WidthSlicer:
    """Choose the cut of one of the student's networks from the teacher's activation statistics."""
    blocks, read = kept_layers(student, config, folder), partial(_read, _reader(student, folder, expert))
    return pruning.strongest_cut(config, folder.config, blocks, stats, read)
