"""Pictures during a run: teacher above student, for fixed prompts and noise."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from wandistiller.config.job import Job
from wandistiller.data.cached_dataset import CachedData
from wandistiller.data.text_cache import TextCache
from wandistiller.data.turns import batched
from wandistiller.distributed import collectives
from wandistiller.flow import keyed_normal
from wandistiller.student.learner import Learner
from wandistiller.teacher.base import Teacher
from wandistiller.utils.images import save_grid
from wandistiller.wan.encoders import Vae
from wandistiller.wan.sampling import denoise


class PictureDrawer:
    """Draws pictures of teacher and student; every method is collective, and the ranks share the work.

    It takes the memory of a micro-step of training and of the VAE, which is loaded only while it draws.
    """

    def __init__(
        self, job: Job, data: CachedData, text: TextCache, teacher: Teacher | None, student: Learner
    ):
        self.job, self.data, self.text, self.teacher, self.student = job, data, text, teacher, student
        self._first: dict[str, list[Tensor]] = {}

    def draw(self, done: int) -> dict[str, list[Tensor]]:
        """Write the grid of the student after `done` steps; return its rows of image_CHW, by name."""
        job = self.job
        vae = Vae(job.folder, collectives.device())
        self._first = self._first or self._first_row(vae)
        rows = self._first | {"student": self._row(partial(self._sampled, self.student), vae)}
        if collectives.rank() == 0:
            save_grid(job.picture(done), rows, self.data.sample_prompts)
        return rows

    def _first_row(self, vae: Vae) -> dict[str, list[Tensor]]:
        """Draw the teacher's pictures; without a teacher decode cached ones, if there are all."""
        if self.teacher:
            return {"teacher": self._row(partial(self._sampled, self.teacher), vae)}
        if self.data.has_rollouts(self.data.sample_prompts):
            return {"teacher": self._row(self.data.x0_of, vae)}
        return {}

    def _row(self, make: Callable[[list[str]], Tensor], vae: Vae) -> list[Tensor]:
        """Return the middle frame of `make(prompts)` for each prompt, image_CHW in [0, 1] on the CPU."""
        world, prompts, micro = collectives.world_size(), self.data.sample_prompts, self.job.batch.micro
        # equal for all ranks, so that collectives match; the surplus is cut
        share = -(-len(prompts) // world)
        first = collectives.rank() * share
        own = [prompts[i % len(prompts)] for i in range(first, first + share)]
        images = []
        for part in batched(own, micro):
            for x0_CFHW in make(part):
                pixels_BCFHW = vae.decode(x0_CFHW[None])
                images.append(pixels_BCFHW[0, :, pixels_BCFHW.shape[2] // 2].clone())
        return list(collectives.gather_tensor(torch.stack(images))[: len(prompts)].cpu())

    def _sampled(self, model: Teacher | Learner, prompts: list[str]) -> Tensor:
        """Sample x0_BCFHW with `model`; without a teacher from the noise of its cached rollouts."""
        job, run, device = self.job, self.job.run, collectives.device()
        shape = job.folder.latent_shape(run.height, run.width, run.num_frames)
        keys = [("picture", p) if self.teacher else ("rollout", p, 0) for p in prompts]
        noise_BCFHW = torch.stack([keyed_normal(shape, run.seed, *key) for key in keys]).to(device)
        text_BLD = torch.stack([self.text[p] for p in prompts]).to(device)
        few = job.schedule.few if model is self.student else None
        x0_BCFHW, _ = denoise(
            model.velocity, job.folder, run.shift, noise_BCFHW, text_BLD, run.sample_steps, few
        )
        return x0_BCFHW
