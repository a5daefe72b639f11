"""Resources that a run needs more of than this machine has free, before anything is loaded."""

from typing import NamedTuple

from wandistiller.checkpoint.loading import read_state
from wandistiller.config.job import Job
from wandistiller.distributed.device import local_rank
from wandistiller.planner.disk import disk_demands
from wandistiller.planner.machine import demands, machine_now
from wandistiller.planner.peak_memory import plan
from wandistiller.planner.phase_peak import moments, most
from wandistiller.utils.system_memory import amount

TOO_MUCH = 1.2
"""Times the free memory that a plan, which is an estimate, may need for its run to be started."""
INSIST = "despite_plan"
"""Setting that starts it nevertheless."""
HELPS = (
    "What helps: `--deepspeed_config auto --teacher_deepspeed_config auto` take what fits, and `wandistiller "
    f"plan` says what takes how much. `--{INSIST}` starts the run nevertheless."
)


class Shortages(NamedTuple):
    """Lines for people."""

    far: list[str]
    """Memory of which the plan needs TOO_MUCH times what is free, or more."""
    of_memory: list[str]
    """Memory of which it needs more than is free, but less than that."""
    of_disk: list[str]


def shortages(stages: list[Job], *, preparing: bool = False) -> Shortages:
    """List on the first rank of each node each memory and disk of which a recipe's plan needs too much.

    The reserve that `plan` and `auto` leave is not counted: such a run may still succeed. A stage whose steps
    are done needs nothing.

    Args:
        preparing: the run ends when its cache is full.
    """
    found = Shortages([], [], [])
    if local_rank() != 0:
        return found
    machine = machine_now()
    for job in stages:
        which = f"Stage {job.output.name}" if len(stages) > 1 else "The run"
        phases = plan(job, machine)
        if preparing:
            phases = {"prepare": phases["prepare"]}
        done = job.resume_from and read_state(job.resume_from)["step"] >= job.run.max_steps
        *memory, _ = demands([] if done else moments(phases), machine)
        # the last one's counts the files of all
        swapped = machine.ranks_on_node * most(phases).disk
        disks = disk_demands(job, machine, swapped) if job is stages[-1] else []
        for demand in (*memory, *disks):
            if demand.need > demand.free:
                line = f"{which} needs {demand} by its plan, and {amount(demand.free)} are free."
                far = demand.need >= TOO_MUCH * demand.free
                (found.of_disk if demand in disks else found.far if far else found.of_memory).append(line)
    return found
