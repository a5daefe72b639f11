"""Builds the frozen teacher: its experts loaded to their placement, behind one method, `velocity(batch)`."""

from dataclasses import replace
from typing import Any

import torch

from wandistiller.batch import Expert
from wandistiller.distributed import collectives
from wandistiller.teacher.base import Guidance, GuidedTeacher, LocalTeacher, OwnerTeacher, Teacher
from wandistiller.teacher.teacher_json import read_placement
from wandistiller.utils.errors import ConfigError
from wandistiller.wan.kernels import use_kernels
from wandistiller.wan.pipeline import WanFolder
from wandistiller.wan.text_padding import merge_text_padding
from wandistiller.wan.weight_reader import WeightReader


def build_teacher(
    folder: WanFolder, ds: dict[str, Any], guidance: Guidance | None = None, *, merges_padding: bool = False
) -> Teacher:
    """Load every expert of `folder` to the placement of `ds`, checked by `teacher_engine`. Collective.

    Args:
        merges_padding: compute cross-attention to a prompt's padding once.

    Raises:
        ConfigError: on every rank, if weights could not be read or are not finite on any.
    """
    placement, peers = read_placement(ds), collectives.node_peers()
    if problems := collectives.gather_problems(placement.owner_problems(peers)):
        raise ConfigError(*problems)
    owner = placement.owner(peers)
    here = owner is None or collectives.rank() == owner
    readers = {expert: WeightReader(folder.path / expert.value) for expert in folder.configs} if here else {}
    experts = placement.load_all(folder, readers, ds) if here else {}
    if problems := collectives.gather_problems([p for reader in readers.values() for p in reader.faults]):
        raise ConfigError(*problems)
    teacher: Teacher | None = None
    if here:
        device = torch.device("cpu") if placement.on_cpu else collectives.device()
        one, *_ = experts.values()
        for model in experts.values():
            if merges_padding:
                merge_text_padding(model)
            use_kernels(model, placement)
        of_expert = {e: experts.get(e, one).eval() for e in Expert}
        teacher = LocalTeacher(of_expert, device, sweeps=placement.sweeps)
        if guidance:  # its text stays where the batches are, instead of going there at each call
            null_text_LD = guidance.null_text_LD.to(collectives.device())
            guidance = replace(guidance, null_text_LD=null_text_LD)
            teacher = GuidedTeacher(teacher, guidance, placement.guidance_passes)
    return teacher if owner is None else OwnerTeacher(teacher, owner, peers)
