"""Whatever stands in a JSON or a cache file: an answer or a ConfigError, and no number that was not written."""

import dataclasses
import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_inputs import ENGINE
from deepspeed.runtime import lr_schedules
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipes import PROMPTS
from safetensors.torch import save

from wandistiller.check import read_job
from wandistiller.config import RunConfig, read_json
from wandistiller.deepspeed_keys import OPTIMIZER_KEYS, SCHEDULER_KEYS, SECTION_KEYS, TOP_KEYS
from wandistiller.deepspeed_values import inner
from wandistiller.problems import ConfigError
from wandistiller.shards import Shards
from wandistiller.shorthands import read_run
from wandistiller.student_config import StudentConfig

FIXTURES = [HealthCheck.function_scoped_fixture]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["auto", "5e8", "nvme", "cpu", "none", "teacher", "random", "importance", "*", "blocks.0", "AdamW", 1e300]),
    st.sampled_from([10**17, 2**63, 0.5, 1e-9]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=4), inside, max_size=3), max_leaves=4
)
PLAIN = st.integers(-(10**17), 10**17) | st.booleans() | st.none() | st.lists(st.text("ab"), max_size=2)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)


def fuzz(examples: int) -> settings:
    """The same examples in every run."""
    return settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=FIXTURES)


def read(file: Path) -> dict[str, Any] | None:
    """What a JSON file holds, or None if it is refused by name."""
    try:
        return read_json(file)
    except ConfigError as error:
        assert all(problem.startswith(f"{file}: ") for problem in error.problems)
        return None


@fuzz(300)
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_an_object_or_refused_by_name(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.json").write_bytes(raw)
    assert isinstance(read(tmp_path / "x.json"), dict | None)


@fuzz(300)
@given(values=st.dictionaries(st.text(max_size=5), VALUES, max_size=4), place=st.integers(0), byte=st.integers(0, 255))
def test_a_json_with_one_byte_changed_is_an_object_or_refused_by_name(
    tmp_path: Path, values: dict[str, Any], place: int, byte: int
) -> None:
    raw = bytearray(json.dumps(values).encode())
    raw[place % len(raw)] = byte
    (tmp_path / "x.json").write_bytes(raw)
    assert isinstance(read(tmp_path / "x.json"), dict | None)


@fuzz(200)
@given(values=st.dictionaries(WORDS, PLAIN))
def test_a_sound_json_is_read_as_it_was_written(tmp_path: Path, values: dict[str, Any]) -> None:
    (tmp_path / "x.json").write_text(json.dumps(values))
    assert read(tmp_path / "x.json") == values


RUN_KEYS = sorted(field.name for field in dataclasses.fields(RunConfig))
STUDENT_KEYS = sorted(field.name for field in dataclasses.fields(StudentConfig))
ENGINE_KEYS = sorted(
    [(key,) for key in TOP_KEYS] + [(*section.split("."), key) for section, keys in SECTION_KEYS.items() for key in keys]
    + [("optimizer", "params", key) for key in OPTIMIZER_KEYS]
)  # fmt: skip


@pytest.fixture
def sound(tmp_path: Path, wan2: Path, one_rank: object) -> dict[str, Any]:
    """A recipe without a fault, with its JSONs inside."""
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    return {"teacher_path": str(wan2), "data_path": str(tmp_path / "prompts.txt"), "output_dir": str(tmp_path / "out"),
            "student_config": {"num_layers": 2}, "deepspeed_config": ENGINE, "height": 64, "width": 64, "max_steps": 2,
            "teacher_deepspeed_config": {"zero_optimization": {"stage": 0}}}  # fmt: skip


def check(file: Path, recipe: dict[str, Any]) -> None:
    """Read and check a whole run; a fault must be told with what to write."""
    file.write_text(json.dumps(recipe))
    try:
        read_job(read_run(str(file), {}), 1)
    except ConfigError as error:
        assert error.problems and all(error.problems)
        assert len(error.problems) == len(set(error.problems))


def test_the_sound_recipe_is_sound(tmp_path: Path, sound: dict[str, Any]) -> None:
    (tmp_path / "r.json").write_text(json.dumps(sound))
    assert read_job(read_run(str(tmp_path / "r.json"), {}), 1).batch.total == 4


@fuzz(250)
@given(changes=st.dictionaries(st.sampled_from(RUN_KEYS), VALUES, min_size=1, max_size=3))
def test_any_values_of_a_recipe_are_checked(tmp_path: Path, sound: dict[str, Any], changes: dict[str, Any]) -> None:
    check(tmp_path / "r.json", sound | changes)


@fuzz(150)
@given(changes=st.dictionaries(st.sampled_from(STUDENT_KEYS), VALUES, min_size=1, max_size=3))
def test_any_values_of_a_student_are_checked(tmp_path: Path, sound: dict[str, Any], changes: dict[str, Any]) -> None:
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


@fuzz(150)
@given(changes=CHANGES)
def test_any_values_of_the_student_s_engine_are_checked(tmp_path: Path, sound: dict[str, Any], changes: list) -> None:
    check(tmp_path / "r.json", sound | {"deepspeed_config": spoilt(ENGINE, changes)})


@fuzz(150)
@given(changes=CHANGES)
def test_any_values_of_the_teacher_s_engine_are_checked(tmp_path: Path, sound: dict[str, Any], changes: list) -> None:
    check(tmp_path / "r.json", sound | {"teacher_deepspeed_config": spoilt({"zero_optimization": {"stage": 3}}, changes)})


@fuzz(100)
@given(kind=st.sampled_from(sorted(SCHEDULER_KEYS)), data=st.data())
def test_a_schedule_that_passes_can_be_built(tmp_path: Path, sound: dict[str, Any], kind: str, data: st.DataObject) -> None:
    numbers = st.sampled_from([0, 1, -1, 0.5, 5, 1000, "x", None, True, "log", [0.1]])
    params = data.draw(st.dictionaries(st.sampled_from(sorted(SCHEDULER_KEYS[kind])), numbers, max_size=8))
    engine = ENGINE | {"scheduler": {"type": kind, "params": params}}
    (tmp_path / "r.json").write_text(json.dumps(sound | {"deepspeed_config": engine}))
    try:
        job = read_job(read_run(str(tmp_path / "r.json"), {}), 1)
    except ConfigError:
        return
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1e-3)
    schedule = getattr(lr_schedules, kind)(optimizer, **inner(job.student_ds, "scheduler.params"))
    for _ in range(3):
        schedule.step()
    assert all(0 <= lr < float("inf") for lr in schedule.get_last_lr())


