"""Called on ranks by test_cached_dataset.py: the samples of each step, in the order of the trainer."""

import hashlib
from typing import Any

from torch import Tensor

from wandistiller.batch import padded
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.distributed import collectives
from wandistiller.training.prepare import prepare
from wandistiller.wan.text_padding import TEXT_TOKENS


def digest_of(x0_BCFHW: Tensor, text_BLD: Tensor) -> str:
    """Hash samples; the padding of their text depends on the others of their batch."""
    text_BLD = padded(text_BLD, TEXT_TOKENS)
    return hashlib.sha256(x0_BCFHW.numpy().tobytes() + text_BLD.numpy().tobytes()).hexdigest()


def samples_by_step(recipe: dict[str, Any]) -> list[list[tuple[int, list[int], str]]]:
    """Return by step (number, shape, digest of x0 and text) of each sample, in the global batch's order."""
    job = read_job(RunConfig(**recipe), collectives.world_size())
    data, _, _ = prepare(job)
    rank, b, steps = collectives.rank(), job.batch, []
    for step in range(job.run.max_steps):
        firsts = [step * b.total + (micro * b.ranks + rank) * b.micro for micro in range(b.accumulation)]
        of_rank = []
        for index in (first + i for first in firsts for i in range(b.micro)):
            x0_BCFHW, text_BLD = data.x0([index]), data.conditioning([index]).text_BLD
            of_rank.append(
                (
                    index,
                    (
                        data.selection.number_at(index),
                        list(x0_BCFHW.shape[1:]),
                        digest_of(x0_BCFHW, text_BLD),
                    ),
                )
            )
        everyone = sorted(pair for theirs in collectives.gather_objects(of_rank) for pair in theirs)
        steps.append([sample for _, sample in everyone])
    return steps
