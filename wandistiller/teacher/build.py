"""Builds the frozen teacher: its experts loaded to their placement, behind one method, `velocity(batch)`."""

from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from wandistiller.distributed import collectives
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.distributed.shutdown import Stopped
from wandistiller.experts import Expert
from wandistiller.network.folder import Folder
from wandistiller.network.network import Computing, Network, without_memory
from wandistiller.network.weight_reader import WeightReader
from wandistiller.teacher.base import (
    Guidance,
    GuidedTeacher,
    LocalTeacher,
    OwnerTeacher,
    Teacher,
    local_networks,
)
from wandistiller.teacher.placements.base import Placement
from wandistiller.utils.errors import ConfigError
from wandistiller.wan.checks import zero_problems


def build_teacher(
    folder: Folder,
    placement: Placement,
    guidance: Guidance | None = None,
    *,
    merges_padding: bool = False,
    ranks: Ranks = ALONE,
) -> Teacher:
    """Load every expert of `folder` to its placement. Collective.

    Args:
        merges_padding, ranks: as in `Computing`.

    Raises:
        ConfigError: on every rank, if weights could not be read or are not finite on any.
        Stopped: on every rank, if any of them received a request to stop.
    """
    peers = collectives.node_peers()
    owner = placement.owner(peers)
    here = owner is None or collectives.rank() == owner
    readers = {expert: folder.reader(expert) for expert in folder.configs} if here else {}
    modules = {}
    with suppress(Stopped) if owner is not None else nullcontext():  # raised on all ranks below
        modules = placement.load_all(folder, readers) if here else {}
    if owner is not None:
        collectives.raise_if_stop_requested("while the teacher was loaded")
    problems = collectives.gather_problems([p for reader in readers.values() for p in reader.faults])
    if problems := problems + _zero_problems(list(readers.values())):
        raise ConfigError(*problems)
    teacher = None
    if here:
        sharers = ranks if owner is None else ALONE
        computing = Computing(merges_padding=merges_padding, ranks=sharers, kernels=placement)
        networks = {
            e: Network(module.eval(), folder.configs[e]).prepare(computing=computing)
            for e, module in modules.items()
        }
        teacher = _guided(networks, placement, guidance)
    return teacher if owner is None else OwnerTeacher(teacher, owner, peers, ranks)


def _zero_problems(readers: list[WeightReader]) -> list[str]:
    """List matrices of which no rank saw a number other than 0, as each may have read a part. Collective."""
    seen: dict[Path, tuple[set[str], set[str]]] = {}
    for of_rank in collectives.gather_objects([(r.folder, r.read_names, r.nonzero) for r in readers]):
        for folder, names, nonzero in of_rank:
            all_names, all_nonzero = seen.setdefault(folder, (set(), set()))
            all_names |= {name for name in names if name.endswith(".weight") and "norm" not in name}
            all_nonzero |= nonzero
    return [p for folder, (names, nonzero) in seen.items() for p in zero_problems(folder, names - nonzero)]


def _guided(networks: dict[Expert, Network], placement: Placement, guidance: Guidance | None) -> Teacher:
    experts = {e: networks.get(e, next(iter(networks.values()))) for e in Expert}
    teacher = LocalTeacher(experts, _device(placement), sweeps=placement.sweeps)
    if not guidance:
        return teacher
    # its text stays where the batches are, instead of going there at each call
    guidance = replace(guidance, null_text_LD=guidance.null_text_LD.to(collectives.device()))
    return GuidedTeacher(teacher, guidance, placement.guidance_passes)


def keeps_beside(folder: Folder, placement: Placement) -> bool:
    """Return whether LoRA files are computed beside a pipeline's weights; a flow map's have another base."""
    return bool(folder.added) and placement.can_be_shared() and not folder.config.has_second_time


def beside(
    base: Teacher, folder: Folder, placement: Placement, guidance: Guidance, ranks: Ranks = ALONE
) -> Teacher:
    """Make a pipeline of the weights of `base`, and beside them LoRA files that it lacks: W x + B (A x).

    Quantised weights stay as they are; the files are in the placement's precision.
    """
    networks, dtype = {}, placement.engine.dtype
    for expert, config in folder.configs.items():
        network = Network.made(config, without_memory(config))
        network.module.requires_grad_(False)
        computing = Computing(ranks=ranks, kernels=placement)
        network.prepare(base=local_networks(base)[expert], computing=computing)
        for layer, change in folder.added_changes(expert).items():
            where = _device(placement), config.dtype_of(f"{layer}.weight", dtype)
            add = partial(_add, *(factor.to(*where) for factor in change))
            network.module.get_submodule(layer).register_forward_hook(add)
        network.module.eval()
        networks[expert] = network
    return _guided(networks, placement, guidance)


def _add(a: Tensor, b: Tensor, _: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output + linear(linear(inputs[0], a), b)


def _device(placement: Placement) -> torch.device:
    return torch.device("cpu") if placement.on_cpu else collectives.device()
