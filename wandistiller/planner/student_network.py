"""The student's network before it is built: its parameters, on the meta device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from wandistiller.config.job import Job
from wandistiller.objectives.base import Role
from wandistiller.student.trainable import set_trainable
from wandistiller.utils.memoize import once_for_each
from wandistiller.wan.transformer import meta_transformer
from wandistiller.wan.transformer_config import TransformerConfig


class Network(NamedTuple):
    """Elements of a student's parameters, by name."""

    trained: dict[str, int]
    frozen: dict[str, int] = {}

    @property
    def trained_numel(self) -> int:
        return sum(self.trained.values())

    @property
    def frozen_numel(self) -> int:
        return sum(self.frozen.values())


def student_shape(job: Job) -> tuple[Any, ...]:
    """The arguments of `student_model` for one of the student's networks."""
    run, teacher_width = job.run, job.folder.config.width
    return job.student_transformer, run.frozen, run.lora, matched_blocks(job), teacher_width


def student_network(job: Job) -> Network:
    """Parameters of one student network, adapters and projections included."""
    return _own(job, network_of(*student_shape(job)))


def other_network(job: Job, role: Role) -> Network:
    """Parameters of a network that is trained beside the student."""
    return _own(job, network_of(*other_shape(job, role)))


def _own(job: Job, network: Network) -> Network:
    """Leave out the frozen weights that are the teacher's."""
    return Network(network.trained) if job.shares_base else network


def other_shape(job: Job, role: Role) -> tuple[Any, ...]:
    """The arguments of `student_model` for a network that is trained beside the student."""
    of_student = job.student_transformer, job.run.frozen, job.run.lora
    of_teacher = of_student if job.bases else (job.folder.config, None, None)
    return *role.origin(of_student, of_teacher), [], job.folder.config.width


def matched_blocks(job: Job) -> list[int]:
    """The student's blocks whose hidden states are matched; `lineage` may not be known yet."""
    return job.objective.for_student(list(range(job.student_transformer.num_layers))).student_blocks


@once_for_each
def student_model(
    config: TransformerConfig,
    frozen: list[str] | None,
    lora: dict[str, Any] | None,
    blocks: Sequence[int],
    teacher_width: int,
) -> nn.Module:
    """Build one student network on the meta device."""
    with torch.device("meta"):
        model = meta_transformer(config).requires_grad_(True)
        set_trainable(model, frozen, lora, 0, blocks, teacher_width)
    return model


@once_for_each
def network_of(*shape: Any) -> Network:
    """Parameters of `student_model` for these arguments."""
    parameters = list(student_model(*shape).named_parameters())
    trained = {name: p.numel() for name, p in parameters if p.requires_grad}
    return Network(trained, {name: p.numel() for name, p in parameters if not p.requires_grad})
