"""Ranks that share sequences: messages about numbers that do not divide, and keys that are checked."""

from pathlib import Path

from wandistiller.cli.flags import SampleFlags
from wandistiller.distributed.sequence_parallel import division_problems
from wandistiller.evaluation.sampling import flag_problems


def test_a_number_of_sharing_ranks_that_does_not_divide_is_named_by_its_setting() -> None:
    (text,) = division_problems("recipe", 2, 3, {"The student": 4}, {})
    assert text == "recipe: `context_parallel` is 2. There are 3 rank(s). Write a divisor of that, or 1."


def test_ranks_that_share_a_sequence_are_at_least_one() -> None:
    (text,) = flag_problems("sample", SampleFlags(prompts=["a"], output=Path("a"), context_parallel=0))
    assert text == "sample: `context_parallel` is 0. Write a number greater than 0."
