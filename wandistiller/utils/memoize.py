"""Memoization of functions of JSON values."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable)


def once_for_each(f: F) -> F:
    """Cache the results of `f`, whose arguments are JSON values, tuples of them among these."""
    results: dict[str, Any] = {}

    @wraps(f)
    def cached(*args: Any, **kwargs: Any) -> Any:
        key = repr((args, kwargs))
        if key not in results:
            results[key] = f(*args, **kwargs)
        return results[key]

    return cached
