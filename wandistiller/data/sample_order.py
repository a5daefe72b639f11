"""Order of the data: a function of the seed and a sample's global index, so a run resumes by number."""

import hashlib
import heapq
import math
from collections.abc import Iterator
from itertools import count
from threading import Lock

import torch
from torch import Tensor

ROUNDS = 8
BITS_31 = (1 << 31) - 1


class Permutation:
    """A keyed shuffle of 0 ... n - 1 without a table: each place is computed by itself.

    A Feistel network on pairs (left, right) of Z_a x Z_b with a b >= n, repeated while the result is >= n.
    Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains" (cycle walking).
    """

    def __init__(self, n: int, *key: int | str):
        self._n = n
        self._a = math.isqrt(n - 1) + 1 if n > 1 else 1
        self._b = -(-n // self._a)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=4 * ROUNDS).digest()
        self._keys = [int.from_bytes(digest[i : i + 4], "little") & BITS_31 for i in range(0, len(digest), 4)]

    def __call__(self, place: int) -> int:
        """Return the number at `place`, both in [0, n)."""
        place = self._once(place)
        while place >= self._n:
            place = self._once(place)
        return place

    def head(self, length: int) -> Tensor:
        """Return the numbers at the first `length` places, int64."""
        place_N = self._once(torch.arange(length))
        while (outside_N := place_N >= self._n).any():
            place_N[outside_N] = self._once(place_N[outside_N])
        return place_N

    def _once(self, x: int | Tensor) -> int | Tensor:
        left, right = x // self._b, x % self._b
        for i in range(0, ROUNDS, 2):
            left = (left + _mixed(right ^ self._keys[i])) % self._a
            right = (right + _mixed(left ^ self._keys[i + 1])) % self._b
        return left * self._b + right


def _mixed(x: int | Tensor) -> int | Tensor:
    """Hash 31 bits to 31 bits; products stay below 2^62, so that an int and an int64 tensor give the same."""
    for odd in (0x2C1B3C6D, 0x297A2D39):
        x = (x ^ (x >> 15)) * odd & BITS_31
    return x ^ (x >> 16)


class SampleOrder:
    """The sample at each global index, for samples in groups of one size each.

    All samples of an optimizer step are of one group, so that shapes agree on every rank. A group of n
    samples gets steps in proportion to n: its k-th step is at a keyed random moment of the k-th of equal
    intervals. Within a group, each sample is used once before any is used again.
    """

    def __init__(self, group_lengths: list[int], seed: int, global_batch: int):
        self._lengths, self._seed, self._global_batch = group_lengths, seed, global_batch
        self._steps = heapq.merge(*(self._moments(group) for group in range(len(group_lengths))))
        self._turns: list[tuple[int, int]] = []
        self._lock = Lock()

    def locate(self, sample_index: int) -> tuple[int, int]:
        """Return (group, number within the group) at a global index, `step * global_batch` + slot."""
        step, slot = divmod(sample_index, self._global_batch)
        group, turn = self._turn(step)
        epoch, place = divmod(turn * self._global_batch + slot, self._lengths[group])
        return group, Permutation(self._lengths[group], self._seed, "order", group, epoch)(place)

    def used_members(self, steps: int) -> list[Tensor]:
        """Return by group the numbers within it that the first `steps` optimizer steps use, each once."""
        used = [0] * len(self._lengths)
        for group, _ in (self._turn(step) for step in range(steps)):
            used[group] += self._global_batch
        return [
            torch.arange(n) if u >= n else Permutation(n, self._seed, "order", group, 0).head(u)
            for group, (n, u) in enumerate(zip(self._lengths, used, strict=True))
        ]

    def _turn(self, step: int) -> tuple[int, int]:
        """(group, number of its steps before) of an optimizer step."""
        with self._lock:  # samples are also read ahead, in a thread
            while len(self._turns) <= step:
                _, group, turn = next(self._steps)
                self._turns.append((group, turn))
        return self._turns[step]

    def _moments(self, group: int) -> Iterator[tuple[float, int, int]]:
        """Yield (moment, group, turn) of each step of one group; a moment counts epochs over all samples."""
        for turn in count():
            digest = hashlib.blake2b(repr((self._seed, "step", group, turn)).encode(), digest_size=7).digest()
            yield (turn + int.from_bytes(digest, "little") / 2**56) / self._lengths[group], group, turn
