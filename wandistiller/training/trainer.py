"""The training loop: data, teacher's target, student's prediction, loss, step; reports and checkpoints."""

import gc
import math
from dataclasses import replace
from pathlib import Path

from wandistiller.checkpoint.checkpointer import Checkpointer
from wandistiller.checkpoint.loading import load, read_state
from wandistiller.checkpoint.manifest import set_aside_newer
from wandistiller.checkpoint.resume import changed_keys
from wandistiller.config.job import Job
from wandistiller.data.cached_dataset import CachedData
from wandistiller.data.micro_batches import MicroBatches
from wandistiller.data.text_cache import TextCache
from wandistiller.distributed import collectives
from wandistiller.distributed.shutdown import Stopped
from wandistiller.monitoring import memory_usage
from wandistiller.monitoring.memory_snapshot import MemoryProfile
from wandistiller.monitoring.memory_usage import within
from wandistiller.student.student import Student
from wandistiller.teacher.base import Teacher
from wandistiller.training.monitor import Monitor
from wandistiller.training.nonfinite import NonFiniteHandler, propagate_nonfinite
from wandistiller.training.pictures import PictureDrawer
from wandistiller.training.step_result import READING, MicroStepResult, StepResult, reduce_over_ranks
from wandistiller.utils.logging import activity, begin_step, set_activity

GC_EVERY = 50
"""Steps between collections of reference cycles. Python 3.11 by itself waits for 140,000 new objects, because
libraries keep 560,000. Freed memory then also goes back to the system, before it is fragmented."""


class Trainer:
    """Trains `student` towards `teacher` on `data`; every method is collective.

    The student is the one network that learns; a critic next to it will be a second one with the same
    methods: predict, backward, step, advance_schedules, update_ema, and turns of its own in `train_step`.
    """

    def __init__(
        self, job: Job, data: CachedData, text: TextCache, teacher: Teacher | None, student: Student
    ):
        """`teacher` is None for an objective that needs none."""
        self.job, self.data, self.teacher, self.student = job, data, teacher, student
        self.batches = MicroBatches(data, job.schedule, job.batch, job.objective.states)
        self.monitor = Monitor(job, student.monitors)
        self.pictures = PictureDrawer(job, data, text, teacher, student)
        self.checkpointer = Checkpointer(job.output, job.run.keep_checkpoints)
        self.nonfinite = NonFiniteHandler(job, self.batches, student, self.save)
        self._memory_profile = MemoryProfile(job)

    @within("train")
    def train(self) -> None:
        """Run from the last checkpoint, if there is one, to the last step.

        Raises:
            Stopped: on all ranks, after a checkpoint, if any of them received a request to stop.
            NonFinite: on all ranks, after a checkpoint of the steps before; see `NonFiniteHandler`.
        """
        run, start = self.job.run, self.resume()
        self.monitor.start(start)
        self._memory_profile.warn_if_past(start)
        if start:
            self.draw_if_due(start, again=False)
        for step in range(start, run.max_steps):
            with self._memory_profile.during(step + 1):
                result = self.train_step(step)
            self.monitor.record(step + 1, result)
            last = step + 1 == run.max_steps
            saved = last or result.stop_requested or (step + 1) % run.save_every == 0
            if saved:
                self.save(step + 1, wait=result.stop_requested)
            if result.stop_requested:
                raise Stopped(f"after step {step + 1} of {run.max_steps}")
            if self.draw_if_due(step + 1) or saved:
                self.monitor.record_phases()
            if (step + 1) % GC_EVERY == 0:
                gc.collect()
                memory_usage.trim()
        self.checkpointer.finish()

    def train_step(self, step: int) -> StepResult:
        """Make one optimizer step, counted from 0: all micro-steps forward and backward, then the update.

        Raises:
            NonFinite: on all ranks, if the loss or gradient is not finite and such a step may not be skipped.
        """
        begin_step(step + 1)
        micro_steps = [self.micro_step(step, micro) for micro in range(self.job.batch.accumulation)]
        set_activity(f"finishing step {step + 1}")
        result = reduce_over_ranks(micro_steps, self.job.objective)
        if not math.isfinite(result.loss) or self.student.lost_update(result.expert):
            self.nonfinite.handle(step, micro_steps)
        self.student.advance_schedules(result.expert)  # they follow the run, not the expert's own turns
        self.student.update_ema(result.expert, step + 1)
        return replace(result, **self.student.state(result.expert))

    def micro_step(self, step: int, micro: int) -> MicroStepResult:
        """Make a forward and a backward pass on this rank's samples."""
        with activity(READING):
            batches = self.batches.batch(step, micro)
            first = next(iter(batches.values()))
        objective, student = self.job.matched_objective, self.student
        with activity("the teacher's forward pass"):
            targets = objective.targets(self.teacher, batches, student.velocity, self.job.schedule)
        with activity("the student's forward pass"):
            predictions = self.student.predict(batches)
            loss_TB = objective.losses(predictions, targets, batches)
        with activity("the student's backward pass"):
            loss = objective.total(loss_TB).mean()
            self.student.backward(first.expert, propagate_nonfinite(loss))
        with activity("the optimizer's step"):
            self.student.step(first.expert)  # updates on the last micro-step only
        return MicroStepResult(loss_TB.detach(), first.sigma_B, first.expert)

    def draw_if_due(self, done: int, *, again: bool = True) -> bool:
        """Draw the grid of `done` steps if it is due and, unless `again`, missing; return whether it drew."""
        run, file = self.job.run, self.job.picture(done)
        due = done % run.sample_every == 0 or done == run.max_steps
        if not due or not again and collectives.broadcast_object(file.is_file()):
            return False
        set_activity(f"drawing pictures after step {done}")
        with within("draw"):
            rows = self.pictures.draw(done)
            collectives.log0("drew %s", file)
            self.monitor.record_pictures(done, rows, file)
        return True

    @within("checkpoint")
    def save(self, done: int, *, wait: bool = False) -> Path:
        """Write the checkpoint after `done` steps; return its folder. If `wait`, it is on the disk then."""
        self.monitor.flush()
        job, skipped = self.job, self.nonfinite.skipped
        # without folders, so that it stays true when the run is moved
        run = {key: value for key, value in job.resolved.items() if not key.endswith("_dir")}
        state = {"identity": job.identity, "facts": job.provenance, "run": run, "skipped_steps": skipped}
        folder = self.checkpointer.save(self.student, done, state)
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
        start = load(self.student, folder, changed_keys(folder, self.job.identity, allowed))
        self.nonfinite.skipped = read_state(folder).get("skipped_steps", 0)
        collectives.log0("resumed   %s: %d of %d steps are done", folder, start, self.job.run.max_steps)
        if collectives.rank() == 0:
            for newer in set_aside_newer(self.job.output / "checkpoints", start):
                collectives.log0("set aside %s, which is newer", newer)
        collectives.barrier()
        return start
