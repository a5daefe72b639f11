"""DeepSpeed JSONs as other trainers write them: filled as there, or refused with what to write."""

import json
from pathlib import Path
from typing import Any

import pytest
from engines import learner_of
from ranks import write_json
from reading import read_run
from recipes import ADAM
from small_wan import small_transformer
from states import state

from wandistiller.config.validate import read_job
from wandistiller.engine.ds_config import load, student_engine
from wandistiller.engine.ds_overrides import apply_overrides, fill_auto
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.preflight import config_problems
from wandistiller.experts import Expert
from wandistiller.student.learner import Learner
from wandistiller.teacher.teacher_json import read_placement
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_normal

STEPS, LR = 500, 1e-4
PATHS = {"teacher_path": "tiny", "data_path": "tiny"}
NO_DECAY = {"weight_decay": 0.0}


def auto(*keys: str) -> dict[str, Any]:
    return dict.fromkeys(keys, "auto")


def zero(stage: int | str, **more: Any) -> dict[str, Any]:
    """The section of a stage, with further keys."""
    return {"zero_optimization": {"stage": stage, **more}}


def schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


BATCH = auto("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
BOTH = BATCH | auto("gradient_clipping") | {"bf16": auto("enabled"), "fp16": auto("enabled")}
TINY = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
ON_CPU = {"device": "cpu", "pin_memory": True}
OFFLOADED = zero(2, offload_optimizer=ON_CPU, reduce_bucket_size="auto", overlap_comm="auto")
ACCEPTED = {
    "both auto": (BOTH | zero(3, sub_group_size=1e9, reduce_bucket_size="auto"), "3 bfloat16 none none"),
    "offloaded": (BOTH | OFFLOADED, "2 bfloat16 cpu none"),
    "all by accelerate": (
        BOTH | zero("auto", offload_optimizer=auto("device", "nvme_path"), contiguous_gradients="auto"),
        "2 bfloat16 cpu none",
    ),
    "bf16 auto beside fp16": (BOTH | {"fp16": {"enabled": True}} | zero(2), "2 float16 none none"),
    "nulls": (
        TINY
        | zero(3, offload_optimizer=ON_CPU | {"nvme_path": None})
        | {"wandb": {"enabled": False, "team": None}},
        "3 bfloat16 cpu none",
    ),
    "remarks": (
        BOTH | {"_comment": "for 8 GPUs", "//": "see the wiki", "comment": ["a"]} | zero(2, **{"#": 1}),
        "2 bfloat16 none none",
    ),
    "sections switched off": (
        TINY
        | {"amp": {"enabled": False}, "hybrid_engine": {"enabled": False}, "eigenvalue": {"enabled": False}},
        "1 bfloat16 none none",
    ),
    "a schedule without an optimizer": (
        TINY | schedule("WarmupLR", warmup_max_lr=3e-5, warmup_num_steps=100),
        "1 bfloat16 none none",
    ),
}
"""JSON; stage, precision, devices of optimizer and parameters of its engine."""


def read(given: dict[str, Any], lr: float | None = LR) -> EngineConfig:
    """The engine of a JSON on one rank, checked by this package and by DeepSpeed's own reader."""
    json = load(given)
    if lr and "optimizer" not in given and "scheduler" not in given:
        json = apply_overrides(json, lr=lr)
    engine = student_engine(fill_auto(json, STEPS), 1)
    if problems := config_problems(engine, here=False):
        raise ConfigError(*problems)
    return engine


def refusals(given: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(given)
    return caught.value.problems


@pytest.mark.usefixtures("quiet_logging")
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_form_gives_the_engine_that_it_asks_for_and_can_be_read_again(name: str) -> None:
    given, expected = ACCEPTED[name]
    before = json.dumps(given)
    engine = read(given)
    assert f"{engine.stage} {engine.precision} {engine.optimizer_on} {engine.weights_on}" == expected
    assert read(engine.raw) == engine and json.dumps(given) == before


def test_an_optimizer_that_is_left_out_has_the_rate_of_the_recipe_or_of_the_schedule() -> None:
    rates = {"both auto": LR, "a schedule without an optimizer": 3e-5}
    for name, lr in rates.items():
        expected = {"type": "AdamW", "params": {"lr": lr} | NO_DECAY}
        assert read(ACCEPTED[name][0]).raw["optimizer"] == expected


def test_without_any_rate_the_message_names_flag_recipe_and_json(tmp_path: Path) -> None:
    file = write_json(tmp_path / "ds.json", ACCEPTED["offloaded"][0])
    recipe = PATHS | {"output_dir": str(tmp_path / "out"), "deepspeed_config": str(file)}
    with pytest.raises(ConfigError) as caught:
        read_job(read_run(str(write_json(tmp_path / "r.json", recipe)), {}), 1)
    (message,) = caught.value.problems
    assert message == (
        f"{file}: no `optimizer` section, which would be AdamW, but no learning rate is known. Give --lr, or "
        '"lr" in the recipe, or write "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}} here.'
    )
    engine = read_job(read_run(str(tmp_path / "r.json"), {"lr": 2e-5}), 1).student_engine
    assert engine.section("optimizer.params")["lr"] == 2e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hybrid_engine": {"enabled": True}}, '`hybrid_engine` is {"enabled": true}. It does not go with'),
        (
            zero(2, cpu_offload=True),
            "`zero_optimization.cpu_offload` is true. Unknown key. Did you mean `offload_optimizer`?",
        ),
        (
            zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
            "`zero_optimization.offload_optimizer.ratio` is 0.5. It does not go with",
        ),
        (
            zero(3, compute_grad_norm=False) | {"gradient_clipping": 0},
            "`zero_optimization`: DeepSpeed refuses it: compute_grad_norm=false is supported only with ZeRO "
            "Stage 1 or 2. Change or remove what it names.",
        ),
    ],
    ids=str,
)
def test_one_message_names_key_value_and_what_to_write(change: dict[str, Any], message: str) -> None:
    (found,) = refusals(TINY | {"optimizer": ADAM} | change)
    assert found.startswith("recipe: `") and message in found


