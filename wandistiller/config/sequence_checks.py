"""Checks of ranks that share sequences, before anything is loaded."""

from typing import Any

from wandistiller.config.run_config import RunConfig
from wandistiller.data.buckets import make_buckets
from wandistiller.teacher.teacher_json import read_placement
from wandistiller.utils.errors import problem

KEY = "context_parallel"


def replicas(run: RunConfig, world: int) -> int:
    """Return how many groups of ranks work on different samples, of `world` ranks."""
    return max(1, world // run.context_parallel)


def sequence_problems(run: RunConfig, parts: dict[str, Any], world: int) -> list[str]:
    """List what does not divide by the ranks that share a sequence: ranks, heads, tokens.

    Args:
        parts: fields of Job.
        world: number of ranks.
    """
    sizes = {}
    if "folder" in parts:
        own, folder = (run.height, run.width), parts["folder"]
        others = make_buckets(*own, folder.multiple) if run.buckets is True else run.buckets or []
        for size in dict.fromkeys([own, *map(tuple, others)]):
            sizes[*size, run.num_frames] = folder.tokens(*size, run.num_frames)
    return division_problems("recipe", run.context_parallel, world, _heads(parts), sizes)


def division_problems(
    where: str, number: int, world: int, heads: dict[str, int], patches: dict[tuple[int, int, int], int]
) -> list[str]:
    """List what does not divide by `number`, the ranks that share a sequence.

    Args:
        where: for messages.
        world: number of ranks.
        heads: of each network.
        patches: of a sample of (height, width, frames).
    """
    if number <= 1:  # what is no positive number is reported elsewhere
        return []
    rules = [(f"There are {world} rank(s)", world)]
    rules += [(f"{name} has {value} attention heads", value) for name, value in heads.items()]
    for (height, width, frames), value in patches.items():
        rules.append(
            (f"A sample of {height}x{width} pixels and {frames} frame(s) has {value} patches", value)
        )
    remedy = "Write a divisor of that, or 1."
    return [problem(where, KEY, number, f"{what}. {remedy}") for what, value in rules if value % number]


def _heads(parts: dict[str, Any]) -> dict[str, int]:
    """Return the attention heads of each network that ranks compute together."""
    networks = {}
    of_teacher = parts["folder"].config if "folder" in parts else {}
    alone = "teacher_ds" in parts and read_placement(parts["teacher_ds"]).on_one_rank
    if of_teacher and not alone:
        networks["The teacher"] = of_teacher
    if "student_transformer" in parts:
        networks["The student"] = parts["student_transformer"]
    for name, role in parts["objective"].others.items() if "objective" in parts else ():
        if config := role.origin(None, of_teacher):
            networks[f"The {name}"] = config
    return {name: config["num_attention_heads"] for name, config in networks.items()}
