"""Reports of a run while it trains."""

from pathlib import Path

from wandistiller.config.job import Job
from wandistiller.distributed import collectives
from wandistiller.engine.monitors import Monitors
from wandistiller.monitoring import memory_usage
from wandistiller.monitoring.alarms import Alarms
from wandistiller.monitoring.health_checks import SampleStats
from wandistiller.monitoring.memory_usage import Usage
from wandistiller.monitoring.metrics import SAMPLES, Metrics, keep_lines, read_lines, scalars
from wandistiller.training.step_result import StepResult
from wandistiller.utils.logging import step_seconds


class Monitor:
    """Writes metrics.jsonl, DeepSpeed's monitors, alarms.jsonl and memory.json, on rank 0."""

    def __init__(self, job: Job, monitors: Monitors):
        limits = [limit for term in job.objective.terms for limit in term.limits]
        self._job, self._monitors, self._alarms = job, monitors, Alarms(job.output, limits)
        self._metrics: Metrics | None = None
        self._ended: dict[str, list[Usage]] = {}
        """Memory peaks, by rank, of the phases that ended since the last step."""

    def start(self, step: int) -> None:
        """Begin after `step` steps: drop the lines of later ones, which are repeated. Collective."""
        job = self._job
        file, run = job.output / "metrics.jsonl", job.run
        self._metrics = Metrics(file, start=step, max_steps=run.max_steps, global_batch=job.batch.total)
        self._alarms.go_on_from(step, read_lines(file, step))
        keep_lines(job.output / SAMPLES, step)
        self.record_phases()

    def record(self, step: int, result: StepResult) -> None:
        """Write the result of optimizer step `step`, counted from 1."""
        memory = self._ended | {"train": [rank.memory for rank in result.ranks]}
        line = self._metrics.step(step, result.metrics(), memory, step_seconds())
        self._monitors.record(step, scalars(line))
        seconds = [rank.seconds for rank in result.ranks]
        self._alarms.step(step, result.loss, result.grad_norm, seconds, result.watched, result.expert.value)
        self._ended = {}

    def record_phases(self) -> None:
        """Write the peak memory of ended phases to memory.json, and log it with the next step. Collective."""
        ranks = collectives.gather_objects(memory_usage.peaks)
        self._ended |= {phase: [peaks[phase] for peaks in ranks] for phase in memory_usage.peaks}
        if collectives.rank() == 0:
            memory_usage.write(self._job.output, self._ended)

    def record_pictures(self, step: int, stats: dict[str, SampleStats], file: Path) -> None:
        """Check the samples drawn after `step` steps, by row, and show their grid on the monitors."""
        if len(stats) > 1:
            self._alarms.samples(step, stats["teacher"], stats["student"])
        self._monitors.show(step, file)

    def flush(self) -> None:
        """Flush metrics.jsonl to the disk, before a checkpoint of the same step."""
        if self._metrics:
            self._metrics.flush()
