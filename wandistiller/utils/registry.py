"""Registries without lists: each module of a folder defines one class, named by the module."""

import inspect
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

T = TypeVar("T")


def names_in(package: str) -> list[str]:
    """Return the sorted names of the modules in `package`, without importing them: `--help` must be fast."""
    names = {module.name for module in iter_modules(import_module(package).__path__)}
    return sorted(names - {"base", "objective", "rollout", "script"})


def classes_in(package: str, base: type[T]) -> dict[str, type[T]]:
    """Import the modules of `package`; return the subclass of `base` in each, by the module's name."""
    classes: dict[str, type[T]] = {}
    for name in names_in(package):
        module = import_module(f"{package}.{name}")
        members = (c for _, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, base))
        (classes[name],) = (c for c in members if c.__module__ == module.__name__)
    return classes