def test_an_open_precision_of_a_teacher_is_bf16_too() -> None:
    placement = read_placement(load({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}))
    assert placement.engine.precision == "bfloat16"


def learner(engine: EngineConfig) -> Learner:
    return learner_of(small_transformer(0, 1), engine)


def step(student: Learner, number: int) -> dict[str, Any]:
    """Learn to predict zero."""
    x, text = keyed_normal((1, 16, 1, 4, 4), number), keyed_normal((1, 7, 32), number)
    loss = student.velocity(state(x, x.new_tensor([0.5]), text)).square().mean()
    student.backward(Expert.HIGH_NOISE, loss)
    student.step(Expert.HIGH_NOISE)
    return student.state(Expert.HIGH_NOISE)


@pytest.mark.usefixtures("one_rank")
def test_the_logged_rate_is_the_one_that_the_step_was_taken_with() -> None:
    linear = schedule("WarmupLR", warmup_max_lr=1e-3, warmup_num_steps=4, warmup_type="linear")
    plain = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.0}}}
    student = learner(read({"train_micro_batch_size_per_gpu": 1} | plain | linear, lr=None))
    moved, rates = [], []
    for number in range(4):
        before = [p.detach().clone() for p in student.engine(Expert.HIGH_NOISE).module.parameters()]
        rates.append(step(student, number)["lr"])
        after = student.engine(Expert.HIGH_NOISE).module.parameters()
        moved.append(any(not p.equal(old) for p, old in zip(after, before, strict=True)))
    assert rates == pytest.approx([0, 0, 0.25e-3, 0.5e-3])
    assert moved == [False, False, True, True]
