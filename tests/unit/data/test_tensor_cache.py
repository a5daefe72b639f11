"""Cache files of any content: the tensors that were written, a StorageError, or missing tensors."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from wandistiller.data.tensor_cache import TensorCache
from wandistiller.utils.errors import StorageError

KEY, NAMES = "a" * 16, ("x0", "text")
WRITTEN = {"x0": torch.arange(24.0).view(2, 3, 4), "text": torch.linspace(-1, 1, 10, dtype=torch.bfloat16)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, one_rank: object) -> bytes:
    """A cache file as we write it."""
    folder = tmp_path_factory.mktemp("cache")
    TensorCache(folder).write({KEY: WRITTEN, "b" * 16: {"x0": torch.ones(3)}}, {KEY: "a red circle"})
    return next(folder.glob("*.safetensors")).read_bytes()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "wandistiller"):
        yield caplog


def read_cache(folder: Path, raw: bytes) -> list[torch.Tensor] | str | None:
    """Read a file: the tensors, the error's message, or None where its tensors count as missing."""
    (folder / "x.safetensors").write_bytes(raw)
    cache = TensorCache(folder)
    if cache.missing_keys([KEY]):
        return None
    try:
        return cache.read(KEY, *NAMES)
    except StorageError as error:
        return str(error)


def is_right_or_refused(folder: Path, raw: bytes) -> bool:
    """Return whether the file gives the written tensors, raises an error that names it, or is ignored."""
    result = read_cache(folder, raw)
    if isinstance(result, str):
        return result.startswith(f"{folder / 'x.safetensors'}: ") and "made again" in result
    return result is None or all(map(torch.equal, result, WRITTEN.values()))


@fuzz(200)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_never_gives_other_numbers(
    tmp_path: Path, written: bytes, place: int, bit: int
) -> None:
    raw = bytearray(written)
    raw[place % len(raw)] ^= 1 << bit
    assert is_right_or_refused(tmp_path, bytes(raw))


@fuzz(100)
@given(raw=st.binary(max_size=300), length=st.integers(0, 10**6))
def test_arbitrary_bytes_and_truncated_files_count_as_missing(
    tmp_path: Path, written: bytes, raw: bytes, length: int
) -> None:
    assert read_cache(tmp_path, raw) is read_cache(tmp_path, written[: length % len(written)]) is None


def test_a_damaged_file_is_named_in_the_log_and_made_anew(
    tmp_path: Path, written: bytes, log: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x.safetensors").write_bytes(written[:-1])
    cache = TensorCache(tmp_path)
    assert cache.missing_keys([KEY]) == [KEY]
    assert f"{tmp_path / 'x.safetensors'} is damaged and ignored" in log.text
    cache.write({KEY: WRITTEN}, {KEY: "a red circle"})
    assert cache.missing_keys([KEY]) == [] and torch.equal(cache.read(KEY, "x0")[0], WRITTEN["x0"])


def test_a_file_that_is_gone_is_named(tmp_path: Path, written: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(written)
    cache = TensorCache(tmp_path)
    cache.missing_keys([KEY])
    (tmp_path / "x.safetensors").unlink()
    with pytest.raises(StorageError, match="x.safetensors: damaged or removed while in use"):
        cache.read(KEY, "x0")


def test_a_file_without_checksums_is_read_as_before(tmp_path: Path, one_rank: object) -> None:
    raw = save({f"{KEY}.{name}": value for name, value in WRITTEN.items()})
    (tmp_path / "x.safetensors").write_bytes(raw)
    cache = TensorCache(tmp_path)
    assert cache.missing_keys([KEY]) == [] and torch.equal(cache.read(KEY, "text")[0], WRITTEN["text"])
