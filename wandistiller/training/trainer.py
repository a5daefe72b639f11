"""The training loop: each step's updates, reports, pictures and checkpoints."""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from wandistiller.batch import STUDENT
from wandistiller.checkpoint.checkpointer import Checkpointer
from wandistiller.checkpoint.loading import load, read_state
from wandistiller.checkpoint.manifest import steps
from wandistiller.checkpoint.resume import changed_keys, set_newer_aside
from wandistiller.config.identity import recorded
from wandistiller.config.job import Job
from wandistiller.data.cached_dataset import CachedData, MicroBatches
from wandistiller.data.conditions import Conditions
from wandistiller.distributed import collectives
from wandistiller.distributed.shutdown import Stopped
from wandistiller.engine.compiler import log_compiled
from wandistiller.monitoring import memory_usage
from wandistiller.monitoring.memory_usage import within
from wandistiller.student.learner import Learner
from wandistiller.teacher.base import Teacher
from wandistiller.training.monitor import Monitor
from wandistiller.training.nonfinite import NonFiniteHandler
from wandistiller.training.pictures import PictureDrawer
from wandistiller.training.step_result import Over, StepResult, mean_of, reduce_over_ranks
from wandistiller.training.update import Updates
from wandistiller.utils.logging import begin_step, set_activity

GC_EVERY = 50
"""Steps between collections of reference cycles. Python 3.11 by itself waits for 140,000 new objects, because
libraries keep 560,000. Freed memory then also goes back to the system, before it is fragmented."""
SAVING, DRAWING = 10, 20
"""Checkpoints, and pictures, by the clock take at most one of so many parts of the time."""


class Interval:
    """Tells when something that takes time was last done too long ago."""

    def __init__(self, minutes: float, parts: int, clock: Callable[[], float] = time.monotonic):
        """Begin now, for what may take one of so many parts of the time; `clock` gives seconds."""
        self._least, self._parts, self._clock = 60 * minutes, parts, clock
        self._since, self._took = clock(), 0.0

    def over(self) -> bool:
        """Return whether the minutes have passed since it was last done, and parts - 1 times what it took."""
        return self._clock() - self._since >= max(self._least, (self._parts - 1) * self._took)

    @contextmanager
    def doing(self) -> Iterator[None]:
        """Measure it; the minutes begin anew at the end of the block."""
        began = self._clock()
        yield
        self._since = self._clock()
        self._took = self._since - began


