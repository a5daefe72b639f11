"""The general types of a family's folder and config, and the one family that there is."""

from types import FunctionType

import pytest

from wandistiller.network.config import NetworkConfig
from wandistiller.network.folder import Folder
from wandistiller.wan.folder import WanFolder
from wandistiller.wan.transformer_config import TransformerConfig


def says_nothing() -> None:
    """A body of a docstring alone."""


@pytest.mark.parametrize(("asked", "family"), [(NetworkConfig, TransformerConfig), (Folder, WanFolder)])
def test_a_family_answers_all_that_is_asked_of_it(asked: type, family: type) -> None:
    functions = {
        name: getattr(f, "fget", None) or getattr(f, "__func__", f) for name, f in vars(asked).items()
    }
    declared = {
        name
        for name, f in functions.items()
        if isinstance(f, FunctionType) and f.__code__.co_code == says_nothing.__code__.co_code
    }
    assert len(declared) > 10 and declared <= vars(family).keys()
    assert {*asked.__annotations__} <= {*family.__annotations__, *vars(family)}