KEY, NAMES = "a" * 16, ("x0", "text")
WRITTEN = {"x0": torch.arange(24.0).view(2, 3, 4), "text": torch.linspace(-1, 1, 10, dtype=torch.bfloat16)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, one_rank: object) -> bytes:
    """A cache file as we write it."""
    folder = tmp_path_factory.mktemp("cache")
    Shards(folder).write({KEY: WRITTEN, "b" * 16: {"x0": torch.ones(3)}}, {KEY: "a red circle"})
    return next(folder.glob("*.safetensors")).read_bytes()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "wandistiller"):
        yield caplog


def read_cache(folder: Path, raw: bytes) -> list[torch.Tensor] | str | None:
    """What the cache says of a file: the tensors, what is refused, or None where it is as good as none."""
    (folder / "x.safetensors").write_bytes(raw)
    shards = Shards(folder)
    if shards.find([KEY]):
        return None
    try:
        return shards.read(KEY, *NAMES)
    except ConfigError as error:
        return str(error)


def is_right_or_refused(folder: Path, raw: bytes) -> bool:
    """Whether such a file gives the numbers that were written, a message that names it, or nothing."""
    found = read_cache(folder, raw)
    if isinstance(found, str):
        return found.startswith(f"{folder / 'x.safetensors'}: ") and "is made anew" in found
    return found is None or all(torch.equal(value, WRITTEN[name]) for name, value in zip(NAMES, found, strict=True))


@fuzz(300)
@given(raw=st.binary(max_size=300))
def test_any_bytes_are_as_good_as_no_cache_file(tmp_path: Path, one_rank: object, raw: bytes) -> None:
    assert read_cache(tmp_path, raw) is None


@fuzz(200)
@given(length=st.integers(0, 10**6))
def test_a_cache_file_that_is_cut_off_is_as_good_as_none(tmp_path: Path, written: bytes, length: int) -> None:
    assert read_cache(tmp_path, written[: length % len(written)]) is None


@fuzz(600)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_never_gives_other_numbers(tmp_path: Path, written: bytes, place: int, bit: int) -> None:
    raw = bytearray(written)
    raw[place % len(raw)] ^= 1 << bit
    assert is_right_or_refused(tmp_path, bytes(raw))


@fuzz(300)
@given(start=st.integers(0, 10**6), bytes_between=st.binary(max_size=40), length=st.integers(0, 40))
def test_bytes_put_in_the_place_of_others_never_give_other_numbers(
    tmp_path: Path, written: bytes, start: int, bytes_between: bytes, length: int
) -> None:
    start %= len(written)
    assert is_right_or_refused(tmp_path, written[:start] + bytes_between + written[start + length :])


def test_every_flipped_bit_of_the_numbers_is_seen(tmp_path: Path, written: bytes) -> None:
    (header,) = struct.unpack("<Q", written[:8])
    entry = json.loads(written[8 : 8 + header])[f"{KEY}.x0"]
    begin, end = (8 + header + offset for offset in entry["data_offsets"])
    for bit in range(begin * 8, end * 8, 5):
        raw = bytearray(written)
        raw[bit // 8] ^= 1 << bit % 8
        assert "its checksum is another. Remove the file" in str(read_cache(tmp_path, bytes(raw)))


def test_a_damaged_file_is_named_in_the_log_and_made_anew(tmp_path: Path, written: bytes, said: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.safetensors").write_bytes(written[:-1])
    shards = Shards(tmp_path)
    assert shards.find([KEY]) == [KEY] and f"{tmp_path / 'x.safetensors'} is damaged and passed over" in said.text
    shards.write({KEY: WRITTEN}, {KEY: "a red circle"})
    assert shards.find([KEY]) == [] and torch.equal(shards.read(KEY, "x0")[0], WRITTEN["x0"])


def test_a_file_that_is_gone_is_named(tmp_path: Path, written: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(written)
    shards = Shards(tmp_path)
    shards.find([KEY])
    (tmp_path / "x.safetensors").unlink()
    with pytest.raises(ConfigError, match="x.safetensors: it was damaged or removed while in use"):
        shards.read(KEY, "x0")


def test_a_file_without_checksums_is_read_as_before(tmp_path: Path, one_rank: object) -> None:
    (tmp_path / "x.safetensors").write_bytes(save({f"{KEY}.{name}": value for name, value in WRITTEN.items()}))
    shards = Shards(tmp_path)
    assert shards.find([KEY]) == [] and torch.equal(shards.read(KEY, "text")[0], WRITTEN["text"])
