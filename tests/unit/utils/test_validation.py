"""Strict types of settings, and pydantic's errors in our words."""

from typing import Annotated, Any, Literal

import pytest

from wandistiller.engine.ds_schema import section_types
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


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("count", True, "`count` is true. Write an integer."),
        ("count", "5", '`count` is "5". Write an integer. Remove the quotes.'),
        ("count", 2.0, "`count` is 2.0. Write an integer."),
        ("count", None, "`count` is null. Write an integer."),
        ("count", 0, "`count` is 0. Write a number greater than 0."),
        ("positive", "1e9", '`positive` is "1e9". Write a number. Remove the quotes.'),
        ("positive", True, "`positive` is true. Write a number."),
        ("text", "", '`text` is "". Write text.'),
        ("share", 1.5, "`share` is 1.5. Write a number less than or equal to 1."),
        ("flag", 1, "`flag` is 1. Write true or false."),
        ("section", [], "`section` is []. Write an object, {...}."),
        ("list", [1, "2"], '`list.1` is "2". Write an integer.'),
        ("choice", "tow", '`choice` is "tow". Write one of: one, two. Did you mean `two`?'),
        ("either", ["a"], '`either` is ["a"]. Write true or a list.'),
        ("shar", 1, "`shar` is 1. Unknown key. Did you mean `share`?"),
    ],
)
def test_another_value_is_refused_with_what_to_write(key: str, value: Any, message: str) -> None:
    assert check("x.json", {key: value}, TYPES) == ([f"x.json: {message}"], {})


def test_the_values_without_a_problem_are_returned_beside_all_problems() -> None:
    problems, good = check("x.json", {"count": 0, "text": "a", "flagg": True}, TYPES, "block.")
    assert [text.split("`")[1] for text in problems] == ["block.flagg", "block.count"]
    assert good == {"text": "a"}


@pytest.mark.parametrize(
    ("key", "value", "passes"),
    [
        ("stage", 3, True),
        ("stage", 3.0, True),
        ("stage", True, False),
        ("reduce_bucket_size", 5e8, True),
        ("reduce_bucket_size", 1.5, False),
        ("reduce_bucket_size", "5e8", False),
        ("overlap_comm", None, False),
    ],
)
def test_a_section_of_deepspeed_s_takes_whole_floats_but_no_null_and_no_text(
    key: str, value: Any, passes: bool
) -> None:
    assert bool(check("x.json", {key: value}, section_types()["zero_optimization"])[1]) == passes
