"""The parameters of a student's network before it is built, on the meta device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from wandistiller.config.job import Job
from wandistiller.student.blocks import add_projections
from wandistiller.student.trainable import set_trainable
from wandistiller.utils.memoize import once_for_each
from wandistiller.wan.transformer import meta_transformer, width


class Network(NamedTuple):
    """Elements of a student's parameters, by name."""

    trained: dict[str, int]
    frozen: dict[str, int] = {}


def student_shape(job: Job) -> tuple[Any, ...]:
    """The arguments of `student_model` for one of the student's networks."""
    return (
        job.student_transformer,
        job.run.frozen,
        job.run.lora,
        matched_blocks(job),
        width(job.folder.config),
    )


def student_network(job: Job) -> Network:
    """Trained parameters of one student network, with adapters and projections, and its frozen ones."""
    return network_of(*student_shape(job))


def matched_blocks(job: Job) -> list[int]:
    """The student's blocks whose hidden states are matched; `lineage` may not be known yet."""
    return job.objective.for_student(list(range(job.student_transformer["num_layers"]))).student_blocks


@once_for_each
def student_model(
    config: dict[str, Any],
    frozen: list[str] | None,
    lora: dict[str, Any] | None,
    blocks: Sequence[int],
    teacher_width: int,
) -> nn.Module:
    """Build one student network on the meta device, as `training.build_student.student_models` does."""
    with torch.device("meta"):
        model = meta_transformer(config).requires_grad_(True)
        set_trainable(model, frozen, lora, seed=0)
        add_projections(model, blocks, teacher_width)
    return model


@once_for_each
def network_of(*shape: Any) -> Network:
    found: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for name, p in student_model(*shape).named_parameters():
        found[p.requires_grad][name] = p.numel()
    return Network(found[True], found[False])
