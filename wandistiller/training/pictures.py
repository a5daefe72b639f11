"""Pictures during a run: teacher above student, for fixed prompts and noise."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from wandistiller.config.job import Job
from wandistiller.data.cached_dataset import CachedData
from wandistiller.data.text_cache import TextCache
from wandistiller.data.turns import batched
from wandistiller.distributed import collectives, sequence
from wandistiller.flow import keyed_normal
from wandistiller.monitoring.metrics import SAMPLES
from wandistiller.monitoring.signs import SampleStats, sample_stats, write_stats
from wandistiller.student.learner import Learner
from wandistiller.teacher.base import Teacher
from wandistiller.utils.images import save_grid
from wandistiller.wan.encoders import Vae
from wandistiller.wan.sampling import denoise

Rows = dict[str, list[Tensor]]
"""image_CHW of each prompt, in [0, 1], by name."""
Stats = dict[str, SampleStats]
"""Of the latents of those pictures."""


class PictureDrawer:
    """Draws pictures of teacher and student; every method is collective, and the ranks share the work.

    It takes the memory of a micro-step of training and of the VAE, which is loaded only while it draws.
    """

    def __init__(
        self, job: Job, data: CachedData, text: TextCache, teacher: Teacher | None, student: Learner
    ):
        self.job, self.data, self.text, self.teacher, self.student = job, data, text, teacher, student
        self._first: tuple[Rows, Stats] = ({}, {})

    def draw(self, done: int) -> tuple[Rows, Stats]:
        """Write the grid of the student after `done` steps; return its rows, and statistics of samples."""
        job = self.job
        vae = Vae(job.folder, collectives.device())
        if not self._first[0]:
            self._first = self._first_row(vae)
        images, stats = self._row(partial(self._sampled, self.student), vae)
        rows, of_rows = self._first[0] | {"student": images}, self._first[1] | {"student": stats}
        if collectives.rank() == 0:  # the grid last: it says that all is there
            write_stats(job.output / SAMPLES, done, of_rows)
            save_grid(job.picture(done), rows, self.data.sample_prompts)
        return rows, of_rows

    def _first_row(self, vae: Vae) -> tuple[Rows, Stats]:
        """Draw the teacher's pictures; without a teacher decode cached ones, if there are all."""
        if self.teacher and len(self.job.teachers_folder.configs) == len(self.job.folder.configs):
            images, stats = self._row(partial(self._sampled, self.teacher), vae)
        elif self.data.has_rollouts(self.data.sample_prompts):
            images, stats = self._row(lambda prompts, _: self.data.x0_of(prompts), vae, seeds=1)
        else:
            return {}, {}
        return {"teacher": images}, {"teacher": stats}

    def _row(
        self, make: Callable[[list[str], int], Tensor], vae: Vae, seeds: int = 2
    ) -> tuple[list[Tensor], SampleStats]:
        """Decode `make(prompts, seed)` for each prompt: image_CHW of the middle frame in [0, 1], on the CPU.

        Args:
            seeds: 2 to draw students of few steps, and their teachers, twice, for the distance of both.
        """
        world, prompts, micro = sequence.replicas(), self.data.sample_prompts, self.job.batch.micro
        # equal for all ranks, so that collectives match; the surplus is cut
        share = -(-len(prompts) // world)
        first = sequence.replica() * share
        own = [prompts[i % len(prompts)] for i in range(first, first + share)]
        twice = seeds == 2 and self.job.schedule.few is not None
        images, stats = [], []
        for part in batched(own, micro):
            x0_BCFHW = make(part, 0)
            stats.append(sample_stats(x0_BCFHW, make(part, 1) if twice else None))
            images += map(vae.middle_frame, x0_BCFHW)
        all_images, stats_PK = (
            sequence.of_each_replica(own)[: len(prompts)].cpu()
            for own in (torch.stack(images), torch.cat(stats))
        )
        return list(all_images), SampleStats(*stats_PK.mean(0).tolist())

    def _sampled(self, model: Teacher | Learner, prompts: list[str], seed: int) -> Tensor:
        """Sample x0_BCFHW with `model`; without a teacher from the noise of its cached rollouts.

        Args:
            seed: 0, or 1 for other samples of the same prompts.
        """
        job, run, device = self.job, self.job.run, collectives.device()
        shape = job.folder.latent_shape(run.height, run.width, run.num_frames)
        keys = [("picture", p) if self.teacher else ("rollout", p, 0) for p in prompts]
        keys = [(*key, "again") for key in keys] if seed else keys
        noise_BCFHW = torch.stack([keyed_normal(shape, run.seed, *key) for key in keys]).to(device)
        text_BLD = self.text.of(prompts).to(device)
        few = job.drawn if model is self.student else None

        def fresh(call: int) -> Tensor:
            noise = [keyed_normal(shape, run.seed, *key, f"fresh {call}") for key in keys]
            return torch.stack(noise).to(device)

        x0_BCFHW, _ = denoise(
            model.velocity, job.folder, run.shift, noise_BCFHW, text_BLD, run.sample_steps, few, fresh
        )
        return x0_BCFHW
