"""torch.compile: blocks that do not compile, its log, and its rounding."""

import logging
from collections.abc import Iterator

import pytest
import torch

from wandistiller.engine.compiler import compiled, log_compiled


@pytest.fixture
def eager_backend() -> Iterator[None]:
    torch.compiler.reset()
    limit = torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit)
    with limit, torch.compiler.set_stance(force_backend="eager"):
        yield
    torch.compiler.reset()


def test_a_block_that_does_not_compile_is_computed_eagerly() -> None:
    torch.compiler.reset()
    with torch._inductor.config.patch({"cpp.cxx": ("/bin/false",), "force_disable_caches": True}):
        assert torch.equal(compiled(lambda x: 2 * x)(torch.ones(3)), torch.full((3,), 2.0))
    torch.compiler.reset()


def test_what_was_compiled_is_logged_once(eager_backend: None, caplog: pytest.LogCaptureFixture) -> None:
    before = log_compiled(0.0)
    compiled(lambda x: 3 * x)(torch.ones(3))
    caplog.clear()
    with caplog.at_level(logging.INFO, "wandistiller"):
        after = log_compiled(before)
        assert log_compiled(after) == after > before
    (line,) = caplog.messages
    assert line.startswith("compile   ") and "variants of a block" in line


def test_casts_are_emulated_as_eager_code_rounds() -> None:
    compiled(lambda x: x)
    assert torch._inductor.config.emulate_precision_casts