class Trainer:
    """Trains the student, and the networks beside it, towards `teacher`; every method is collective."""

    def __init__(
        self,
        job: Job,
        data: CachedData,
        conditions: Conditions,
        teacher: Teacher | None,
        learners: dict[str, Learner],
    ):
        """Take the run's networks.

        Args:
            teacher: None for an objective that needs none.
            learners: the student and what the objective trains beside it, by role.
        """
        self.job, self.data, self.teacher, self.student = job, data, teacher, learners[STUDENT]
        self.learners = learners
        latent = job.folder.latent_shape(job.run.height, job.run.width, job.run.num_frames)
        self.batches = MicroBatches(data, job.schedule, job.batch, latent, self.student.ranks)
        self.updates = Updates(job, self.batches, learners, teacher)
        self.monitor = Monitor(job, self.student.monitors)
        self.pictures = PictureDrawer(job, data, conditions, teacher, self.student)
        self._recorded = recorded(job)
        self.checkpointer = Checkpointer(job.output, job.run.keep_checkpoints)
        self.nonfinite = NonFiniteHandler(job, self.batches, learners, self.save)
        self.saves = Interval(job.run.save_minutes, SAVING)
        self.draws = Interval(job.run.sample_minutes, DRAWING)
        self._seconds_of_compiling = 0.0
        self._draw_after = 0
        """Steps done when pictures are due by the clock; known a step before, as the teacher works ahead."""

    @within("train")
    def train(self) -> None:
        """Run from the last checkpoint, if there is one, to the last step.

        Raises:
            Stopped: on all ranks, after a checkpoint, if any of them received a request to stop.
            NonFinite: on all ranks, after a checkpoint of the steps before; see `NonFiniteHandler`.
        """
        run, start = self.job.run, self.resume()
        self.monitor.start(start)
        collectives.raise_if_stop_requested(f"before step {start + 1}")
        if start:
            self.draw_if_due(start, again=False)
        for step in range(start, run.max_steps):
            result = self.train_step(step)
            self.monitor.record(step + 1, result)
            last = step + 1 == run.max_steps
            due = (step + 1) % run.save_every == 0 or result.over.save
            saved = last or result.stop_requested or due
            if result.over.draw and not self._draws(step + 1):
                self._draw_after = step + 2
            if saved:
                self.save(step + 1, wait=result.stop_requested)
            drawn, stops = False, result.stop_requested
            try:
                drawn = not stops and self.draw_if_due(step + 1)
            except Stopped:
                stops = True
            if stops:
                self._leave(step + 1, saved)
            if drawn or saved:
                self.monitor.record_phases()
            if (step + 1) % GC_EVERY == 0:
                gc.collect()
                memory_usage.trim()
        self.checkpointer.finish()

    def _leave(self, done: int, saved: bool) -> NoReturn:
        """Raise Stopped after `done` steps, with the checkpoint of them on the disk."""
        if saved:
            self.checkpointer.finish()
        else:
            self.save(done, wait=True)
        stage = f" of stage {self.job.stage}" if self.job.stage else ""
        raise Stopped(f"after step {done} of {self.job.run.max_steps}{stage}")

    def train_step(self, step: int) -> StepResult:
        """Make one step, counted from 0: the updates of other networks, and then the student's.

        Raises:
            NonFinite: on all ranks, if a loss or gradient is not finite and such a step may not be skipped.
        """
        begin_step(step + 1)
        first_update, of_roles = self.job.objective.first_update, {role: [] for role in self.learners}
        for number in range(first_update(step), first_update(step + 1)):
            for role, result in self.update(number, step).items():
                of_roles[role].append(result)
        for name, role in self.job.objective.others.items():
            if role.follows:
                self.learners[name].follow(self.student, role.follows)
        (student,) = of_roles.pop(STUDENT)
        return replace(student, others={role: mean_of(results) for role, results in of_roles.items()})

    def update(self, number: int, step: int) -> dict[str, StepResult]:
        """Make all micro-steps of one update, counted from 0 over the run, and so change the weights.

        Return a result for each network that learned, by role.
        """
        following = None if self._draws(step + 1) else number + len(self.job.objective.updates)
        micro_steps = self.updates.micro_steps(number, following)
        self._seconds_of_compiling = log_compiled(self._seconds_of_compiling)
        set_activity(f"finishing step {step + 1}", of_step=True)
        over, objective = Over(self.saves.over(), self.draws.over()), self.job.objective
        results = {
            role: reduce_over_ranks([of_roles[role] for of_roles in micro_steps], objective, role, over)
            for role in micro_steps[0]
        }
        if any(
            not math.isfinite(r.loss) or self.learners[k].lost_update(r.expert) for k, r in results.items()
        ):
            self.nonfinite.handle(step, number, micro_steps)
            self.updates.carried.put([])  # one may not be finite
        elif STUDENT in results:
            self.updates.carried.put([of_roles[STUDENT].carried_BCFHW for of_roles in micro_steps])
        for role, result in results.items():
            learner = self.learners[role]
            learner.advance_schedules(result.expert)  # they follow the run, not the expert's own updates
            learner.update_ema(result.expert, step + 1)
            results[role] = replace(result, **learner.state(result.expert))
        return results

    def _draws(self, done: int) -> bool:
        """Return whether pictures are due after `done` steps, as they are after the last."""
        return done % self.job.run.sample_every == 0 or done in (self._draw_after, self.job.run.max_steps)

    def draw_if_due(self, done: int, *, again: bool = True) -> bool:
        """Draw the grid of `done` steps if it is due and, unless `again`, missing; return whether it drew."""
        file = self.job.picture(done)
        if not self._draws(done) or not again and collectives.broadcast_object(file.is_file()):
            return False
        set_activity(f"drawing pictures after step {done}")
        with within("draw"):
            self.pictures.draw_teacher()
            with self.draws.doing():
                stats = self.pictures.draw(done)
            collectives.log0("drew %s", file)
            self.monitor.record_pictures(done, stats, file)
        return True

    @within("checkpoint")
    def save(self, done: int, *, begun: bool = False, wait: bool = False) -> Path:
        """Write the checkpoint after `done` steps; return its folder. If `wait`, it is on the disk then.

        Args:
            begun: other networks have updates of the next step already; the last checkpoint stays as it is.
        """
        self.monitor.flush()
        if begun:
            self.checkpointer.finish()
            return next(iter(steps(self.job.output / "checkpoints")), self.job.output)
        state = {"skipped_steps": self.nonfinite.skipped}
        with self.saves.doing():
            carried = self.updates.carried.stored()
            folder = self.checkpointer.save(self.learners, done, self._recorded | state, carried)
            if wait:
                self.checkpointer.finish()
        return folder

    @within("load")
    def resume(self) -> int:
        """Load the checkpoint to continue from, if there is one; return the number of finished steps."""
        folder, allowed = self.job.resume_from, self.job.run.allow_changed or []
        if not folder:
            return 0
        set_activity(f"loading {folder}")
        changed = changed_keys(folder, self._recorded, allowed)
        start = load(self.learners, folder, changed, self.job.objective.others)
        self.updates.carried.resume(folder, changed)
        self.nonfinite.skipped = read_state(folder).get("skipped_steps", 0)
        collectives.log0("resumed   %s: %d of %d steps are done", folder, start, self.job.run.max_steps)
        if collectives.rank() == 0:
            set_newer_aside(self.job.output, folder)
        collectives.barrier()
        return start
