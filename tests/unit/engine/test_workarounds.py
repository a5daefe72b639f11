"""Workarounds for DeepSpeed that change no number."""

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from wandistiller.engine import workarounds
from wandistiller.flow import keyed_normal


def weights_after(steps: int, size: int) -> list[torch.Tensor]:
    """Weights and moments after updates of Adam."""
    weights = torch.nn.Parameter(keyed_normal((size,), "weights"))
    adam = DeepSpeedCPUAdam([weights], lr=1e-2, weight_decay=0.1)
    adam.register_step_pre_hook(lambda optimizer, *_: workarounds.reset_adam_step_cache(optimizer))
    workarounds.share_adam_s_time(adam)
    for step in range(steps):
        weights.grad = keyed_normal((size,), "gradient", step)
        adam.step()
    return [weights.detach(), *(adam.state[weights][name] for name in ("exp_avg", "exp_avg_sq"))]


@pytest.mark.parametrize("size", [4096, 4096 * 2 + 77, 5])
def test_adam_in_parts_changes_no_bit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights_after(3, size)
    monkeypatch.setattr(workarounds, "ADAM_PART", 1024)
    assert all(map(torch.equal, weights_after(3, size), whole))
