"""Errors of a quantised base, for adapters that learned on it and are used on the unquantised one."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from wandistiller.batch import State
from wandistiller.config.job import Job
from wandistiller.data.conditions import Conditions
from wandistiller.data.dataset import PromptItem
from wandistiller.distributed import collectives
from wandistiller.evaluation.quantization_error import in_words, relative_errors, states_by_band
from wandistiller.student.learner import Learner
from wandistiller.student.shared_base import on_base, without_adapters
from wandistiller.teacher.base import local_modules
from wandistiller.teacher.build import unquantized_teacher
from wandistiller.teacher.sweep import block_by_block, in_turn
from wandistiller.training.prepare import conditioning_of_shortest, shortest_samples
from wandistiller.utils.logging import set_activity
from wandistiller.wan.context_parallel import whole_sequences

Errors = dict[str, float]
"""By the name of a band of sigma."""


def log_base_errors(
    job: Job, conditions: Conditions, sample_items: list[PromptItem], student: Learner
) -> None:
    """Log `base_errors` at the end of a run. Collective."""
    alone, adapted = base_errors(job, conditions, sample_items, student)
    what = f"{job.teacher.weights}: relative velocity error"
    collectives.log0("base      %s without adapters %s", what, in_words(alone))
    collectives.log0("adapters  %s with them %s, to them on unquantised weights", what, in_words(adapted))


@torch.no_grad()
def base_errors(
    job: Job, conditions: Conditions, sample_items: list[PromptItem], student: Learner
) -> tuple[Errors, Errors]:
    """Return the errors of a student's quantised base, alone and with its adapters. Collective.

    sum |v - v*|² / sum |v*|² without guidance, v* of the same on unquantised weights, which the student's
    networks have afterwards. All of them are read twice, one block at a time.

    Raises:
        ConfigError: on every rank, if weights could not be read on any.
    """
    set_activity("measuring the quantised base")
    folder, networks = job.teachers_folder, student.networks
    served = folder.configs if len(job.student_experts) == 1 else networks
    folder = replace(folder, configs={e: config for e, config in folder.configs.items() if e in served})
    with whole_sequences(student.all_networks):  # on single frames
        conditioning = conditioning_of_shortest(job, conditions, sample_items)
        x0_BCFHW = shortest_samples(job, student.velocity, conditioning)
        states = states_by_band(folder, x0_BCFHW, conditioning, job.run.seed)
        found = _velocities(job, student, [*states.values()])
        exact, readers = unquantized_teacher(job.teachers_folder, job.teacher)
        for expert, network in networks.items():
            on_base(network, local_modules(exact)[job.bases[expert]])
        wanted = _velocities(job, student, [*states.values()])
    faults = [p for reader in readers for p in reader.faults]
    alone, adapted = (
        relative_errors(states, [*zip(*both, strict=True)], faults)
        for both in zip(found, wanted, strict=True)
    )
    return alone, adapted


def _velocities(job: Job, student: Learner, states: list[State]) -> tuple[list[Tensor], list[Tensor]]:
    """Return v_BCFHW at states of the student without adapters, and with; weights arrive once for each."""
    run = in_turn if job.student_engine.stage == 3 else block_by_block  # as adapters are gathered in order
    calls = [partial(student.velocity, state) for state in states]
    with without_adapters(student.networks.values()):
        alone = run(student.blocks, calls)
    return alone, run(student.blocks, calls)
