"""The ranks of a node find in the hub's cache what the first of them has fetched."""

from pathlib import Path

from on_ranks.fetching import looks
from ranks import call


def test_the_other_ranks_of_a_node_look_once_the_first_has_all_weights(wan1: Path) -> None:
    (_, first_ended), (second_began, _) = call(looks, wan1, ranks=2)
    assert second_began >= first_ended
