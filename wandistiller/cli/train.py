"""`wandistiller prepare` and `train`: check everything on every rank, agree, then start."""

from typing import Any

from wandistiller.cli.failures import Failures
from wandistiller.config.shorthands import read_run
from wandistiller.config.validate import read_job
from wandistiller.distributed import collectives
from wandistiller.distributed.shutdown import STOP, stopping
from wandistiller.planner.disk import log_disk_use
from wandistiller.planner.resolve_auto import resolve_auto
from wandistiller.utils.files import lock, sweep
from wandistiller.utils.logging import add_log_file, setup_logging
from wandistiller.wan.pipeline import require_weights


def run(command: str, flags: dict[str, Any], failures: Failures) -> None:
    """Run `prepare` or `train`. Collective."""
    with collectives.raise_on_all_ranks():
        job = read_job(read_run(flags.pop("recipe", None), flags), collectives.world_size())
    setup_logging(job.run.log_level)
    with collectives.raise_on_all_ranks():
        job = resolve_auto(job)
    if job.run.dry_run:
        for line in job.summary():
            collectives.log0(line)
        log_disk_use(job)
        collectives.log0("dry run: nothing was loaded or written")
        return
    first = collectives.rank() == 0
    with collectives.raise_on_all_ranks():
        require_weights(job.folder)
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
