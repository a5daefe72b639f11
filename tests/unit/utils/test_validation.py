"""Strict types of settings, and pydantic's errors in our words."""

from typing import Annotated, Any, Literal

import pytest

from wandistiller.utils.validation import Count, Positive, Section, Share, Text, check, write

TYPES = {
    "count": Count,
    "positive": Positive,
    "share": Share | None,
    "text": Text,
    "flag": bool,
    "section": Section,
    "choice": Literal["one", "two"],
    "list": list[int],
    "either": Annotated[bool | list[int], write("true or a list")],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [("count", 1), ("positive", 1), ("share", 0.5), ("share", None), ("list", []), ("either", [1])],
)
def test_a_value_of_the_type_passes_and_an_integer_passes_for_a_float(key: str, value: Any) -> None:
    assert check("x.json", {key: value}, TYPES) == ([], {key: value})


def test_the_values_without_a_problem_are_returned_beside_all_problems() -> None:
    problems, good = check("x.json", {"count": 0, "text": "a", "flagg": True}, TYPES, "block.")
    assert [text.split("`")[1] for text in problems] == ["block.flagg", "block.count"]
    assert good == {"text": "a"}
