"""Makes the networks of a run's table: of the teacher's weights, another run's, or blank to resume."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from wandistiller.config.adapter_files import start_changes
from wandistiller.config.job import Job
from wandistiller.config.networks import CHECKPOINT, COPY, RUN, SHARED, NetworkPlan
from wandistiller.distributed import collectives
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.experts import Expert
from wandistiller.export.source import Source, read_source
from wandistiller.network.adapters import begin_with, set_no_change
from wandistiller.network.network import Computing, Network, without_memory, zeros
from wandistiller.student.initialize import copied_weights, start_weights
from wandistiller.student.slicing import WidthSlicer
from wandistiller.teacher.base import Teacher, local_networks, without_guidance


class NetworkBuilder:
    """Builder of the networks of a run's table."""

    def __init__(
        self,
        job: Job,
        teacher: Teacher | None = None,
        cuts: dict[Expert, WidthSlicer] | None = None,
        ranks: Ranks = ALONE,
    ):
        """Take what the networks are made of.

        Args:
            teacher: needed by networks that share its weights.
            cuts: how each network is cut from the teacher, if it is narrower.
            ranks: those that share samples.
        """
        self.job, self.cuts, self.ranks = job, cuts or {}, ranks
        self._bases = local_networks(without_guidance(teacher)) if job.networks.share_base else {}

    def network(self, row: NetworkPlan) -> Network:
        """Make a network as its row says, prepared to learn or to be called. Collective."""
        merges = self.job.run.merge_text_padding
        computing = Computing.of(row.engine, merges_padding=merges, ranks=self.ranks)
        network = Network.made(row.config, self._weights(row)).prepare(
            row.trained,
            begin=partial(self._begin, row),
            base=self._bases[row.base] if row.weights == SHARED else None,
            computing=computing if row.is_called else None,
        )
        if not row.learns:
            network.trained.requires_grad_(False)
        return network

    def networks(self, role: str, *, learns: bool = True) -> dict[Expert, Network]:
        """Make the networks of a role that learn, or those that do not. Collective."""
        rows = self.job.networks.by_role[role].items()
        return {expert: self.network(row) for expert, row in rows if row.learns == learns}

    def _weights(self, row: NetworkPlan) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that a network begins with. Collective."""
        job = self.job
        if row.weights == SHARED:
            return without_memory(row.config)
        if row.weights == COPY:
            return copied_weights(job.folder, row.copied)
        if row.weights == CHECKPOINT:
            return zeros(row.config)
        if row.weights == RUN:
            return _start(job).finished(row.expert.value, torch.float32)
        cuts = self.cuts.get(row.expert)
        return start_weights(job.student, row.config, job.folder, row.expert, job.run.seed, cuts)

    def _begin(self, row: NetworkPlan, module: nn.Module) -> None:
        """Let adapters begin as another run left them, or as a file has them. Collective."""
        job = self.job
        if row.trained and row.trained.lora is not None and not job.resume_from:
            if row.base and job.start:
                _start(job).fill_adapters(row.expert.value, module)
            else:
                begin_with(module, start_changes(job, row.expert))
        if row.as_base and row.base:
            set_no_change(module)


def _start(job: Job) -> Source:
    """Read what another run left. Collective."""
    with collectives.raise_on_all_ranks():
        return read_source(job.start.folder, share=(collectives.rank(), collectives.world_size()))
