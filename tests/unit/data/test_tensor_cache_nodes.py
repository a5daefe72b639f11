"""A cache on a disk that nodes share: found by all, with the same keys on all, and whole."""

from pathlib import Path

from on_ranks.nodes import cached
from ranks import call


def test_a_cache_that_one_node_makes_is_found_by_one_that_had_looked_for_it_before(tmp_path: Path) -> None:
    """As by a client of NFS, which remembers what was not there."""
    assert call(cached, tmp_path, [["a", "b", "c"]] * 2, ranks=2) == [{"a": 0.0, "b": 1.0, "c": 2.0}] * 2


def test_media_that_have_other_keys_on_another_node_are_refused_before_they_are_encoded(
    tmp_path: Path,
) -> None:
    """As files have that were copied to each node without their times."""
    first, second = call(cached, tmp_path, [["a", "b"], ["a", "c"]], ranks=2)
    assert first == second and len(first) == 1 and "`rsync -t`" in first[0]
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_is_gone_after_it_was_written_is_named_before_it_is_read(tmp_path: Path) -> None:
    first, second = call(cached, tmp_path, [["a", "b", "c"]] * 2, "b", ranks=2)
    assert first == second and len(first) == 1
    assert f"{tmp_path}/cache/latents: 1 of 3 entries are gone" in first[0]
