"""Called on a rank by test_workarounds.py."""

import sys

import deepspeed
import torch


def is_imported_after_steps(stages: list[int]) -> bool:
    """Make a step with Adam at each stage; return whether torch's compiler is imported then."""
    adam = {"type": "AdamW", "params": {"torch_adam": True}}
    for stage in stages:
        config = {"train_batch_size": 1, "optimizer": adam, "zero_optimization": {"stage": stage}}
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    return "torch._inductor.lowering" in sys.modules
