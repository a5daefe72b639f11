"""Optimizer steps whose loss or gradient is not finite: no weight changes, and the samples are named."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wandistiller.batch import STUDENT
from wandistiller.config.job import Job
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.distributed import collectives
from wandistiller.engine.workarounds import uncount_skipped_step
from wandistiller.monitoring.metrics import finite_or_none
from wandistiller.student.learner import Learner
from wandistiller.training.step_result import MicroStepResult
from wandistiller.utils.errors import NonFinite
from wandistiller.utils.files import write_json

FOLDER = "nonfinite"
"""Folder in OUTPUT with a file for each such step."""
MOST_NAMED = 4
"""Samples that a message names; the file has all of them."""


class SampleReport(NamedTuple):
    """One sample of a non-finite step."""

    sample: int
    """Global index."""
    rank: int
    micro_step: int
    expert: str
    prompt: str
    media: str | None
    sigma: dict[str, float]
    """sigma by kind of states."""
    losses: dict[str, float | None]
    """Unweighted loss by term; None is not finite."""
    not_finite: list[str]
    """Non-finite tensors, among: loss, x0, text."""

    def __str__(self) -> str:
        sigma = ", ".join(f"{value:.4f}" for value in self.sigma.values())
        causes = {"x0": "its cached latent is not finite", "text": "its cached text is not finite"}
        parts = [self.media or repr(self.prompt), *(causes[n] for n in self.not_finite if n in causes)]
        where = f"sample {self.sample} on rank {self.rank}, sigma {sigma}, expert {self.expert}"
        return f"{where}: {'; '.join(parts)}"


def nonfinite_B(x: Tensor) -> Tensor:
    """Mark the samples that hold a number that is not finite: bool, shape (B,)."""
    return ~x.flatten(1).isfinite().all(1)


class NonFiniteStep(NamedTuple):
    """A step that was dropped, as OUTPUT/nonfinite/step_*.json has it."""

    step: int
    """Counted from 1."""
    checkpoint: str
    """Folder of the checkpoint of the state before the step, which is also that after it."""
    samples: list[SampleReport]
    """All samples of the step, on all ranks."""
    update: str = ""
    """Of another network than the student its role and, over the run, its number: critic_12."""

    def file(self, output: Path) -> Path:
        name = "_".join(filter(None, (f"step_{self.step:08d}", self.update)))
        return output / FOLDER / f"{name}.json"

    def messages(self, output: Path) -> list[str]:
        """Describe the step, and each of the first MOST_NAMED samples."""
        bad, at = [s for s in self.samples if "loss" in s.not_finite], f"step {self.step}"
        what = f"the loss of {len(bad)} of {len(self.samples)} samples is not finite"
        if not bad:
            what = "each loss is finite, but the gradient is not, or is too large for its norm"
        beyond = [f"{len(bad) - MOST_NAMED} more"] if len(bad) > MOST_NAMED else []
        first = f"{what}. Nothing was learned from it; see {self.file(output)}."
        return [f"{at}: {text}" for text in (first, *bad[:MOST_NAMED], *beyond)]

    def suggestions(self, job: Job) -> list[str]:
        """Suggest remedies."""
        params = job.student_engine.section("optimizer.params")
        changed = " ".join(key for key in ("optimizer", "scheduler") if key in job.student_engine.raw)
        lower = "a lower learning rate"
        if "lr" in params:
            lower += f" (--lr {params['lr'] / 3:.1g} --allow_changed {changed})"
        limit = most_skipped(job.run.on_nonfinite)
        skip = f"more than {limit} such steps left out (--on_nonfinite {2 * limit})"
        if not limit:
            skip = "such steps left out (--on_nonfinite skip)"
        remedies = [f"The same command with {lower}, or with {skip}, goes on from {self.checkpoint}."]
        if any({"x0", "text"} & set(sample.not_finite) for sample in self.samples):
            remedy = f"remove {job.cache}; the same command makes it again."
            remedies.insert(0, f"Cached tensors are not finite: {remedy}")
        return remedies


def most_skipped(setting: str) -> int:
    """Return how many steps of the whole run may be skipped, by the recipe's `on_nonfinite`."""
    return int({"stop": "0", "skip": "10"}.get(setting, setting))


