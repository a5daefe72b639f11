"""Any content of a JSON: a run or a ConfigError."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from reading import read_run
from recipes import recipe
from wrong_input.cases import ENGINE

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.engine.ds_schema import params_of, section_types
from wandistiller.student.config import StudentConfig
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json

WORDS_OF_SETTINGS = "auto 5e8 nvme cpu none teacher random importance * blocks.0 AdamW".split()
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([*WORDS_OF_SETTINGS, 1e300]),
    st.sampled_from([10**17, 2**63, 0.5, 1e-9]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=4), inside, max_size=3),
    max_leaves=4,
)
PLAIN = st.integers(-(10**17), 10**17) | st.booleans() | st.none() | st.lists(st.text("ab"), max_size=2)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)


def read(file: Path) -> dict[str, Any] | None:
    """The content of a JSON file, or None if it is refused by name."""
    try:
        return read_json(file)
    except ConfigError as error:
        assert all(problem.startswith(f"{file}: ") for problem in error.problems)
        return None


@fuzz(60)
@given(
    values=st.dictionaries(st.text(max_size=5), VALUES, max_size=4),
    place=st.integers(0),
    byte=st.integers(0, 255),
)
def test_a_json_with_one_byte_changed_is_an_object_or_refused_by_name(
    tmp_path: Path, values: dict[str, Any], place: int, byte: int
) -> None:
    raw = bytearray(json.dumps(values).encode())
    raw[place % len(raw)] = byte
    (tmp_path / "x.json").write_bytes(raw)
    assert isinstance(read(tmp_path / "x.json"), dict | None)


@fuzz(40)
@given(values=st.dictionaries(WORDS, PLAIN))
def test_a_sound_json_is_read_as_it_was_written(tmp_path: Path, values: dict[str, Any]) -> None:
    (tmp_path / "x.json").write_text(json.dumps(values))
    assert read(tmp_path / "x.json") == values


RUN_KEYS = sorted(field.name for field in dataclasses.fields(RunConfig))
STUDENT_KEYS = sorted(field.name for field in dataclasses.fields(StudentConfig))
ENGINE_KEYS = sorted(
    [(*filter(None, section.split(".")), key) for section, keys in section_types().items() for key in keys]
    + [("optimizer", "params", key) for key in params_of("AdamW")]
)


@pytest.fixture
def sound(tmp_path: Path, wan2: Path, one_rank: object) -> dict[str, Any]:
    """A recipe without a fault, with its JSONs inside."""
    engines = {"deepspeed_config": ENGINE, "teacher_deepspeed_config": {"zero_optimization": {"stage": 0}}}
    values = recipe(tmp_path, wan2, output_dir=str(tmp_path / "out"), **engines)
    assert read_job(RunConfig(**values), 1).batch.total == 4
    return values


def check(file: Path, values: dict[str, Any]) -> None:
    """Read and check a whole run; a fault must be named, once."""
    file.write_text(json.dumps(values))
    try:
        read_job(read_run(str(file), {}), 1)
    except ConfigError as error:
        assert error.problems and all(error.problems)
        assert len(error.problems) == len(set(error.problems))


@fuzz(25)
@given(changes=st.dictionaries(st.sampled_from(RUN_KEYS), VALUES, min_size=1, max_size=3))
def test_any_values_of_a_recipe_are_checked(
    tmp_path: Path, sound: dict[str, Any], changes: dict[str, Any]
) -> None:
    check(tmp_path / "r.json", sound | changes)


@pytest.mark.slow
@fuzz(150)
@given(changes=st.dictionaries(st.sampled_from(STUDENT_KEYS), VALUES, min_size=1, max_size=3))
def test_any_values_of_a_student_are_checked(
    tmp_path: Path, sound: dict[str, Any], changes: dict[str, Any]
) -> None:
    check(tmp_path / "r.json", sound | {"student_config": changes})


def spoilt(engine: dict[str, Any], changes: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    engine = json.loads(json.dumps(engine))
    for (*path, key), value in changes:
        section = engine
        for name in path:
            section = section.setdefault(name, {}) if isinstance(section.get(name, {}), dict) else {}
        section[key] = value
    return engine


CHANGES = st.lists(st.tuples(st.sampled_from(ENGINE_KEYS), VALUES), min_size=1, max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "engine"),
    [("deepspeed_config", ENGINE), ("teacher_deepspeed_config", {"zero_optimization": {"stage": 3}})],
)
@fuzz(150)
@given(changes=CHANGES)
def test_any_values_of_an_engine_are_checked(
    tmp_path: Path, sound: dict[str, Any], key: str, engine: dict[str, Any], changes: list
) -> None:
    check(tmp_path / "r.json", sound | {key: spoilt(engine, changes)})
