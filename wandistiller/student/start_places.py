"""The LoRA files that the adapters of a student's networks begin with, of a `config.job.Job`."""

import json
from typing import Any

from wandistiller.experts import Expert
from wandistiller.student.lora import Lora, target_layers
from wandistiller.utils.errors import RECIPE, ConfigError, Place
from wandistiller.wan.added_lora import (
    AddedLora,
    added_changes,
    added_lines,
    added_problems,
    read_added,
    with_experts,
)
from wandistiller.wan.lora_experts import require_no_full_model
from wandistiller.wan.lora_files import LowRank

WHERE = Place(RECIPE, "lora.start")


def start_bases(job: Any) -> dict[Expert, Expert]:
    """Return the teacher's network that each of the student's is made of."""
    return job.bases or {expert: expert for expert in job.student_experts}


def start_files(job: Any) -> list[AddedLora]:
    """Return the files of `lora.start`; of two experts those alone that a network is made of, if any is.

    Raises:
        ConfigError: one is no LoRA file, or nothing says for which expert it is.
    """
    lora, bases = Lora(**job.run.lora or {}), start_bases(job).values()
    if lora.start is None:
        return []
    given = read_added("recipe", "lora.start", lora.start)
    ranks = [lora.rank_of(layer) for layer in target_layers(lora, job.student_transformer)]
    for one in given:
        more = ["--targets", *lora.targets, "--rank", min(ranks, default=lora.rank)]
        require_no_full_model(one.file, job.run.teacher_path, more)
    files = with_experts(WHERE, given, job.folder.configs if job.bases else bases)
    return [one for one in files if any(map(one.is_for, bases))] or files


def start_changes(job: Any, network: Expert, *, weights: bool = True) -> dict[str, LowRank]:
    """Return what the adapters of a network begin as, by layer; without `weights` on the meta device."""
    base = start_bases(job)[network]
    return added_changes(start_files(job), job.student_transformer, base, weights=weights)


def start_problems(job: Any) -> list[str]:
    """List the problems of `lora.start`; the files are read."""
    lora, config = Lora(**job.run.lora or {}), job.student_transformer
    try:
        problems = added_problems(WHERE, start_files(job), dict.fromkeys(start_bases(job).values(), config))
    except ConfigError as error:
        return error.problems
    targets = target_layers(lora, config)
    for network in start_bases(job) if not problems else ():
        changes = start_changes(job, network, weights=False)
        ranks = {layer: one.rank for layer, one in changes.items() if one.rank > lora.rank_of(layer)}
        higher = {layer.split(".", 2)[-1]: rank for layer, rank in ranks.items()}
        if without := sorted({layer.split(".", 2)[-1] for layer in changes if layer not in targets}):
            text = "changes layers that have no adapter here. Add to `lora.targets`"
            problems.append(WHERE.problem(f"{text}: {', '.join(without)}."))
        if higher:
            text = f"its rank is {max(higher.values())}. Write that as `lora.rank`, or as `lora.ranks`"
            problems.append(WHERE.problem(f"{text} {json.dumps(higher)}."))
    return problems


def start_lines(job: Any) -> list[str]:
    """Say which file begins the adapters of which network, and which of its keys do not."""
    files = [] if job.start or job.resume_from else start_files(job)
    return added_lines(files, dict.fromkeys(start_bases(job).values(), job.student_transformer), "start")
