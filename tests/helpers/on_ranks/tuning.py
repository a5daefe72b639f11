"""Called on ranks by test_trainable.py: steps of a student that is partly trained, and its checkpoint."""

from pathlib import Path
from typing import Any

import torch
from checkpointed import save
from deepspeed.utils import safe_get_full_fp32_param
from engines import learner_of
from networks import network_of
from recipes import ADAM, TORCH_ADAM
from small_wan import small_transformer
from states import state
from torch import Tensor

from wandistiller.batch import Batch
from wandistiller.checkpoint import checkpointer, loading
from wandistiller.checkpoint.safetensors_stream import ShardedTensors
from wandistiller.config.run_config import RunConfig
from wandistiller.distributed import collectives
from wandistiller.engine.ds_config import load, student_engine
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.optimizer_state import WEIGHTS
from wandistiller.experts import Expert
from wandistiller.network.network import Trained
from wandistiller.student.learner import Learner
from wandistiller.utils.keyed_random import keyed_normal

DECAY, START, STEPS = 0.8, 1, 4
CASES = [(0, "bfloat16"), (2, "float32"), (3, "bfloat16")]
PARTLY = RunConfig(
    frozen=["patch_embedding", "blocks.0", "bias"], learning_rates={"blocks.2-": 0.1, "proj_out": 4.0}
)


def engine(stage: int, dtype: str = "float32", **more: Any) -> EngineConfig:
    """A checked engine; two samples a rank, weights of every size sharded."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if stage > 0:
        zero["offload_optimizer"] = {"device": "cpu"}
    ds = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": ADAM,
        "activation_checkpointing": {},
        "zero_optimization": zero,
        **more,
    }
    return student_engine(load(ds).in_precision(dtype), collectives.world_size())


def build(run: RunConfig, config: EngineConfig, seed: int = 1, layers: int = 3, **more: Any) -> Learner:
    model = small_transformer(seed, layers)
    network_of(model).prepare(Trained(lora=run.lora, frozen=run.frozen or (), seed=run.seed))
    return learner_of(model, config, learning_rates=run.learning_rates, **more)


def batch(step: int) -> Batch:
    x_BCFHW = keyed_normal((2, 16, 1, 4, 4), "x", step, collectives.rank())
    text_BLD = keyed_normal((2, 512, 32), "text", step, collectives.rank())
    return state(x_BCFHW, torch.tensor([0.9, 0.3]), text_BLD)


def learn(student: Learner, step: int) -> float:
    """One optimizer step, towards answering nothing."""
    engine = student.engine(Expert.HIGH_NOISE)
    loss = student.velocity(batch(step)).square().mean()
    engine.backward(loss)
    engine.step()
    student.update_ema(Expert.HIGH_NOISE, step + 1)
    return loss.item()


def waits_of_an_update(layers: int, reports: Path) -> list[int]:
    """Return how often the host waits for a simulated GPU in the second update of offloaded adapters.

    Of one and of two micro-steps, without their forward passes.
    """
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    return [_waits(layers, reports, {"zero_optimization": offload}, micro_steps) for micro_steps in (1, 2)]


def _waits(layers: int, reports: Path, sections: dict[str, Any], micro_steps: int) -> int:
    config = engine(2, gradient_accumulation_steps=micro_steps, **sections)
    student = build(RunConfig(lora={"rank": 4}), config, layers=layers)
    trained, waits = student.engine(Expert.HIGH_NOISE), []
    for step in range(2 * micro_steps):
        here = [t.to(collectives.device()) for t in batch(step).tensors()]
        loss = student.velocity(batch(step).with_tensors(here)).square().mean()
        before = sum(file.read_text().count("wait: ") for file in reports.glob("*.waits"))
        trained.backward(loss)
        trained.step()
        waits.append(sum(file.read_text().count("wait: ") for file in reports.glob("*.waits")) - before)
    return sum(waits[micro_steps:])


def masters(student: Learner) -> dict[str, Tensor]:
    """The float32 weights that are trained, whole."""
    module, trained = student.engine(Expert.HIGH_NOISE).module, student.trained[Expert.HIGH_NOISE]
    if trained.stage == 0:
        return {
            p.name: trained.tensors(flat)[WEIGHTS]
            .narrow(0, p.offset, p.numel)
            .view(trained.shapes[p.name])
            .float()
            .clone()
            for flat in trained.flats
            for p in flat.parts
        }
    return {
        n: safe_get_full_fp32_param(p).cpu().clone() for n, p in module.named_parameters() if p.requires_grad
    }


def difference(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The greatest, relative to the greatest value."""
    return max(((actual[n] - w).abs().max() / w.abs().max()).item() for n, w in wanted.items())


