"""What is measured before training: which layers and units of the teacher a student keeps, and how near it is without training.

All ranks see the same probes, so they agree; what only the teacher's holder can measure is sent to the others.
"""

from typing import Any

from wandistiller import distributed
from wandistiller.activations import measure
from wandistiller.batch import Batch, Expert
from wandistiller.cuts import Cuts
from wandistiller.data import CachedData
from wandistiller.files import write_json
from wandistiller.importance import importance, write_importance
from wandistiller.job import Job
from wandistiller.objectives import Teacher
from wandistiller.phase import doing
from wandistiller.probes import holder, networks, probes, unguided, velocity_error
from wandistiller.start import plan_cuts
from wandistiller.student import Student
from wandistiller.student_config import IMPORTANCE, WIDTH_KEYS, kept_layers, source_experts, stands_for
from wandistiller.wan import count_parameters


def needs_measuring(job: Job) -> bool:
    """Whether the student's start depends on the teacher in use; a resumed run's student is in its checkpoint."""
    return not job.resume_from and (job.student.keep_layers == IMPORTANCE or _is_cut(job))


def _is_cut(job: Job) -> bool:
    return job.student.init == "teacher" and any(job.student_transformer[k] != job.folder.config[k] for k in WIDTH_KEYS)


def choose(job: Job, data: CachedData, teacher: Teacher) -> tuple[Job, dict[Expert, Cuts]]:
    """The run with its layers chosen, and how each network is cut; written to OUTPUT/lineage.json. Collective."""
    doing("measuring the teacher")
    teacher, batches = unguided(teacher), probes(job, data)
    if job.student.keep_layers == IMPORTANCE:
        job = job.with_layers(_important(job, teacher, batches))
        if distributed.rank() == 0:
            job.write_resolved()
    cuts = {}
    for expert in job.student_experts if _is_cut(job) else ():
        served = source_experts(job.student, job.folder, expert)
        used = [b for b in batches if b.expert in served]
        distributed.log0("measuring what flows through the teacher: %d samples", sum(len(b.sigma_B) for b in used))
        modules = {module for e, module in networks(teacher).items() if e in served}
        measured = measure(modules, lambda used=used: [teacher.velocity(b) for b in used])
        here = distributed.rank() == holder(teacher)
        plan = plan_cuts(job.student, job.student_transformer, job.folder, expert, measured) if here else None
        cuts[expert] = distributed.from_rank(holder(teacher), plan)
    return job, cuts


def _important(job: Job, teacher: Teacher, batches: list[Batch]) -> list[int]:
    experts = {source for e in job.student_experts for source in source_experts(job.student, job.folder, e)}
    layers, keep = job.folder.config["num_layers"], job.student_transformer["num_layers"]
    rounds = importance(teacher, [b for b in batches if b.expert in experts], layers, keep)
    distributed.log0("kept      layers %s of %d; see %s", list(rounds[-1]), layers, job.output / "importance.md")
    if distributed.rank() == 0:
        write_importance(job.output, rounds, (e for e in Expert if e in experts))
    return list(rounds[-1])


def write_lineage(job: Job, cuts: dict[Expert, Cuts]) -> None:
    """Write OUTPUT/lineage.json: what each network and block of the student was made of. On rank 0."""
    if distributed.rank() or job.student.init != "teacher":
        return
    kept, layers = kept_layers(job.student, job.student_transformer, job.folder), job.folder.config["num_layers"]
    found: dict[str, Any] = {}
    for expert in job.student_experts:
        axes = cuts.get(expert, Cuts()).axes
        found[expert.value] = {
            "made_of": [e.value for e in source_experts(job.student, job.folder, expert)],
            "kept_layers": kept,
            "stands_for": stands_for(kept, layers),
            "cut": {name: axis.in_words() for name, axis in axes.items()},
        }
    write_json(job.output / "lineage.json", found)


def report(job: Job, data: CachedData, teacher: Teacher, student: Student) -> None:
    """Say how near the student is to the teacher's text branch before any training: OUTPUT/student_start.json. Collective."""
    doing("measuring the student before training")
    error = velocity_error(probes(job, data), unguided(teacher), student.velocity)
    config = job.student_transformer
    numbers = {
        "parameters": {"teacher": sum(count_parameters(c) for c in job.folder.configs.values()),
                       "student": count_parameters(config) * len(job.student_experts)},
        "relative_velocity_error": error.relative(),
        "relative_velocity_error_by_sigma": error.by_sigma(),
    }  # fmt: skip
    distributed.log0("start     relative velocity error before training %.4f (1 is an answer of zeros)", error.relative())
    if distributed.rank() == 0:
        write_json(job.output / "student_start.json", numbers)