class NonFiniteHandler:
    """Names the samples of a non-finite step, then stops the run or counts the step as skipped."""

    def __init__(
        self, job: Job, batches: MicroBatches, learners: dict[str, Learner], save: Callable[..., Path]
    ):
        """Take `save(done, begun=..., wait=...)`, the trainer's."""
        self._job, self._batches, self._learners, self._save = job, batches, learners, save
        self.skipped = 0
        """Skipped steps of the whole run, saved in its checkpoints."""

    def handle(self, step: int, number: int, micro_steps: list[dict[str, MicroStepResult]]) -> None:
        """Write a step, counted from 0, then stop or count it as skipped, by `on_nonfinite`. Collective.

        Args:
            number: of the update, counted from 0 over the run.
            micro_steps: results of an update by the role that was to learn.

        Raises:
            NonFinite: on all ranks, after a checkpoint of the steps before, if it may not be skipped.
        """
        run, output, objective = self._job.run, self._job.output, self._job.objective
        experts = {role: result.expert for role, result in micro_steps[-1].items()}
        engines = [self._learners[role].engine(expert) for role, expert in experts.items()]
        learned = any(engine.was_step_applied() for engine in engines)
        for engine in engines:
            if not engine.was_step_applied():
                uncount_skipped_step(engine)
        reports = [r for micro, m in enumerate(micro_steps) for r in self._describe(number, micro, m)]
        is_first = self._learners[STUDENT].ranks.place == 0  # of those that share samples
        of_ranks = collectives.gather_objects(reports if is_first else [])
        samples = sorted(report for of_rank in of_ranks for report in of_rank)
        stops = self.skipped >= most_skipped(run.on_nonfinite)
        begun = learned or number > objective.first_update(step)
        checkpoint = self._save(step, begun=begun, wait=stops).resolve()
        role = objective.role_of(number)
        of_another = "" if role == STUDENT else f"{role}_{number}"
        dropped = NonFiniteStep(step + 1, str(checkpoint), samples, of_another)
        if collectives.rank() == 0:
            samples = [report._asdict() for report in dropped.samples]
            write_json(dropped.file(output), dropped._asdict() | {"samples": samples})
        if stops:
            raise NonFinite(*dropped.messages(output), *dropped.suggestions(self._job))
        self.skipped += 1
        for line in dropped.messages(output):
            collectives.log0("skipped   %s", line)

    def _describe(self, number: int, micro: int, results: dict[str, MicroStepResult]) -> list[SampleReport]:
        """Describe this rank's samples of a micro-step."""
        objective, role = self._job.objective, self._job.objective.role_of(number)
        batches = objective.draw(role, self._batches, number, micro)
        begun = objective.begun(role, number, self._job.schedule)
        indices = self._batches.indices(begun, micro)
        first, loss_TB = next(iter(batches.values())), torch.cat([r.loss_TB for r in results.values()])
        names = [name for learned in results for name in objective.weights(learned)]
        bad = {
            "loss": ~loss_TB.isfinite().all(0),
            "text": torch.stack([nonfinite_B(t) for t in first.conditioning.tensors()]).any(0),
            "x0": torch.stack([nonfinite_B(b.x_t_BCFHW) for b in batches.values()]).any(0),
        }
        return [
            SampleReport(
                sample=indices[i],
                rank=collectives.rank(),
                micro_step=micro,
                expert=first.expert.value,
                prompt=item.prompt,
                media=str(item.media) if item.media else None,
                sigma={kind: batch.sigma_B[i].item() for kind, batch in batches.items()},
                losses=finite_or_none({name: loss_TB[k, i].item() for k, name in enumerate(names)}),
                not_finite=[name for name, bad_B in bad.items() if bad_B[i]],
            )
            for i, item in enumerate(self._batches.items(begun, micro))
        ]
