"""`wandistiller train --replay FILE`: repeat alone a step that was not finite, and show where it begins. Changes nothing."""

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from wandistiller import checkpoint, distributed, resume
from wandistiller.batch import Answer
from wandistiller.config import RunConfig
from wandistiller.deepspeed_keys import BATCH_KEYS
from wandistiller.job import Job
from wandistiller.monitors import without_monitors
from wandistiller.nonfinite import Case, Seen, not_finite_B
from wandistiller.phase import doing
from wandistiller.prepare import guided_teacher, prepare
from wandistiller.problems import ConfigError, problem
from wandistiller.shorthands import merged
from wandistiller.student import Student
from wandistiller.train import in_engines, student_models
from wandistiller.trainer import Pass, Trainer

NAMED = 8
"""Modules and parameters that are named; of the others, their number."""


def read_case(flags: dict[str, Any], world: int) -> tuple[Case, RunConfig]:
    """The step that `--replay` names, and its run on `world` ranks, which need not be as many as then.

    Args:
        flags: others win over what the run said, as over a recipe.
    Raises:
        ConfigError: no such step, or its checkpoint is gone.
    """
    flags = dict(flags)
    file = flags.pop("replay")
    if recipe := flags.pop("recipe", None):
        raise ConfigError(problem("command line", "recipe", recipe, f"--replay {file} holds the whole run. Remove it."))
    case = Case.read(Path(file))
    values = {"cache_dir": str(Path(case.run.get("output_dir", "")) / "cache")} | case.run
    if isinstance(ds := values.get("deepspeed_config"), dict):
        values["deepspeed_config"] = _on_ranks(ds, world)
    run = merged(values | {"resume": case.checkpoint}, flags, file)
    if run.max_steps and case.step > run.max_steps:
        raise ConfigError(problem(file, "step", case.step, f"That run ends with step {run.max_steps}; write one up to that."))
    return case, run


