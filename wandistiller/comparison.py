"""Pictures of a run on its way: teacher beside student, fixed prompts and noise."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from wandistiller import distributed
from wandistiller.conditioning import TextCache
from wandistiller.data import CachedData
from wandistiller.job import Job
from wandistiller.latents import Vae, denoise
from wandistiller.noise import keyed_normal
from wandistiller.objectives import Teacher
from wandistiller.pictures import save_grid
from wandistiller.student import Student


class Comparison:
    """Draws both; every method is collective, and the ranks share the work.

    No more memory is taken than a micro-step of training does, but for the VAE, which is there for a moment only.
    """

    def __init__(self, job: Job, data: CachedData, text: TextCache, teacher: Teacher | None, student: Student):
        self.job, self.data, self.text = job, data, text
        self.teacher, self.student = teacher, student
        self._first: dict[str, list[Tensor]] = {}

    def draw(self, done: int) -> dict[str, list[Tensor]]:
        """Write the grid of the student after `done` steps; returns its rows of image_CHW, by name."""
        job = self.job
        vae = Vae(job.folder, distributed.device())
        self._first = self._first or self._first_row(vae)
        rows = self._first | {"student": self._row(partial(self._sampled, self.student), vae)}
        if distributed.rank() == 0:
            save_grid(job.picture(done), rows, job.run.sample_prompts)
        return rows

    def _first_row(self, vae: Vae) -> dict[str, list[Tensor]]:
        """What the student's pictures are to be like; without a teacher its cached ones, if all prompts are in the data."""
        if self.teacher:
            return {"teacher": self._row(partial(self._sampled, self.teacher), vae)}
        if self.data.has_paths and self.data.knows(self.job.run.sample_prompts):
            return {"teacher": self._row(self.data.x0_of, vae)}
        return {}

    def _row(self, make: Callable[[list[str]], Tensor], vae: Vae) -> list[Tensor]:
        """The middle frame, image_CHW in [0, 1] on the CPU, of `make(prompts)` for each sample prompt; on every rank."""
        world, prompts, micro = distributed.world_size(), self.job.run.sample_prompts, self.job.batch.micro
        share = -(-len(prompts) // world)  # equal for all ranks, so that collectives match; the surplus is cut
        mine = [prompts[i % len(prompts)] for i in range(distributed.rank() * share, (distributed.rank() + 1) * share)]
        images = []
        for i in range(0, share, micro):
            for x0_CFHW in make(mine[i : i + micro]):
                pixels_BCFHW = vae.decode(x0_CFHW[None])
                images.append(pixels_BCFHW[0, :, pixels_BCFHW.shape[2] // 2].clone())
        return list(distributed.gather_tensor(torch.stack(images))[: len(prompts)].cpu())

    def _sampled(self, model: Teacher | Student, prompts: list[str]) -> Tensor:
        """x0_BCFHW that `model` makes of `prompts`; without a teacher from the noise of its cached rollouts."""
        job, device = self.job, distributed.device()
        shape = job.folder.latent_shape(job.size.height, job.size.width, job.size.num_frames)
        keys = [("picture", p) if self.teacher else ("rollout", p, 0) for p in prompts]
        noise_BCFHW = torch.stack([keyed_normal(shape, job.run.seed, *key) for key in keys]).to(device)
        text_BLD = torch.stack([self.text[p] for p in prompts]).to(device)
        return denoise(model.velocity, job.folder, job.run.shift, noise_BCFHW, text_BLD, job.run.sample_steps)[0]
