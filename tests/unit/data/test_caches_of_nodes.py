"""A cache on a disk that nodes share: found by all, with the same keys on all, and whole."""

from pathlib import Path

from on_ranks.nodes import cached
from ranks import call


def test_a_cache_that_one_node_makes_is_found_by_one_that_had_looked_for_it_before(tmp_path: Path) -> None:
    """As by a client of NFS, which remembers what was not there."""
    assert call(cached, tmp_path, [["a", "b", "c"]] * 2, ranks=2) == [{"a": 0.0, "b": 1.0, "c": 2.0}] * 2