def _on_ranks(ds: dict[str, Any], world: int) -> dict[str, Any]:
    """The engine with the same samples in a step, in micro-steps that `world` ranks can share; without its monitors."""
    total, micro, accumulation = (ds.get(key) for key in BATCH_KEYS)
    rest = without_monitors(ds)
    if any(type(n) is not int or n < 1 for n in (total, micro, accumulation)) or total % world:
        return rest  # what is wrong with it is said when the engine is checked
    sizes = (n for n in range(min(micro, total // world), 0, -1) if total % (n * world) == 0)
    return rest | dict(zip(BATCH_KEYS, (total, size := next(sizes), total // (size * world)), strict=True))


class Looked(NamedTuple):
    """One sample of the repeated step."""

    seen: Seen
    teacher: bool | None
    """Whether its answer is finite; None without a teacher."""
    student: bool


class Watch:
    """Which of the student's modules gave what is not finite, in forward order, and which gradients are not finite."""

    def __init__(self) -> None:
        self.modules: dict[str, int] = {}
        """Name -> how many modules had answered before."""
        self.gradients: set[str] = set()
        self._calls = 0

    @contextmanager
    def over(self, student: Student) -> Iterator[None]:
        """Look at one forward and backward pass."""
        self._calls, hooks = 0, []
        for network in (engine.module for engine in student.engines.values()):
            hooks += [m.register_forward_hook(self._answered(name or "the whole network")) for name, m in network.named_modules()]
            hooks += [p.register_hook(self._gradient(name)) for name, p in network.named_parameters() if p.requires_grad]
        yield
        for hook in hooks:
            hook.remove()

    def _answered(self, name: str) -> Any:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            self._calls += 1
            tensors = output if isinstance(output, tuple | list) else [output]
            if any(isinstance(t, Tensor) and not t.isfinite().all() for t in tensors):
                self.modules.setdefault(name, self._calls)

        return look

    def _gradient(self, name: str) -> Any:
        def look(gradient: Tensor) -> None:
            if not gradient.isfinite().all():
                self.gradients.add(name)

        return look


def run(job: Job, case: Case) -> None:
    """The command. Collective."""
    doing("checking the checkpoint")
    folder = resume.verified(job.output, job.run.resume)
    with tempfile.TemporaryDirectory() as aside:  # the run's own folder is not touched
        elsewhere = dataclasses.replace(job.run, output_dir=aside, cache_dir=str(job.cache))
        job = dataclasses.replace(job, resume_from=folder, run=elsewhere)
        data, text, teacher = prepare(job)
        teacher = (teacher or guided_teacher(job, text)) if job.objective.needs_teacher else None
        student = in_engines(job, student_models(job))
        checkpoint.load(student, folder, resume.changed_keys(folder, job.identity, job.run.allow_changed or []))
        looked, watch = _repeat(Trainer(job, data, text, teacher, student), student, case.step - 1)
    rows = sorted(row for theirs in distributed.gather_objects(looked) for row in theirs)
    places: dict[str, int] = {}
    for modules in distributed.gather_objects(watch.modules):
        places |= {name: min(place, places.get(name, place)) for name, place in modules.items()}
    gradients = sorted(set().union(*distributed.gather_objects(watch.gradients)))
    if distributed.rank() == 0:
        print("\n".join(_report(case, rows, sorted(places, key=places.get), gradients)), flush=True)


def _repeat(trainer: Trainer, student: Student, step: int) -> tuple[list[Looked], Watch]:
    """Forward and backward of this rank's samples; no weight changes."""
    looked, watch = [], Watch()
    for micro in range(trainer.job.batch.accumulation):
        with watch.over(student):
            done = trainer.forward(step, micro)
            looked += _looked(done, trainer.see(step, micro, done.loss_TB.detach()))
            trainer.backward(step, done)
    return looked, watch


def _looked(done: Pass, seen: list[Seen]) -> list[Looked]:
    student_B = _finite_B(list(done.answers.values()))
    teacher_B = _finite_B([done.target]) if done.target else [None] * len(seen)
    return [Looked(*row) for row in zip(seen, teacher_B, student_B, strict=True)]


def _finite_B(answers: list[Answer]) -> list[bool]:
    """For each sample, whether all that was said of it is finite."""
    return [
        not any(bad) for bad in zip(
            *(not_finite_B(x.detach()).tolist() for a in answers for x in (a.v_BCFHW, *a.features.values())), strict=True)
    ]  # fmt: skip


def _report(case: Case, rows: list[Looked], modules: list[str], gradients: list[str]) -> list[str]:
    """What a person reads."""
    then = {s.sample: s for s in case.samples}
    words = {True: "yes", False: "NO", None: "-"}
    lines = [f"step {case.step}, weights of {case.checkpoint}; is it finite?",
             f"{'sample':>10} {'sigma':>8} {'loss':>12} {'loss then':>12}  x0   text teacher student  prompt"]  # fmt: skip
    for seen, teacher, student in rows:
        sigma = "/".join(f"{s:.4f}" for s in seen.sigma.values())
        before = _number(then[seen.sample].losses) if seen.sample in then else "-"
        parts = [words[name not in seen.not_finite] for name in ("x0", "text")]
        lines.append(f"{seen.sample:>10} {sigma:>8} {_number(seen.losses):>12} {before:>12}  {parts[0]:<4} {parts[1]:<4} "
                     f"{words[teacher]:<7} {words[student]:<7}  {seen.media or seen.prompt}")  # fmt: skip
    again = [row.seen.sample for row in rows if "loss" in row.seen.not_finite]
    same = "as then" if again == [s.sample for s in case.bad] else f"then {_some([str(s.sample) for s in case.bad])}"
    return [
        *lines,
        f"samples whose loss is not finite: {_some(list(map(str, again)))}; {same}",
        f"student's modules whose output is not finite, in forward order: {_some(modules)}",
        f"student's parameters whose gradient is not finite: {_some(gradients)}",
    ]


def _number(losses: dict[str, float | None]) -> str:
    return "/".join("not finite" if loss is None else f"{loss:.6g}" for loss in losses.values())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more if names else "none"
