"""Whatever the JSON reader, the check of a run and the cache reader are given: an answer that is right, or a message."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_inputs import ENGINE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wandistiller.check import read_job
from wandistiller.config import RunConfig, read_json, read_run_config
from wandistiller.deepspeed_keys import SECTION_KEYS, TOP_KEYS
from wandistiller.problems import ConfigError
from wandistiller.shards import Shards

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("auto")
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
                      max_leaves=6)  # fmt: skip
RUN_KEYS = sorted(set(RunConfig.__dataclass_fields__) - {"output_dir", "cache_dir", "sample_dir", "dry_run"})
STUDENT_KEYS = ["init", "num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim", "keep_layers", "experts"]
PLACES = sorted((section, key) for section, keys in SECTION_KEYS.items() for key in keys)
FUZZ = settings(derandomize=True, deadline=None, database=None,
                suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip


@settings(FUZZ, max_examples=400)
@given(raw=st.binary(max_size=80) | VALUES.map(lambda v: json.dumps(v).encode()) | st.text(max_size=40).map(str.encode))
def test_any_file_is_a_json_object_or_a_message(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(raw)
    try:
        assert isinstance(read_json(tmp_path / "x.json"), dict)
    except ConfigError as error:
        assert all(p.startswith(str(tmp_path / "x.json")) for p in error.problems)


@settings(FUZZ, max_examples=400)
@given(values=st.dictionaries(st.sampled_from(RUN_KEYS) | st.text(max_size=8), VALUES, max_size=4))
def test_any_recipe_is_a_run_or_a_message(values: dict[str, Any]) -> None:
    try:
        assert isinstance(read_run_config(values, {}, "recipe"), RunConfig)
    except ConfigError as error:
        assert error.problems


def checked(run: dict[str, Any], tmp_path: Path, wan: Path) -> None:
    """The run is sound, or what is wrong with it is said; nothing is written."""
    (tmp_path / "p.txt").write_text("a red circle\n")
    sound = {"teacher_path": str(wan), "data_path": str(tmp_path / "p.txt"), "output_dir": str(tmp_path / "out"), "height": 64,
             "width": 64, "max_steps": 2, "student_config": {"num_layers": 2}, "deepspeed_config": ENGINE,
             "teacher_deepspeed_config": {"zero_optimization": {"stage": 0}}}  # fmt: skip
    try:
        read_job(RunConfig(**sound | run), 1)
    except ConfigError as error:
        assert error.problems
    assert not (tmp_path / "out").exists()


@settings(FUZZ, max_examples=60)
@given(key=st.sampled_from(STUDENT_KEYS), value=VALUES)
def test_any_student_is_checked(key: str, value: Any, tmp_path: Path, wan2: Path) -> None:
    checked({"student_config": {"num_layers": 2} | {key: value}}, tmp_path, wan2)


@pytest.mark.parametrize("which", ["deepspeed_config", "teacher_deepspeed_config"])
@settings(FUZZ, max_examples=60)
@given(place=st.sampled_from(PLACES) | st.sampled_from(sorted(TOP_KEYS)).map(lambda k: ("", k)), value=VALUES)
def test_any_engine_is_checked(which: str, place: tuple[str, str], value: Any, tmp_path: Path, wan2: Path) -> None:
    section, key = place
    ds = {"deepspeed_config": ENGINE, "teacher_deepspeed_config": {"zero_optimization": {"stage": 0}}}[which]
    first, _, second = section.partition(".")
    inside = {second: {key: value}} if second else {key: value}
    spoilt = {first: ds.get(first, {}) | inside} if section and isinstance(ds.get(first, {}), dict) else {key: value}
    checked({which: ds | spoilt}, tmp_path, wan2)


TENSORS = {"one": {"x0": torch.arange(12.0).view(3, 4)}, "two": {"x0": torch.ones(5), "path": torch.zeros(2, 2)}}


def written(folder: Path) -> Path:
    Shards(folder).write(TENSORS, {"one": "first", "two": "second"})
    (file,) = folder.glob("*.safetensors")
    return file


def right_or_told(folder: Path) -> None:
    """Each tensor is found as it was written, or not found, or reading it ends in a message that names the file."""
    shards = Shards(folder)
    shards.find(TENSORS)
    for key, named in TENSORS.items():
        if key not in shards:
            continue
        try:
            for tensor, wanted in zip(shards.read(key, *named), named.values(), strict=True):
                assert torch.equal(tensor, wanted)
        except ConfigError as error:
            assert error.problems[0].startswith(str(folder))


@settings(FUZZ, max_examples=200)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@pytest.mark.usefixtures("one_rank")
def test_a_flipped_bit_in_a_cache_file_never_gives_wrong_numbers(where: float, bit: int, tmp_path: Path) -> None:
    file = written(tmp_path)
    raw = bytearray(file.read_bytes())
    raw[int(where * len(raw))] ^= 1 << bit
    file.write_bytes(raw)
    right_or_told(tmp_path)


@settings(FUZZ, max_examples=100)
@given(keep=st.floats(0, 1), tail=st.binary(max_size=20))
@pytest.mark.usefixtures("one_rank")
def test_a_cache_file_cut_off_anywhere_is_made_anew_or_told(keep: float, tail: bytes, tmp_path: Path) -> None:
    file = written(tmp_path)
    raw = file.read_bytes()
    file.write_bytes(raw[: int(keep * len(raw))] + tail)
    right_or_told(tmp_path)


@settings(FUZZ, max_examples=100)
@given(raw=st.binary(max_size=200))
@pytest.mark.usefixtures("one_rank")
def test_a_cache_file_of_any_bytes_is_as_good_as_none(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "0.safetensors").write_bytes(raw)
    shards = Shards(tmp_path)
    assert shards.find(["one"]) == ["one"]
