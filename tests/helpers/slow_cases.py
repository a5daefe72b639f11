"""Of many cases of one claim, those that run by default."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(usual: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Mark all `cases` as slow but for the `usual` ones; for `pytest.mark.parametrize`."""

    def slow(case: Any) -> Any:
        return pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)

    return [case if case in usual else slow(case) for case in cases]
