"""The training loop: data -> noise -> teacher -> student -> loss -> step, then what a person wants to see."""

import gc
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from wandistiller import distributed, usage
from wandistiller.batch import Answer, Batch, Expert, join, split
from wandistiller.checkpoint import Saver, load, read_state
from wandistiller.comparison import Comparison
from wandistiller.conditioning import TextCache
from wandistiller.data import CachedData
from wandistiller.engines import forget_step, scales_itself
from wandistiller.health import SOON, Health, Spent
from wandistiller.job import Job
from wandistiller.learned import Done, Learned, together
from wandistiller.manifest import set_aside_newer
from wandistiller.memory_profile import MemoryProfile
from wandistiller.metrics import Metrics, scalars
from wandistiller.nonfinite import Case, Seen, poisoned, see
from wandistiller.objectives import NOISED, PATH, Teacher
from wandistiller.pace import pace
from wandistiller.phase import doing
from wandistiller.problems import NonFinite
from wandistiller.resume import changed_keys, check_cache
from wandistiller.stopping import Stopped
from wandistiller.student import Student
from wandistiller.usage import Usage, within

TRIMMED = 50
"""Steps after which circles are collected, which Python (3.11) by itself does after 140,000 new objects beside the 560,000 that
libraries keep, and what was freed goes back to the system, before its holes are many."""


class Pass(NamedTuple):
    """A forward pass over this rank's samples of one micro-step."""

    batches: dict[str, Batch]
    target: Answer | None
    """The teacher's."""
    answers: dict[str, Answer]
    """The student's, by kind of states."""
    loss_TB: Tensor

    @property
    def expert(self) -> Expert:
        return next(iter(self.batches.values())).expert

    @property
    def sigma_B(self) -> Tensor:
        """Of the states that the first term looks at."""
        return next(iter(self.batches.values())).sigma_B


