"""Resources that a run needs more of than this machine has free, before anything is loaded."""

from wandistiller.config.job import Job
from wandistiller.distributed import collectives
from wandistiller.planner.disk import disk_demands
from wandistiller.planner.machine import demands, machine_now
from wandistiller.planner.peak_memory import plan
from wandistiller.planner.phase_peak import most
from wandistiller.utils.system_memory import GIB


def shortages(stages: list[Job]) -> list[str]:
    """List on the first rank of each node each memory and disk of which a recipe's plan needs too much.

    The reserve that `plan` and `auto` leave is not counted: such a run may still succeed.
    """
    if collectives.local_rank() != 0:
        return []
    machine, problems = machine_now(), []
    for job in stages:
        takes = most(plan(job, machine))
        *memory, _ = demands(takes, machine)
        # the last one's counts the files of all
        disks = disk_demands(job, machine, machine.ranks_on_node * takes.disk) if job is stages[-1] else []
        which = f"Stage {job.output.name}" if len(stages) > 1 else "The run"
        short = [d for d in (*memory, *disks) if d.need > d.free]
        problems += [f"{which} needs {d} by its plan, and {d.free / GIB:.1f} GiB are free." for d in short]
    return problems