def steps_and_checkpoint(stage: int, dtype: str, work: Path) -> dict[str, float]:
    """Differences of a checkpoint's weights from plain PyTorch's for the same run."""
    at_start = dict(small_transformer(1, layers=3).named_parameters())
    model = network_of(small_transformer(1, layers=3)).prepare(Trained(frozen=PARTLY.frozen)).module
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    checkpointer.keep_frozen({Expert.HIGH_NOISE: model}, work, None)
    rates = PARTLY.learning_rates
    adam = {} if stage else {"optimizer": TORCH_ADAM}  # offloaded it is DeepSpeed's own
    config = engine(stage, dtype, **adam)
    student = learner_of(model, config, learning_rates=rates, ema=DECAY, ema_start=START)
    averages: dict[str, Tensor] = {}
    for step in range(STEPS):
        learn(student, step)
        weights = masters(student)
        averages = {
            n: w if step < START else DECAY * averages[n] + (1 - DECAY) * w for n, w in weights.items()
        }
    folder = save(student, work, STEPS)
    last, averaged = (dict(loading.read_weights(folder, Expert.HIGH_NOISE, which)) for which in (False, True))
    return {
        "last": difference(last, weights),
        "averaged": difference(averaged, averages),
        "moved": difference(weights, averages),
        "frozen": max((last[n] - at_start[n]).abs().max().item() for n in frozen),
        "frozen, averaged": max((averaged[n] - at_start[n]).abs().max().item() for n in frozen),
        "missing": len(at_start.keys() ^ last.keys()) + len(at_start.keys() ^ averaged.keys()),
        "in the checkpoint": sum(
            "blocks.0" in n for n in ShardedTensors(folder / Expert.HIGH_NOISE.value).names(WEIGHTS)
        ),
    }


def checkpoints(work: Path) -> list[dict[str, float]]:
    return [steps_and_checkpoint(stage, dtype, work / str(stage)) for stage, dtype in CASES]


def round_robin_at_the_start(work: Path) -> list[float]:
    """Differences of the weights in a checkpoint before training from those that it was made of, by stage."""
    at_start, differences = dict(small_transformer(1, layers=3).named_parameters()), []
    for stage in (1, 2):
        zero = {"stage": stage, "round_robin_gradients": True}
        config = engine(stage, zero_optimization=zero, optimizer=TORCH_ADAM)
        folder = save(build(PARTLY, config), work / str(stage), 0)
        weights = dict(loading.read_weights(folder, Expert.HIGH_NOISE))
        differences.append(
            max((value - at_start[name]).abs().max().item() for name, value in weights.items())
        )
    return differences


def places_of_restored_steps() -> list[str]:
    """Devices of the counts of updates that are restored for torch's Adam, fused and not."""
    devices = []
    for fused in (True, False):
        adam = ADAM | {"params": ADAM["params"] | {"torch_adam": True, "fused": fused}}
        student = build(PARTLY, engine(2, optimizer=adam, zero_optimization={"stage": 2}))
        trained = student.trained[Expert.HIGH_NOISE]
        trained.make_state(trained.flats[0], ["exp_avg", "exp_avg_sq"], 3)
        step = trained.optimizer(trained.flats[0]).state[trained.flats[0].key]["step"]
        devices.append(f"{step.item()} {step.device.type}")
    return devices
