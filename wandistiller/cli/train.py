"""`wandistiller prepare` and `train`: check everything on every rank, agree, then start."""

import logging
from typing import Any

from wandistiller.cli.failures import Failures
from wandistiller.config.job import Job
from wandistiller.config.shorthands import read_run
from wandistiller.config.validate import read_job
from wandistiller.distributed import collectives
from wandistiller.distributed.shutdown import STOP, stopping
from wandistiller.planner.disk import fetch_problems, log_disk_use
from wandistiller.planner.resolve_auto import resolve_auto
from wandistiller.planner.shortage import shortages
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import lock, sweep
from wandistiller.utils.logging import add_log_file, setup_logging
from wandistiller.wan.pipeline import require_weights

ELSEWHERE = (
    "What helps: `wandistiller plan` says what takes how much; if the run is for another machine, "
    "describe it there (`--gpus`, `--gpu_memory`, `--host_memory`, `--disk`)."
)


def run(command: str, flags: dict[str, Any], failures: Failures) -> None:
    """Run `prepare` or `train`. Collective."""
    with collectives.raise_on_all_ranks():
        job = read_job(read_run(flags.pop("recipe", None), flags), collectives.world_size())
    setup_logging(job.run.log_level)
    with collectives.raise_on_all_ranks():
        job = resolve_auto(job)
    if job.run.dry_run:
        _dry_run(job)
        return
    first = collectives.rank() == 0
    with collectives.raise_on_all_ranks():
        require_weights(job.folder)
    for line in collectives.gather_problems(shortages(job)):
        collectives.log0("%s", line, level=logging.WARNING)
    with collectives.raise_on_all_ranks():  # once no rank finds anything wrong
        output_lock = lock(job.output) if first else None
    for folder in (job.output, job.cache) if first else ():
        sweep(folder)
    stopping.install(job.output / STOP if first else None)
    collectives.init(job.run.log_level)
    add_log_file(job.output / "logs" / f"rank_{collectives.rank()}.log")
    collectives.watchdog.timeout = job.run.timeout
    failures.set_job(job)
    collectives.watchdog.failure_context = failures.explain
    from wandistiller.training import distil, prepare  # here, because it takes seconds

    {"prepare": prepare, "train": distil}[command].run(job)
    if output_lock:
        output_lock.close()


def _dry_run(job: Job) -> None:
    """Log the run and check what can be known before it. Collective.

    Raises:
        ConfigError: a folder without all weights, or less memory or disk than the plan needs. At a real start
            the latter is a warning, because it is an estimate.
    """
    for line in job.summary():
        collectives.log0(line)
    log_disk_use(job)
    with collectives.raise_on_all_ranks():
        problems = fetch_problems(job)
        if not job.folder.revision:  # the run itself fetches those of a hub id
            try:
                require_weights(job.folder)
            except ConfigError as error:
                problems += error.problems
        if short := shortages(job):
            problems = [*problems, *short, ELSEWHERE]
        if problems:
            raise ConfigError(*problems)
    collectives.log0("dry run: nothing was loaded or written")
