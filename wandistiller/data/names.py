"""Names of files in data: looked up in long lists, and of images that several rows have."""

from array import array
from bisect import bisect_left
from collections import defaultdict
from functools import cached_property
from pathlib import PurePath

import numpy as np

from wandistiller.utils.files import digest


def has_name(names: list[str], stem: str, endings: list[str]) -> bool:
    """Return whether a sorted list has a name; a set would double the memory of a long list."""
    places = ((stem + ending, bisect_left(names, stem + ending)) for ending in endings)
    return any(place < len(names) and names[place] == name for name, place in places)


class Namesakes:
    """Rows that have prompt and images' names in common, with images of other folders: numbered from 0."""

    def __init__(self) -> None:
        self._rows, self._keys, self._contents = array("q"), array("Q"), array("Q")

    def add(self, row: int, content: int, prompt: str, *images: str) -> None:
        """Add a row.

        Args:
            content: hash of the prompt and the images' names with their folders.
        """
        self._rows.append(row)
        self._keys.append(int(digest(prompt, *(PurePath(image).name for image in images)), 16))
        self._contents.append(content)

    def number(self, row: int) -> int:
        """Return a row's number, 0 of most: in the order of the data, whatever the folders are called."""
        return self._numbers.get(row, 0)

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """Number of each row that has namesakes."""
        keys_N, numbers = np.asarray(self._keys), {}
        _, group_N, count_K = np.unique(keys_N, return_inverse=True, return_counts=True)
        different: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for place in np.flatnonzero(count_K[group_N] > 1):
            of_key = different[self._keys[place]]
            numbers[self._rows[place]] = of_key.setdefault(self._contents[place], len(of_key))
        return numbers
