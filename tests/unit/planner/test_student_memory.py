"""Memory of the student against closed forms and built engines."""

from math import ceil, log2
from typing import Any

import pytest
import torch
from engines import learner_of
from networks import network_of
from recipes import ADAM
from slow_cases import slow_but
from small_wan import small_transformer
from states import state
from tensors import tensor_bytes

from wandistiller.engine.ds_config import load, student_engine
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.zero_memory import Bytes
from wandistiller.experts import Expert
from wandistiller.network.network import Parameters, Trained, parameters_of
from wandistiller.planner.student_memory import AVERAGE, student_parts
from wandistiller.student.learner import Learner
from wandistiller.wan.folder import WanFolder
from wandistiller.wan.transformer import velocity
from wandistiller.wan.transformer_config import TransformerConfig

BF16 = {"bf16": {"enabled": True}}
LARGE = "14B"
P = 14_288_491_584  # parameters of Wan 14B; all of its tensors have even sizes
WIDTH = 5120


def engine_of(
    stage: int, *, offload: str = "none", bf16: bool = True, accumulation: int = 1, **zero: Any
) -> EngineConfig:
    ds = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": ADAM | {"params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **zero},
    }
    if offload != "none":
        ds["zero_optimization"]["offload_optimizer"] = {"device": offload}
    return student_engine(load(ds | (BF16 if bf16 else {})), 1)


def student(folder: WanFolder, engine: EngineConfig, ranks: int = 1, accelerator: bool = False) -> Bytes:
    network = Parameters(folder.config.numels)
    parts = student_parts(network, 1, engine, ranks, accelerator=accelerator)
    return sum(parts.values(), Bytes())


def train_a_step(made: Learner, device: torch.device) -> None:
    engine = made.engine(Expert.HIGH_NOISE)
    inputs = torch.zeros(1, 16, 1, 4, 4), torch.ones(1), torch.zeros(1, 8, 32)
    engine.backward(velocity(engine, state(*(t.to(device) for t in inputs))).square().mean())
    engine.step()


SIZES = {"num_attention_heads": 4, "attention_head_dim": 64, "ffn_dim": 512}


@pytest.mark.parametrize("bf16", slow_but([True], [True, False]), ids=["bf16", "float32"])
@pytest.mark.parametrize(
    ("stage", "offload"),
    slow_but(
        [(0, "none"), (2, "cpu"), (3, "cpu")],
        [(0, "none"), *((s, home) for s in (1, 2, 3) for home in ("none", "cpu"))],
    ),
)
def test_a_student_s_engine_keeps_the_planned_bytes(
    one_rank: torch.device, stage: int, offload: str, bf16: bool
) -> None:
    engine = engine_of(stage, offload=offload, bf16=bf16)
    before, model = tensor_bytes(), small_transformer(0, 2, **SIZES)
    network = Parameters(TransformerConfig.of(model.config).numels)
    made = learner_of(model, engine)
    train_a_step(made, one_rank)
    planned = sum(student_parts(network, 1, engine, 1, accelerator=False).values(), Bytes())
    assert tensor_bytes() - before == pytest.approx(planned.device + planned.host, rel=0.01)


