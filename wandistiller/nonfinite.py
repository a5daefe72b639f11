"""A step whose loss or gradient is not finite: nothing is learned from it, its samples are named, and it is kept for replay."""

import math
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from wandistiller.batch import Batch
from wandistiller.checkpoint import STATE
from wandistiller.config import read_json
from wandistiller.files import write_json
from wandistiller.items import Item
from wandistiller.job import Job
from wandistiller.metrics import finite_or_none
from wandistiller.problems import ConfigError, problem

FOLDER = "nonfinite"
"""In the output folder: a file for each such step."""
NOT_A_CASE = f"is not what a run writes to OUTPUT/{FOLDER}. Name such a file."
SHOWN = 4
"""Samples that a message names."""


def poisoned(loss: Tensor) -> Tensor:
    """The same loss; if it is not finite, with gradients that are not either.

    So every rank's engine leaves the step out, whichever rank's loss it was: also one that overflowed in a square whose
    gradient did not. On the device, without a word between the ranks.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


class Seen(NamedTuple):
    """One sample of the step."""

    sample: int
    """Its global index."""
    rank: int
    micro_step: int
    expert: str
    prompt: str
    media: str | None
    sigma: dict[str, float]
    """By kind of states."""
    losses: dict[str, float | None]
    """Of each term, unweighted; None is not finite."""
    not_finite: list[str]
    """Among: loss, x0, text."""

    def __str__(self) -> str:
        sigma = ", ".join(f"{value:.4f}" for value in self.sigma.values())
        what = {"x0": "its cached latent is not finite", "text": "its cached text is not finite"}
        why = [what[name] for name in self.not_finite if name in what]
        return (f"sample {self.sample} on rank {self.rank}, sigma {sigma}, expert {self.expert}: "
                f"{'; '.join([self.media or repr(self.prompt), *why])}")  # fmt: skip


def see(batches: dict[str, Batch], items: list[Item], sample_index_B: list[int], losses: dict[str, Tensor], rank: int,
        micro_step: int) -> list[Seen]:  # fmt: skip
    """This rank's samples of one micro-step.

    Args:
        batches: by kind of states.
        losses: loss_B of each term.
    """
    first = next(iter(batches.values()))
    bad = {"loss": ~torch.stack(list(losses.values())).isfinite().all(0), "text": not_finite_B(first.text_BLD),
           "x0": torch.stack([not_finite_B(b.x0_BCFHW) for b in batches.values()]).any(0)}  # fmt: skip
    return [
        Seen(index, rank, micro_step, first.expert.value, item.prompt, str(item.media) if item.media else None,
             {kind: batch.sigma_B[i].item() for kind, batch in batches.items()},
             finite_or_none({name: loss_B[i].item() for name, loss_B in losses.items()}),
             [name for name, of_B in bad.items() if of_B[i]])
        for i, (index, item) in enumerate(zip(sample_index_B, items, strict=True))
    ]  # fmt: skip


def not_finite_B(x: Tensor) -> Tensor:
    """Which samples hold a number that is not finite."""
    return ~x.flatten(1).isfinite().all(1)


class Case(NamedTuple):
    """A step that can be repeated alone, as OUTPUT/nonfinite/step_*.json says it."""

    step: int
    """Counted from 1."""
    ranks: int
    checkpoint: str
    """Of the steps before it."""
    run: dict[str, Any]
    """A recipe that needs no other file of settings."""
    samples: list[Seen]
    """Of the whole step."""

    @property
    def bad(self) -> list[Seen]:
        """The samples whose loss is not finite; none, if only gradients are not."""
        return [s for s in self.samples if "loss" in s.not_finite]

    @classmethod
    def read(cls, file: Path) -> Self:
        """What `write` wrote.

        Raises:
            ConfigError: it is none, or the checkpoint is gone.
        """
        values = read_json(file)
        try:
            case = cls(**values | {"samples": [Seen(**s) for s in values["samples"]]})
            found = [] if type(case.step) is int and case.step > 0 and isinstance(case.run, dict) else [f"{file}: {NOT_A_CASE}"]
            if not (Path(case.checkpoint) / STATE).is_file():
                found.append(problem(file, "checkpoint", case.checkpoint, "It is gone; `keep_checkpoints` says how many stay. "
                                     "Write another of that run: what the data are to blame for shows with any."))  # fmt: skip
        except (TypeError, KeyError):
            raise ConfigError(f"{file}: {NOT_A_CASE}") from None
        if found:
            raise ConfigError(*found)
        return case

    def file(self, output: Path) -> Path:
        return output / FOLDER / f"step_{self.step:08d}.json"

    def write(self, file: Path) -> None:
        write_json(file, self._asdict() | {"samples": [s._asdict() for s in self.samples]})

    def told(self, file: Path) -> list[str]:
        """What happened, in sentences."""
        bad, at = self.bad, f"step {self.step}"
        what = f"the loss of {len(bad)} of {len(self.samples)} samples is not finite" if bad else (
            "each loss is finite, but the gradient is not, or is too large for its norm")  # fmt: skip
        more = [f"{at}: {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
        return [f"{at}: {what}. Nothing was learned from it; see {file}.", *(f"{at}: {s}" for s in bad[:SHOWN]), *more]

    def remedies(self, job: Job, file: Path) -> list[str]:
        """What can be done, in sentences."""
        params = job.student_ds["optimizer"].get("params", {})
        named, changed = job.run.deepspeed_config, " ".join(key for key in ("optimizer", "scheduler") if key in job.student_ds)
        where = f', or "lr" in {named} where the command names it,' if isinstance(named, str) else ""
        lower = "a lower learning rate"
        if "lr" in params:
            lower += f" (--lr {params['lr'] / 3:.1g}{where} --allow_changed {changed})"
        limit = job.run.nonfinite_limit
        skip = "such steps left out (--on_nonfinite skip)" if job.run.on_nonfinite == "stop" else (
            f"more than {limit} such steps left out (--nonfinite_limit {2 * limit})")  # fmt: skip
        cached = any({"x0", "text"} & set(s.not_finite) for s in self.samples)
        anew = [f"What is cached is not finite: remove {job.cache}, and it is made anew; then --allow_changed cache."]
        return [
            *(anew if cached else []),
            f"`wandistiller train --replay {file}` repeats that step alone and shows where it begins.",
            f"The same command with {lower}, or with {skip}, goes on from {self.checkpoint}.",
        ]
