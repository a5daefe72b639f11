"""The training loop: data -> noise -> teacher -> student -> loss -> step, then what a person wants to see."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from wandistiller import distributed
from wandistiller.batch import Batch, Expert, join, split
from wandistiller.checkpoint import Saver, load
from wandistiller.conditioning import TextCache
from wandistiller.data import CachedData
from wandistiller.job import Job
from wandistiller.latents import Vae, denoise
from wandistiller.manifest import set_aside_newer
from wandistiller.metrics import Metrics
from wandistiller.noise import keyed_normal
from wandistiller.objectives import NOISED, PATH, Teacher
from wandistiller.phase import doing
from wandistiller.pictures import save_grid
from wandistiller.resume import changed_keys
from wandistiller.stopping import Stopped, stopping
from wandistiller.student import Student


class Trainer:
    """Trains `student` towards `teacher` on `data`; every method is collective."""

    def __init__(self, job: Job, data: CachedData, text: TextCache, teacher: Teacher | None, student: Student):
        """`teacher` is None for an objective that needs none."""
        self.job, self.data, self.text = job, data, text
        self.teacher, self.student = teacher, student
        self.schedule, self.objectives = job.schedule, job.objectives
        self._teacher_row: dict[str, list[Tensor]] = {}
        self._saver = Saver(job.output, job.run.keep_checkpoints)
        self._asked_to_stop = False

    def train(self) -> None:
        """Run from the last checkpoint, if there is one, to the last step.

        Raises:
            Stopped: on all ranks, after a checkpoint, if any of them was asked to stop.
        """
        job, start = self.job, self._resumed()
        metrics = Metrics(job.output / "metrics.jsonl", start=start, max_steps=job.run.max_steps, global_batch=job.batch.total)
        if start and not self._is_drawn(start):
            self._show(start)
        for step in range(start, job.run.max_steps):
            losses, expert = self.optimizer_step(step)
            loss, terms, state = job.objective.total(losses), job.objective.named(losses), self.student.state(expert)
            metrics.step(step + 1, loss=loss, expert=expert.value, **state, **terms)
            self.student.record(step + 1, {"loss": loss, "grad_norm": state["grad_norm"], **terms.get("losses", {})})
            if self._asked_to_stop or (step + 1) % job.run.save_every == 0 or step + 1 == job.run.max_steps:
                metrics.flush()
                self._saver.save(self.student, step + 1, {"identity": job.identity, "facts": job.facts})
            if self._asked_to_stop:
                self._saver.finish()
                raise Stopped(f"after step {step + 1} of {job.run.max_steps}")
            self._show(step + 1)
            metrics.pause()
        self._saver.finish()

    def _resumed(self) -> int:
        """Load the checkpoint that the run goes on from, if there is one; the steps that are done."""
        job = self.job
        if not job.resume_from:
            return 0
        doing(f"loading {job.resume_from}")
        start = load(self.student, job.resume_from, changed_keys(job.resume_from, job.identity, job.run.allow_changed or []))
        distributed.log0("resumed   %s: %d of %d steps are done", job.resume_from, start, job.run.max_steps)
        if distributed.rank() == 0:
            for folder in set_aside_newer(job.output / "checkpoints", start):
                distributed.log0("set aside %s, which is newer", folder)
        distributed.barrier()
        return start

    def optimizer_step(self, step: int) -> tuple[list[float], Expert]:
        """All micro-steps of one optimizer step; returns each term's mean loss over all ranks, and the last expert used."""
        results = [self.micro_step(step, micro) for micro in range(self.job.batch.accumulation)]
        doing(f"finishing step {step + 1}")
        expert = results[-1][1]
        for engine in self.student.engines.values():  # learning rates follow the run, not the expert's own turns
            if engine is not self.student.engine(expert) and engine.lr_scheduler is not None:
                engine.lr_scheduler.step()
        self.student.average(expert, step + 1)
        return self._mean_over_ranks([loss_TB for loss_TB, _ in results], expert), expert

    def micro_step(self, step: int, micro: int) -> tuple[Tensor, Expert]:
        """One forward and backward pass on this rank's samples; returns each term's loss_TB, detached, and the expert."""
        doing(f"step {step + 1}, reading the data")
        batches = self.batches(step, micro)
        batch = join(batches)  # one forward pass for all: engines count a backward pass by its forward (deepspeed 0.19.8)
        objective, engine = self.objectives[batch.expert], self.student.engine(batch.expert)
        doing(f"step {step + 1}, the teacher's forward pass")
        target = objective.target(self.teacher, batches)
        doing(f"step {step + 1}, the student's forward pass")
        answers = split(self.student.answer(batch), batches)
        loss_TB = objective.losses(answers, target, batches)
        doing(f"step {step + 1}, the student's backward pass")
        engine.backward(objective.total(loss_TB).mean())  # scaled by 1 / accumulation inside
        doing(f"step {step + 1}, the optimizer's step")
        engine.step()  # updates on the last micro-step only
        return loss_TB.detach(), batch.expert

    def batches(self, step: int, micro: int) -> dict[str, Batch]:
        """This rank's samples, consecutive global indices cut by micro-step and then by rank, at each kind of states."""
        b = self.job.batch
        first = step * b.total + (micro * distributed.world_size() + distributed.rank()) * b.micro
        sample_index_B = list(range(first, first + b.micro))
        x0_BCFHW, text_BLD = self.data.batch(sample_index_B)
        found = {}
        if NOISED in self.job.objective.states:
            found[NOISED] = self.schedule.noised(x0_BCFHW, text_BLD, sample_index_B, step)
        if PATH in self.job.objective.states:
            found[PATH] = self.schedule.on_path(*self.data.states(sample_index_B), text_BLD, sample_index_B, step)
        return found

    def _mean_over_ranks(self, losses: list[Tensor], expert: Expert) -> list[float]:
        """Each term's mean over the global batch, summed in sample order whatever the ranks.

        On the way it checks that the experts agree, and tells whether any rank was asked to stop.

        Args:
            losses: this rank's loss_TB of each micro-step M.
        """
        loss_MTB, world = torch.stack(losses).float(), distributed.world_size()
        about = [list(Expert).index(expert), float(stopping.reason is not None)]
        mine = torch.cat([loss_MTB.flatten(), loss_MTB.new_tensor(about)])
        all_ranks = distributed.gather_tensor(mine).view(world, -1)
        if (all_ranks[:, -2] != all_ranks[0, -2]).any():
            raise RuntimeError(f"The ranks used different experts: {all_ranks[:, -2].tolist()}. Please report this.")
        self._asked_to_stop = bool(all_ranks[:, -1].any())
        loss_RMTB = all_ranks[:, :-2].view(world, *loss_MTB.shape)
        return loss_RMTB.permute(2, 1, 0, 3).flatten(1).double().mean(1).tolist()

    def _show(self, done: int) -> None:
        """Draw, if pictures are due after `done` steps."""
        if done % self.job.run.sample_every == 0 or done == self.job.run.max_steps:
            doing(f"drawing pictures after step {done}")
            distributed.log0("drew %s", self.draw(done))

    def _is_drawn(self, done: int) -> bool:
        """Whether the pictures are there, as rank 0 sees it."""
        return distributed.from_rank_0((self.job.samples / f"step_{done:08d}.png").is_file())

    def draw(self, done: int) -> str:
        """Write a grid, teacher beside student, fixed prompts and noise; the ranks share the work. Collective."""
        job = self.job
        vae = Vae(job.folder, distributed.device())  # here for a moment only; training holds no VAE
        if not self._teacher_row:
            self._teacher_row = self._first_row(vae)
        rows = self._teacher_row | {"student": self._pictures(partial(self._sampled, self.student), vae)}
        file = job.samples / f"step_{done:08d}.png"
        if distributed.rank() == 0:
            save_grid(file, rows, job.run.sample_prompts)
        return str(file)

    def _first_row(self, vae: Vae) -> dict[str, list[Tensor]]:
        """What the student's pictures are to be like; without a teacher its cached ones, if all prompts are in the data."""
        if self.teacher:
            return {"teacher": self._pictures(partial(self._sampled, self.teacher), vae)}
        if self.data.has_paths and self.data.knows(self.job.run.sample_prompts):
            return {"teacher": self._pictures(self.data.x0_of, vae)}
        return {}

    def _pictures(self, make: Callable[[list[str]], Tensor], vae: Vae) -> list[Tensor]:
        """The middle frame, image_CHW in [0, 1] on the CPU, of `make(prompts)` for each sample prompt; on every rank."""
        world, prompts = distributed.world_size(), self.job.run.sample_prompts
        share = -(-len(prompts) // world)  # equal for all ranks, so that collectives match; the surplus is cut
        mine = [prompts[i % len(prompts)] for i in range(distributed.rank() * share, (distributed.rank() + 1) * share)]
        pixels_BCFHW = vae.decode(make(mine))
        images_BCHW = distributed.gather_tensor(pixels_BCFHW[:, :, pixels_BCFHW.shape[2] // 2])
        return list(images_BCHW[: len(prompts)].cpu())

    def _sampled(self, model: Teacher | Student, prompts: list[str]) -> Tensor:
        """x0_BCFHW that `model` makes of `prompts`; without a teacher from the noise of its cached rollouts."""
        job, device = self.job, distributed.device()
        shape = job.folder.latent_shape(job.size.height, job.size.width, job.size.num_frames)
        keys = [("picture", p) if self.teacher else ("rollout", p, 0) for p in prompts]
        noise_BCFHW = torch.stack([keyed_normal(shape, job.run.seed, *key) for key in keys]).to(device)
        text_BLD = torch.stack([self.text[p] for p in prompts]).to(device)
        return denoise(model.velocity, job.folder, job.run.shift, noise_BCFHW, text_BLD, job.run.sample_steps)[0]

