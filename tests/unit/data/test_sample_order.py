"""The order of samples: keyed, without a table, in groups of one shape, the same from any starting point."""

from collections import Counter

import pytest
import torch

from wandistiller.data.sample_order import Permutation, SampleOrder

LENGTHS = [70, 20, 10]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 63, 64, 65, 1000, 1009])
def test_a_permutation_has_every_number_once_and_its_head_is_what_stands_at_its_first_places(n: int) -> None:
    shuffled = Permutation(n, "key", 3)
    numbers = [shuffled(i) for i in range(n)]
    assert sorted(numbers) == list(range(n)) and shuffled.head(n).tolist() == numbers


def test_a_permutation_of_a_billion_needs_no_table() -> None:
    shuffled = Permutation(10**9 + 7, "key")
    numbers = {shuffled(i) for i in range(1000)}
    assert len(numbers) == 1000 and 0 <= min(numbers) < 10**8 and 9 * 10**8 < max(numbers) < 10**9 + 7


def test_each_of_the_24_orders_of_4_is_as_likely() -> None:
    seen = Counter(tuple(Permutation(4, "key", i).head(4).tolist()) for i in range(1200))
    assert len(seen) == 24 and all(22 < n < 78 for n in seen.values())  # 50, deviation 7


def test_neighbours_and_keys_are_unrelated() -> None:
    a, b = (Permutation(10000, key).head(10000).double() for key in (1, 2))
    place = torch.arange(10000).double()
    for x, y in ((place, a), (a[1:], a[:-1]), (a, b)):
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 0.04  # deviation 0.01


def order(seed: int = 0, batch: int = 8, lengths: list[int] = LENGTHS) -> SampleOrder:
    return SampleOrder(lengths, seed, batch)


def test_all_samples_of_a_step_are_of_one_group() -> None:
    samples = order()
    assert all(len({samples.locate(8 * step + i)[0] for i in range(8)}) == 1 for step in range(200))


def test_each_sample_of_a_group_is_used_once_before_any_is_used_again() -> None:
    samples, seen = order(), [Counter(), Counter(), Counter()]
    for i in range(8 * 500):
        group, member = samples.locate(i)
        seen[group][member] += 1
        assert max(seen[group].values()) - min(seen[group][m] for m in range(LENGTHS[group])) <= 1


def test_groups_get_steps_in_proportion_to_their_size() -> None:
    samples = order(batch=1)
    steps = Counter(samples.locate(step)[0] for step in range(1000))
    assert all(abs(steps[group] - 10 * n) <= 2 for group, n in enumerate(LENGTHS))


def test_a_resumed_order_is_that_of_an_uncut_run_and_another_seed_gives_another() -> None:
    uncut, resumed, other = order(), order(), order(seed=1)
    places = [uncut.locate(i) for i in range(8 * 100)]
    assert [resumed.locate(i) for i in range(8 * 60, 8 * 100)] == places[8 * 60 :]
    assert [other.locate(i) for i in range(80)] != places[:80]


@pytest.mark.parametrize("steps", [1, 7, 30, 200])
def test_used_members_are_those_that_the_steps_use(steps: int) -> None:
    samples = order()
    used = {samples.locate(i) for i in range(8 * steps)}
    members_by_group = samples.used_members(steps)
    assert used == {(group, m) for group, members in enumerate(members_by_group) for m in members.tolist()}
    assert sum(map(len, members_by_group)) == len(used)