@pytest.mark.parametrize(
    ("stage", "offload"), slow_but([(2, "cpu")], [(0, "none"), (2, "none"), (2, "cpu"), (3, "cpu")])
)
@pytest.mark.parametrize("tuned", slow_but(["lora"], ["frozen", "lora"]))
def test_frozen_weights_have_no_optimizer_and_an_average_takes_4_bytes(
    one_rank: torch.device, stage: int, offload: str, tuned: str
) -> None:
    lora = {"rank": 4, "targets": ["to_q", "ffn"]} if tuned == "lora" else None
    frozen = ["blocks.0", "ffn"] if tuned == "frozen" else None
    engine = engine_of(stage, offload=offload)
    model = small_transformer(0, 2, **SIZES)
    config, before = TransformerConfig.of(model.config), tensor_bytes()
    model = model.requires_grad_(True)
    trained = Trained(lora=lora, frozen=frozen or ())
    network_of(model).prepare(trained)
    sizes = [
        {n: p.numel() for n, p in model.named_parameters() if p.requires_grad is learns}
        for learns in (True, False)
    ]
    assert parameters_of(config, trained) == Parameters(*sizes)
    before -= sum(p.nbytes for p in model.parameters())  # of a network that the engine takes over
    made = learner_of(model, engine, ema=0.9)
    train_a_step(made, one_rank)
    parts = student_parts(Parameters(*sizes), 1, engine, 1, accelerator=False, ema=True)
    assert parts[AVERAGE].device + parts[AVERAGE].host == 4 * sum(sizes[0].values())
    planned = sum(parts.values(), Bytes())
    assert tensor_bytes() - before == pytest.approx(planned.device + planned.host, rel=0.02)


@pytest.mark.parametrize(
    ("stage", "kept"), [(1, 2 * P + 12 * P // 2), (2, 2 * P + 12 * P // 2), (3, 16 * P // 2 + 2 * 1000)]
)
def test_without_offloading_a_student_on_two_ranks_keeps(
    wans: dict[str, WanFolder], stage: int, kept: int
) -> None:
    engine = engine_of(stage, stage3_param_persistence_threshold=0)
    assert student(wans[LARGE], engine, 2).device == kept  # 3: and a bucket


def test_zero_2_s_own_gradients_are_there_three_times_in_a_step(wans: dict[str, WanFolder]) -> None:
    assert student(wans[LARGE], engine_of(2), 4).transient == (2 + 2 + 4) * P // 4


def test_zero_2_offloaded_leaves_the_weights_and_a_buffer_on_the_device(wans: dict[str, WanFolder]) -> None:
    memory = student(wans[LARGE], engine_of(2, offload="cpu", accumulation=4), 2)
    largest = 2 * 6 * WIDTH * WIDTH
    assert (memory.device, memory.host) == (2 * P + largest, (4 + 8 + 4 + 2 + 2) * P // 2 + largest)


def test_zero_3_offloaded_leaves_a_part_of_the_weights_on_the_device(wans: dict[str, WanFolder]) -> None:
    memory = student(wans[LARGE], engine_of(3, offload="cpu", stage3_param_persistence_threshold=0), 2)
    assert (memory.device, memory.host) == (2 * P // 2 + 2 * 1000, (4 + 8 + 4 + 2) * P // 2)


def test_zero_3_holds_all_weights_in_the_backward_pass_unless_blocks_are_computed_anew(
    wans: dict[str, WanFolder],
) -> None:
    kept = engine_of(3, offload="cpu", stage3_max_live_parameters=0, stage3_max_reuse_distance=0)
    anew = kept.replaced(activation_checkpointing={"partition_activations": False})
    assert student(wans[LARGE], kept, 2).transient - student(wans[LARGE], anew, 2).transient > 2 * P * 0.9


def test_large_page_locked_memory_takes_what_it_needs(wans: dict[str, WanFolder]) -> None:
    engine = engine_of(2, offload="cpu")
    free, locked = (student(wans[LARGE], engine, 2, accelerator=gpu) for gpu in (False, True))
    assert locked.host == free.host


def test_small_page_locked_memory_comes_in_powers_of_two() -> None:
    config = TransformerConfig.of(small_transformer(0, 1).config)
    sizes = config.numels.values()
    part = -(-sum(sizes) // 2) * 2
    pieces = 2 * part, 4 * part, 4 * part, 2 * max(sizes)  # weights, masters, gradients, a tensor on its way
    assert max(pieces) < 2**20
    engine = engine_of(2, offload="cpu")
    how = Parameters(config.numels), 1, engine, 1
    locked, free = (student_parts(*how, accelerator=gpu).values() for gpu in (True, False))
    more = sum(part.host for part in locked) - sum(part.host for part in free)
    assert more == sum(2 ** ceil(log2(n)) - n for n in pieces)
