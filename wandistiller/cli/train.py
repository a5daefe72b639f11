"""`wandistiller prepare` and `train`: check everything on every rank, agree, then start."""

import logging
import os

from wandistiller.cli.failures import Failures
from wandistiller.cli.flags import RunFlags
from wandistiller.config.identity import require_same
from wandistiller.config.job import Job
from wandistiller.config.recipe import read_recipe
from wandistiller.config.run_config import RunConfig
from wandistiller.config.stages import read_jobs, whole_output
from wandistiller.config.summary import precision_lines, summary
from wandistiller.distributed import collectives
from wandistiller.distributed.device import emulates_bf16, make_deterministic
from wandistiller.distributed.shutdown import STOP, stopping
from wandistiller.export.output import check_ends
from wandistiller.planner.disk import HELPS, Shortages, fetch_problems, log_disk_use, shortages
from wandistiller.planner.resolve_auto import decide_auto
from wandistiller.utils.errors import ConfigError, Problem, collecting
from wandistiller.utils.files import delete_leftovers, lock
from wandistiller.utils.logging import add_log_file, setup_logging

ELSEWHERE = (
    "If the run is for another machine, ask `wandistiller plan`: "
    "describe it there (`--gpus`, `--gpu_memory`, `--host_memory`, `--disk`)."
)


def run(command: str, flags: RunFlags, failures: Failures) -> None:
    """Run `prepare` or `train`. Collective."""
    with collectives.raise_on_all_ranks():
        emulated = collectives.on_any_rank(emulates_bf16())
        recipe = read_recipe(flags.recipe, flags.settings)
        stages = read_jobs(recipe, collectives.world_size(), emulated=emulated)
    of_all = stages[0].run
    setup_logging(of_all.log_level)
    collectives.watchdog.timeout = of_all.timeout
    require_same(stages, weights=False)
    stages = decide_auto(stages)
    if of_all.dry_run:
        _dry_run(stages, command)
        return
    first, output = collectives.rank() == 0, whole_output(stages)
    _require_weights(stages)
    short = shortages(stages, preparing=command == "prepare")
    with collectives.raise_on_all_ranks():
        if problems := _problems(stages, command) + _refused(short, of_all):
            raise ConfigError(*problems)
    for line in collectives.gather_problems([line for lines in short for line in lines]):
        collectives.log0("%s", line, level=logging.WARNING)
    with collectives.raise_on_all_ranks():  # once no rank finds anything wrong
        folders = dict.fromkeys([output, *(job.output for job in stages)]) if first else {}
        locks = [lock(folder) for folder in folders]
    for folder in (output, stages[0].cache) if first else ():
        delete_leftovers(folder)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(stages[0].cache / "compiled"))
    if of_all.deterministic:
        make_deterministic()
    stopping.install(output / STOP if first else None)
    collectives.init(of_all.log_level)
    collectives.watchdog.failure_context = failures.explain

    def begin(job: Job) -> None:
        add_log_file(job.output / "logs" / f"rank_{collectives.rank()}.log")
        failures.job = job
        if command == "train" and not job.is_spent:
            log_disk_use(job)

    from wandistiller.training import distil, prepare  # here, because it takes seconds

    {"prepare": prepare, "train": distil}[command].run(stages, begin)
    for held in locks:
        held.close()


def _require_weights(stages: list[Job]) -> None:
    """Check the teachers' weights; those of the hub are fetched by one rank of each node. Collective."""
    first = collectives.node_peers()[0] == collectives.rank()
    for is_mine in (first, not first):
        with collectives.raise_on_all_ranks():
            for folder in {job.folder.path: job.folder for job in stages}.values() if is_mine else ():
                folder.require_weights()


def _problems(stages: list[Job], command: str) -> list[Problem]:
    """List, on rank 0, the ends of runs that cannot be written."""
    problems: list[Problem] = []
    if command == "train" and collectives.rank() == 0:
        with collecting(problems):
            check_ends(stages, whole_output(stages))
    return problems


def _refused(short: Shortages, run: RunConfig) -> list[str]:
    """Return the memory for whose lack the run does not start, if nobody insists on it, and what helps."""
    return [*short.far, HELPS] if short.far and not run.despite_plan else []


def _dry_run(stages: list[Job], command: str) -> None:
    """Log the runs and check what can be known before them. Collective.

    Raises:
        ConfigError: a folder without all weights, less disk than the plan needs, which at a real start is a
            warning, or so little memory that a real start is refused.
    """
    for job in stages:
        for line in [*summary(job), *precision_lines(job)]:
            collectives.log0(line)
    log_disk_use(stages[-1])
    short = shortages(stages, preparing=command == "prepare")
    with collectives.raise_on_all_ranks():
        problems = []
        for job in stages:
            problems += fetch_problems(job)
            if not job.folder.revision:  # the run itself fetches those of a hub id
                with collecting(problems):
                    job.folder.require_weights()
        problems += _problems(stages, command)
        if lacking := [*_refused(short, stages[0].run), *short.of_disk]:
            problems += [*lacking, ELSEWHERE]
        if problems:
            raise ConfigError(*dict.fromkeys(problems))
    for line in collectives.gather_problems([*short.far, *short.of_memory]):
        collectives.log0("%s", line, level=logging.WARNING)
    collectives.log0("dry run: nothing was loaded or written")
