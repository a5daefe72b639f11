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
    number = run.context_parallel
    if number == 1:
        return []
    rules = [("There are {} rank(s)", world)]
    rules += [(f"{name} has {{}} attention heads", heads) for name, heads in _heads(parts).items()]
    if "folder" in parts:
        folder = parts["folder"]
        own = run.height, run.width
        others = make_buckets(*own, folder.multiple) if run.buckets is True else run.buckets or []
        for height, width in dict.fromkeys([own, *map(tuple, others)]):
            what = f"A sample of {height}x{width} pixels and {run.num_frames} frame(s) has {{}} patches"
            rules.append((what, folder.tokens(height, width, run.num_frames)))
    remedy = "Write a divisor of that, or 1."
    broken = [what.format(value) for what, value in rules if value % number]
    return [problem("recipe", KEY, number, f"{what}. {remedy}") for what in broken]


def _heads(parts: dict[str, Any]) -> dict[str, int]:
    """Return the attention heads of each network that ranks compute together."""
    networks = {}
    of_teacher = parts["folder"].config if "folder" in parts else {}
    alone = "teacher_ds" in parts and read_placement(parts["teacher_ds"]).on_one_rank
    if of_teacher and not alone:
        networks["The teacher"] = of_teacher
    if "student_transformer" in parts:
        networks["The student"] = parts["student_transformer"]
    critic = parts["objective"].critic if "objective" in parts else None
    if of_teacher and critic and critic.start == "teacher":
        networks["The critic"] = of_teacher
    return {name: config["num_attention_heads"] for name, config in networks.items()}