class Trainer:
    """Trains `student` towards `teacher` on `data`; every method is collective."""

    def __init__(self, job: Job, data: CachedData, text: TextCache, teacher: Teacher | None, student: Student):
        """`teacher` is None for an objective that needs none."""
        self.job, self.data = job, data
        self.teacher, self.student = teacher, student
        self.schedule, self.objectives = job.schedule, job.objectives
        self._comparison = Comparison(job, data, text, teacher, student)
        self._profile = MemoryProfile(job, teacher, student)
        self._saver = Saver(job.output, job.run.keep_checkpoints)
        self._health = Health(job.output)
        self._spent = Spent()
        self._asked_to_stop = False
        self._skipped = 0
        self._metrics: Metrics | None = None
        self._cache: dict[str, str] = {}
        self._memory: dict[str, list[Usage]] = {}
        """By phase, of each rank: of the step, and of other phases that ended since the step before."""

    @within("train")
    def train(self) -> None:
        """Run from the last checkpoint, if there is one, to the last step.

        Raises:
            Stopped: on all ranks, after a checkpoint, if any of them was asked to stop.
            NonFinite: on all ranks, after a checkpoint of the steps before, if a step's loss or gradient is not finite.
        """
        job, start = self.job, self._resumed()
        metrics = Metrics(job.output / "metrics.jsonl", start=start, max_steps=job.run.max_steps, global_batch=job.batch.total)
        self._metrics = metrics
        self._health.go_on_from(start)
        self.student.monitors.go_on_from(start)
        self._cache = self.data.stamps()
        self._note_phases()
        self._profile.say(start)
        if start and not self._is_drawn(start):
            self._show(start)
        for step in range(start, job.run.max_steps):
            with self._profile.during(step + 1):
                learned = self.optimizer_step(step)
            loss, terms = job.objective.total(learned.losses), job.objective.named(learned.losses)
            state = self.student.state(learned.expert)
            line = metrics.step(step + 1, loss=loss, memory=self._memory, expert=learned.expert.value,
                                loss_by_sigma=learned.by_sigma, **state, **terms)  # fmt: skip
            self.student.monitors.record(step + 1, scalars(line))
            self._health.step(step + 1, loss, state["grad_norm"], state["lr"], learned.spent)
            self._memory = {}
            due = self._asked_to_stop or (step + 1) % job.run.save_every == 0 or step + 1 == job.run.max_steps
            if due:
                self._save(step + 1)
            if self._asked_to_stop:
                self._saver.finish()
                raise Stopped(f"after step {step + 1} of {job.run.max_steps}")
            if self._show(step + 1) or due:
                self._note_phases()
            if (step + 1) % TRIMMED == 0:
                gc.collect()
                usage.trim()
            metrics.pause()
        self._saver.finish()

    def _note_phases(self) -> None:
        """Learn what each rank took at most in the phases that have ended, and write it down."""
        ranks = distributed.gather_objects(usage.peaks)
        self._memory |= {phase: [peaks[phase] for peaks in ranks] for phase in usage.peaks}
        if distributed.rank() == 0:
            usage.write(self.job.output, self._memory)

    @within("checkpoint")
    def _save(self, done: int) -> Path:
        """Write the checkpoint after `done` steps, behind the lines of metrics.jsonl that it stands for."""
        if self._metrics:
            self._metrics.flush()
        job = self.job
        run = {key: value for key, value in job.resolved.items() if not key.endswith("_dir")}  # wherever it lies
        state = {"identity": job.identity, "facts": job.facts, "run": run, "cache": self._cache,
                 "skipped_steps": self._skipped}  # fmt: skip
        return self._saver.save(self.student, done, state)

    @within("load")
    def _resumed(self) -> int:
        """Load the checkpoint that the run goes on from, if there is one; the steps that are done."""
        job = self.job
        if not job.resume_from:
            return 0
        doing(f"loading {job.resume_from}")
        check_cache(job.resume_from, job.cache, self.data, job.run.allow_changed or [])
        start = load(self.student, job.resume_from, changed_keys(job.resume_from, job.identity, job.run.allow_changed or []))
        self._skipped = read_state(job.resume_from).get("skipped_steps", 0)
        distributed.log0("resumed   %s: %d of %d steps are done", job.resume_from, start, job.run.max_steps)
        if distributed.rank() == 0:
            for folder in set_aside_newer(job.output / "checkpoints", start):
                distributed.log0("set aside %s, which is newer", folder)
        distributed.barrier()
        return start

    def optimizer_step(self, step: int) -> Learned:
        """All micro-steps of one optimizer step.

        Raises:
            NonFinite: on all ranks, if the loss or gradient is not finite and such a step may not be skipped.
        """
        self._spent = Spent(pace=0.0 if step % SOON else pace())
        began = time.perf_counter()
        results = [self.micro_step(step, micro) for micro in range(self.job.batch.accumulation)]
        doing(f"finishing step {step + 1}")
        spent = self._spent._replace(all=time.perf_counter() - began)
        learned = together(results, spent, self.job.objective)
        self._asked_to_stop, self._memory["train"] = learned.asked_to_stop, learned.memory
        used = self.student.engine(learned.expert)
        if not (all(map(math.isfinite, learned.losses)) and (used.was_step_applied() or scales_itself(used))):
            self._not_finite(step, learned.expert, [done.loss_TB for done in results])
        for engine in self.student.engines.values():  # learning rates follow the run, not the expert's own turns
            if not (engine is used and engine.was_step_applied()) and engine.lr_scheduler is not None:
                engine.lr_scheduler.step()
        self.student.average(learned.expert, step + 1)
        return learned

    def _not_finite(self, step: int, expert: Expert, losses: list[Tensor]) -> None:
        """Keep what repeats the step, of which its engine has taken nothing; then stop, unless it may be skipped.

        Args:
            losses: this rank's loss_TB of each micro-step.
        """
        job = self.job
        if not self.student.engine(expert).was_step_applied():
            forget_step(self.student.engine(expert))
        mine = [seen for micro, loss_TB in enumerate(losses) for seen in self.see(step, micro, loss_TB)]
        samples = sorted(seen for theirs in distributed.gather_objects(mine) for seen in theirs)
        checkpoint = str(self._save(step).resolve())
        case = Case(step + 1, distributed.world_size(), checkpoint, job.resolved, samples)
        file = case.file(job.output)
        if distributed.rank() == 0:
            case.write(file)
        if job.run.on_nonfinite == "stop" or self._skipped >= job.run.nonfinite_limit:
            self._saver.finish()
            raise NonFinite(*case.told(file), *case.remedies(job, file))
        self._skipped += 1
        for line in case.told(file):
            distributed.log0("skipped   %s", line)

    def see(self, step: int, micro: int, loss_TB: Tensor) -> list[Seen]:
        """What a person wants to know of this rank's samples of a micro-step."""
        index_B, terms = self.sample_indices(step, micro), self.job.objective.terms
        losses = {term.name: loss_B for term, loss_B in zip(terms, loss_TB, strict=True)}
        items = [self.data.item_at(i) for i in index_B]
        return see(self.batches(step, micro), items, index_B, losses, distributed.rank(), micro)

    def micro_step(self, step: int, micro: int) -> Done:
        """One forward and backward pass on this rank's samples."""
        done = self.forward(step, micro)
        engine = self.backward(step, done)
        doing(f"step {step + 1}, the optimizer's step")
        engine.step()  # updates on the last micro-step only
        return Done(done.loss_TB.detach(), done.sigma_B, done.expert)

    def forward(self, step: int, micro: int) -> Pass:
        """Ask teacher and student, and compare."""
        doing(f"step {step + 1}, reading the data")
        batches = self.batches(step, micro)
        batch = join(batches)  # one forward pass for all: engines count a backward pass by its forward (deepspeed 0.19.8)
        objective = self.objectives[batch.expert]
        doing(f"step {step + 1}, the teacher's forward pass")
        target = objective.target(self.teacher, batches)
        doing(f"step {step + 1}, the student's forward pass")
        answers = split(self.student.answer(batch), batches)
        return Pass(batches, target, answers, objective.losses(answers, target, batches))

    def backward(self, step: int, done: Pass) -> Any:
        """Add to the gradients of the engine that learns; returns it."""
        doing(f"step {step + 1}, the student's backward pass")
        engine = self.student.engine(done.expert)
        engine.backward(poisoned(self.job.objective.total(done.loss_TB).mean()))  # scaled by 1 / accumulation inside
        return engine

    def sample_indices(self, step: int, micro: int) -> list[int]:
        """This rank's samples: consecutive global indices cut by micro-step and then by rank."""
        b = self.job.batch
        first = step * b.total + (micro * distributed.world_size() + distributed.rank()) * b.micro
        return list(range(first, first + b.micro))

    def batches(self, step: int, micro: int) -> dict[str, Batch]:
        """This rank's samples at each kind of states."""
        sample_index_B, began = self.sample_indices(step, micro), time.perf_counter()
        x0_BCFHW, text_BLD = self.data.batch(sample_index_B)
        states = self.data.states(sample_index_B) if PATH in self.job.objective.states else ()
        self._spent = self._spent._replace(data=self._spent.data + time.perf_counter() - began)
        found = {}
        if NOISED in self.job.objective.states:
            found[NOISED] = self.schedule.noised(x0_BCFHW, text_BLD, sample_index_B, step)
        if PATH in self.job.objective.states:
            found[PATH] = self.schedule.on_path(*states, text_BLD, sample_index_B, step)
        return found

    def _show(self, done: int) -> bool:
        """Draw, if pictures are due after `done` steps; whether they were."""
        due = done % self.job.run.sample_every == 0 or done == self.job.run.max_steps
        if due:
            doing(f"drawing pictures after step {done}")
            with within("draw"):
                rows = self._comparison.draw(done)
                distributed.log0("drew %s", self.job.picture(done))
                self._health.pictures(done, rows)
                self.student.monitors.show(done, self.job.picture(done))
        return due

    def _is_drawn(self, done: int) -> bool:
        """Whether the pictures are there, as rank 0 sees it."""
        return distributed.from_rank_0(self.job.picture(done).is_file())
