"""The training loop: data -> noise -> teacher -> student -> loss -> step, then what a person wants to see."""

import torch
from torch import Tensor

from wandistiller import checkpoint, distributed
from wandistiller.batch import Batch, Expert
from wandistiller.conditioning import TextCache
from wandistiller.data import CachedData
from wandistiller.job import Job
from wandistiller.latents import Vae, denoise
from wandistiller.metrics import Metrics
from wandistiller.noise import keyed_normal
from wandistiller.objectives import Teacher
from wandistiller.pictures import save_grid
from wandistiller.student import Student


class Trainer:
    """Trains `student` towards `teacher` on `data`; every method is collective."""

    def __init__(self, job: Job, data: CachedData, text: TextCache, teacher: Teacher, student: Student):
        self.job, self.data, self.text = job, data, text
        self.teacher, self.student = teacher, student
        self.schedule, self.objective = job.schedule, job.objective
        self._teacher_pictures: list[Tensor] = []

    def train(self) -> None:
        """Run from the last checkpoint, if there is one, to the last step."""
        job = self.job
        start = checkpoint.load(self.student, job.resume_from) if job.resume_from else 0
        if start:
            distributed.log0("resumed %s: %d of %d steps are done", job.resume_from, start, job.run.max_steps)
        metrics = Metrics(job.output / "metrics.jsonl", start=start, max_steps=job.run.max_steps, global_batch=job.batch.total)
        for step in range(start, job.run.max_steps):
            loss, expert = self.optimizer_step(step)
            engine = self.student.engine(expert)
            metrics.step(step + 1, loss=loss, grad_norm=_number(engine.get_global_grad_norm()), lr=engine.get_lr()[0],
                         expert=expert.value)  # fmt: skip
            self._save_and_show(step + 1)
            metrics.pause()

    def optimizer_step(self, step: int) -> tuple[float, Expert]:
        """All micro-steps of one optimizer step; returns the mean loss over all ranks and the last expert used."""
        results = [self.micro_step(step, micro) for micro in range(self.job.batch.accumulation)]
        expert = results[-1][1]
        for engine in self.student.engines.values():  # learning rates follow the run, not the expert's own turns
            if engine is not self.student.engine(expert) and engine.lr_scheduler is not None:
                engine.lr_scheduler.step()
        return self._mean_over_ranks([loss_B for loss_B, _ in results], expert), expert

    def micro_step(self, step: int, micro: int) -> tuple[Tensor, Expert]:
        """One forward and backward pass on this rank's samples; returns loss_B, detached, and the expert."""
        batch = self.batch(step, micro)
        target_BCFHW = self.objective.target(self.teacher, batch)
        v_BCFHW = self.student.velocity(batch)
        loss_B = self.objective.loss(v_BCFHW, target_BCFHW, batch)
        engine = self.student.engine(batch.expert)
        engine.backward(loss_B.mean())  # scaled by 1 / accumulation inside
        engine.step()  # updates on the last micro-step only
        return loss_B.detach(), batch.expert

    def batch(self, step: int, micro: int) -> Batch:
        """This rank's samples: consecutive global indices, cut by micro-step and then by rank."""
        b = self.job.batch
        first = step * b.total + (micro * distributed.world_size() + distributed.rank()) * b.micro
        sample_index_B = list(range(first, first + b.micro))
        return self.schedule.noised(*self.data.batch(sample_index_B), sample_index_B, step)

    def _mean_over_ranks(self, losses: list[Tensor], expert: Expert) -> float:
        """Mean loss of the global batch, summed in sample order whatever the ranks; checks that experts agree."""
        mine = torch.cat([*losses, losses[0].new_tensor([list(Expert).index(expert)])])
        all_ranks = distributed.gather_tensor(mine.float()).view(distributed.world_size(), -1)
        if (all_ranks[:, -1] != all_ranks[0, -1]).any():
            raise RuntimeError(f"The ranks used different experts: {all_ranks[:, -1].tolist()}. Please report this.")
        by_sample = all_ranks[:, :-1].view(distributed.world_size(), len(losses), -1).transpose(0, 1)
        return by_sample.double().mean().item()

    def _save_and_show(self, done: int) -> None:
        run = self.job.run
        if done % run.save_every == 0 or done == run.max_steps:
            state = {"identity": self.job.identity, "facts": self.job.facts}
            folder = checkpoint.save(self.student, self.job.output, done, state, run.keep_checkpoints)
            distributed.log0("saved %s", folder)
        if done % run.sample_every == 0 or done == run.max_steps:
            distributed.log0("drew %s", self.draw(done))

    def draw(self, done: int) -> str:
        """Write a grid, teacher beside student, fixed prompts and noise; the ranks share the work. Collective."""
        job = self.job
        vae = Vae(job.folder, distributed.device())  # here for a moment only; training holds no VAE
        rows = {}
        if not self._teacher_pictures:
            self._teacher_pictures = self._pictures(self.teacher, vae)
        rows["teacher"] = self._teacher_pictures
        rows["student"] = self._pictures(self.student, vae)
        file = job.output / "samples" / f"step_{done:08d}.png"
        if distributed.rank() == 0:
            save_grid(file, rows, job.run.sample_prompts)
        return str(file)

    def _pictures(self, model: Teacher | Student, vae: Vae) -> list[Tensor]:
        """The middle frame, image_CHW in [0, 1] on the CPU, for each sample prompt; on every rank."""
        job, world, device = self.job, distributed.world_size(), distributed.device()
        prompts = job.run.sample_prompts
        share = -(-len(prompts) // world)  # equal for all ranks, so that collectives match; the surplus is cut
        mine = [prompts[i % len(prompts)] for i in range(distributed.rank() * share, (distributed.rank() + 1) * share)]
        shape = job.folder.latent_shape(job.size.height, job.size.width, job.size.num_frames)
        noise_BCFHW = torch.stack([keyed_normal(shape, job.run.seed, "picture", p) for p in mine]).to(device)
        text_BLD = torch.stack([self.text[p] for p in mine]).to(device)
        x0_BCFHW, _ = denoise(model.velocity, job.folder, job.run.shift, noise_BCFHW, text_BLD, job.run.sample_steps)
        pixels_BCFHW = vae.decode(x0_BCFHW)
        images_BCHW = distributed.gather_tensor(pixels_BCFHW[:, :, pixels_BCFHW.shape[2] // 2])
        return list(images_BCHW[: len(prompts)].cpu())


def _number(value: Tensor | float | None) -> float | None:
    return None if value is None else float(value)
