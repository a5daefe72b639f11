"""The student's networks before training: of the teacher's weights, another run's, or blank to resume."""

import torch
from torch import nn

from wandistiller.config.job import Job
from wandistiller.distributed import collectives
from wandistiller.experts import Expert
from wandistiller.export.source import Source, read_source
from wandistiller.student.config import StudentConfig
from wandistiller.student.initialize import blank_model, start_model
from wandistiller.student.lora import begin_with, set_no_change
from wandistiller.student.projections_and_heads import add_heads
from wandistiller.student.shared_base import hollow_model, on_base
from wandistiller.student.slicing import WidthSlicer
from wandistiller.student.start_places import start_changes
from wandistiller.student.trainable import set_trainable
from wandistiller.teacher.base import Teacher, local_modules, without_guidance


class NetworkBuilder:
    """Builder of a run's networks, of the teacher's weights, another run's, or zeros."""

    def __init__(
        self, job: Job, teacher: Teacher | None = None, cuts: dict[Expert, WidthSlicer] | None = None
    ):
        """Take what the networks are made of.

        Args:
            teacher: needed by networks that share its weights.
            cuts: how each network is cut from the teacher, if it is narrower.
        """
        self.job, self.cuts = job, cuts or {}
        self._shared = local_modules(without_guidance(teacher)) if job.shares_base else {}

    def network(self, expert: Expert) -> nn.Module:
        """Make a network of the student: blank if the run resumes, as another run left it, or new."""
        job, config = self.job, self.job.student_transformer
        if job.shares_base:
            return hollow_model(config)
        if job.bases:
            return start_model(StudentConfig(experts="two"), config, job.folder, job.bases[expert], 0)
        if job.resume_from:
            return blank_model(config)
        if not job.start:
            return start_model(job.student, config, job.folder, expert, job.run.seed, self.cuts.get(expert))
        return _start(job).finished(expert.value, torch.float32).requires_grad_(True)

    def trainable(
        self, expert: Expert, *, projected: bool = False, heads: bool = False, as_new: bool = False
    ) -> nn.Module:
        """Make a network of which the recipe trains some weights, or its trained parts on the teacher's.

        Collective.

        Args:
            projected: add the projections of hidden states that are compared.
            as_new: adapters change nothing yet, whatever those of a file or of another run do.
        """
        job, model = self.job, self.network(expert)
        matched = job.matched_objective.student_blocks if projected else []
        set_trainable(model, job.run.frozen, job.run.lora, job.run.seed, matched, job.folder.config.width)
        if not job.resume_from:
            self._begin(expert, model)
        if as_new:
            set_no_change(model)
        if heads:
            add_heads(model)
        return on_base(model, self._shared[job.bases[expert]]) if job.shares_base else model

    def _begin(self, expert: Expert, model: nn.Module) -> None:
        """Let adapters begin as another run left them, or as a file has them. Collective."""
        job = self.job
        if job.bases and job.start:
            _start(job).fill_adapters(expert.value, model)
        elif job.run.lora:
            begin_with(model, start_changes(job, expert))


def _start(job: Job) -> Source:
    """Read what another run left. Collective."""
    with collectives.raise_on_all_ranks():
        return read_source(job.start.folder, share=(collectives.rank(), collectives.world_size()))
