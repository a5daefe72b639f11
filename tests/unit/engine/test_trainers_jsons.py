"""DeepSpeed JSONs of other trainers: filled as there and read by DeepSpeed, or refused with a cure."""

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import write_json
from reading import read_run
from recipes import ADAM
from small_wan import small_transformer
from states import state
from trainers_jsons import ACCEPTED, REFUSED, TINY, schedule, zero

from wandistiller.config.summary import without_learning
from wandistiller.config.validate import read_job
from wandistiller.engine.ds_config import load, student_engine
from wandistiller.engine.ds_overrides import (
    EngineOverrides,
    apply_overrides,
    contradictions,
    fill_auto,
    fill_steps,
)
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.preflight import config_problems
from wandistiller.experts import Expert
from wandistiller.student.learner import Learner
from wandistiller.teacher.teacher_json import read_placement
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_normal

WIDTH, STEPS, LR = 64, 500, 1e-4
PATHS = {"teacher_path": "tiny", "data_path": "tiny"}
NO_DECAY = {"weight_decay": 0.0}


def read(given: dict[str, Any], lr: float | None = LR) -> EngineConfig:
    """The engine of a JSON on one rank, checked by this package and by DeepSpeed's own reader."""
    json, own = load(given), EngineOverrides(lr=lr)
    if not contradictions(json, own, 1):
        json = apply_overrides(json, own)
    engine = student_engine(fill_steps(fill_auto(json, WIDTH), STEPS), 1)
    if problems := config_problems(engine, here=False):
        raise ConfigError(*problems)
    return engine


def refusals(given: dict[str, Any], lr: float | None = LR) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(given, lr)
    return caught.value.problems


def in_words(engine: EngineConfig) -> str:
    return f"{engine.stage} {engine.precision} {engine.optimizer_on} {engine.weights_on}"


def test_the_table_has_58_forms() -> None:
    assert len(ACCEPTED) + len(REFUSED) == 58


@pytest.mark.usefixtures("quiet_logging")
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_published_form_gives_the_engine_that_it_asks_for(name: str) -> None:
    assert in_words(read(ACCEPTED[name].ds)) == ACCEPTED[name].engine


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_that_cannot_be_kept_is_refused_once_with_what_to_write(name: str) -> None:
    (message,) = refusals(REFUSED[name].ds | ({} if "optimizer" in REFUSED[name].ds else {"optimizer": ADAM}))
    assert REFUSED[name].cure in message and message.endswith((".", "?"))


def test_reading_a_form_changes_nothing_in_what_was_given() -> None:
    for form in (*ACCEPTED.values(), *REFUSED.values()):
        before = json.dumps(form.ds)
        load(form.ds)
        assert json.dumps(form.ds) == before


def test_a_form_that_was_read_can_be_read_again() -> None:
    for form in ACCEPTED.values():
        engine = read(form.ds)
        assert read(engine.raw) == engine


def test_an_optimizer_that_is_left_out_is_adamw_at_the_recipe_s_rate() -> None:
    assert read(ACCEPTED["3, both auto"].ds).raw["optimizer"] == {
        "type": "AdamW",
        "params": {"lr": LR} | NO_DECAY,
    }


def test_an_optimizer_that_is_left_out_has_the_rate_of_the_schedule_beside_it() -> None:
    engine = read(ACCEPTED["a schedule without an optimizer"].ds, lr=None)
    assert engine.raw["optimizer"] == {"type": "AdamW", "params": {"lr": 3e-5} | NO_DECAY}


def test_without_any_rate_the_message_names_flag_recipe_and_json(tmp_path: Path) -> None:
    file = write_json(tmp_path / "ds.json", ACCEPTED["2, offloaded"].ds)
    recipe = PATHS | {"output_dir": str(tmp_path / "out"), "deepspeed_config": str(file)}
    with pytest.raises(ConfigError) as caught:
        read_job(read_run(str(write_json(tmp_path / "r.json", recipe)), {}, 1), 1)
    (message,) = caught.value.problems
    assert message == (
        f"{file}: no `optimizer` section, which would be AdamW, but no learning rate is known. Give --lr, or "
        '"lr" in the recipe, or write "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}} here.'
    )
    engine = read_job(read_run(str(tmp_path / "r.json"), {"lr": 2e-5}, 1), 1).student_engine
    assert engine.section("optimizer.params")["lr"] == 2e-5


def test_deepspeed_s_names_of_fields_become_their_aliases_with_their_values() -> None:
    section = read(ACCEPTED["3, names of fields"].ds).section("zero_optimization")
    values = {"stage3_max_live_parameters": 1e9, "stage3_prefetch_bucket_size": 5e7, "sub_group_size": 1e9}
    assert section.items() >= (values | {"stage3_gather_16bit_weights_on_model_save": True}).items()
    assert "max_live_parameters" not in section


def test_a_count_written_as_1e5_is_an_integer() -> None:
    steps = read(ACCEPTED["steps_per_print 1e5"].ds).raw["steps_per_print"]
    assert steps == 100_000 and isinstance(steps, int)


def test_the_name_of_a_schedule_is_deepspeed_s_however_it_is_written() -> None:
    ds = read(TINY | schedule("warmuplr", warmup_max_lr=1e-3)).raw
    assert ds["scheduler"]["type"] == "WarmupLR" and ds["optimizer"]["params"]["lr"] == 1e-3


def test_fp16_auto_alone_is_bf16_as_is_every_precision_that_is_left_open() -> None:
    ds = read({"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": "auto"}} | zero(2)).raw
    assert ds["bf16"] == {"enabled": True} and ds["fp16"] == {"enabled": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compile": True}, "`compile` is true. DeepSpeed's own compiling was never tried"),
        ({"compile": {"enabled": True}}, '`compile` is {"enabled": true}. DeepSpeed\'s own compiling'),
        (zero("2"), '`zero_optimization.stage` is "2". Write one of: 0, 1, 2, 3. Remove the quotes.'),
        (
            zero("3", offload_param={"device": "cpu"}),
            '`zero_optimization.stage` is "3". Write one of: 0, 1, 2, 3. Remove the quotes.',
        ),
        (
            zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
            "`zero_optimization.offload_optimizer.ratio` is 0.5. At stage 2 all is offloaded or nothing. "
            "Remove it, or write stage 3.",
        ),
        (
            zero(3, ratio=0.5),
            "`zero_optimization.ratio` is 0.5. Its place is the section "
            "`zero_optimization.offload_optimizer`.",
        ),
        (
            zero(3, compute_grad_norm=False) | {"gradient_clipping": 0},
            "`zero_optimization`: DeepSpeed refuses it: compute_grad_norm=false is supported only with ZeRO "
            "Stage 1 or 2. Change or remove what it names.",
        ),
        ({"gradient_clipping": "1.0"}, '`gradient_clipping` is "1.0". Write a number. Remove the quotes.'),
        ({"wall_clock_breakdown": "True"}, '"True". Write true or false. Remove the quotes.'),
        ({"comms_logger": {"enable": True}}, "`comms_logger.enable` is true. Unknown key."),
    ],
    ids=str,
)
def test_one_message_names_key_value_and_what_to_write(change: dict[str, Any], message: str) -> None:
    (found,) = refusals(TINY | change)
    assert found.startswith(f"recipe: {message}" if message[0] == "`" else "recipe: ") and message in found


def test_both_precisions_auto_in_a_teacher_s_json_are_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        read_placement(load({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}))
    remedy = "Write true in one of the sections bf16 and fp16, or leave both out for float32."
    assert caught.value.problems == [f'recipe: `bf16.enabled` and `fp16.enabled` is "auto". {remedy}']


WARMUP = schedule("WarmupLR", warmup_max_lr=1e-3, warmup_num_steps=4)
DECAY = schedule("WarmupDecayLR", warmup_max_lr=1e-3, warmup_num_steps=4, total_num_steps=20)
COSINE = schedule("WarmupCosineLR", warmup_min_ratio=0.1, warmup_num_steps=4, total_num_steps=20)
TWO_STEPS = "begins with a learning rate of 0: steps 1 to 2 of {} train nothing"


@pytest.mark.usefixtures("quiet_logging")
@pytest.mark.parametrize(
    ("more", "steps", "lines"),
    [
        ({}, 2, []),
        (WARMUP, 100, [f"schedule  WarmupLR {TWO_STEPS.format(100)}"]),
        (
            COSINE,
            20,
            ["schedule  WarmupCosineLR begins with a learning rate of 0: step 1 of 20 train nothing"],
        ),
        (schedule("WarmupLR", warmup_min_lr=1e-5, warmup_max_lr=1e-3), 100, []),
        (
            WARMUP,
            2,
            [
                "warning   the learning rate of all 2 steps is 0 by WarmupLR: nothing is trained. Write "
                '"max_steps" above 2, or remove `scheduler`'
            ],
        ),
        (
            DECAY,
            30,
            [
                f"schedule  WarmupDecayLR {TWO_STEPS.format(30)}",
                "warning   the learning rate is 0 by WarmupDecayLR from step 22 on: 9 of 30 steps train "
                'nothing. Write a larger `total_num_steps`, or "auto"',
            ],
        ),
    ],
    ids=str,
)
def test_steps_that_train_nothing_are_named(more: dict[str, Any], steps: int, lines: list[str]) -> None:
    assert without_learning(read(TINY | {"optimizer": ADAM} | more, lr=None), steps) == lines


def learner(engine: EngineConfig) -> Learner:
    return Learner({Expert.HIGH_NOISE: small_transformer(0, 1)}, engine)


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


TORCH = {"torch_adam": True}
"""So that DeepSpeed's other Adam, which few tests need, is not compiled."""
BUILT = [
    "3, sub_group_size 0",
    "3, names of fields",
    "cpu_offload",
    "3, both old offloads",
    "all by accelerate",
]


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank", "quiet_logging")
@pytest.mark.parametrize("name", BUILT)
def test_an_engine_of_a_published_form_learns(name: str) -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-3} | ({} if "cpu" in ACCEPTED[name].engine else TORCH)}
    more = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam}
    student = learner(read(ACCEPTED[name].ds | more, lr=None))
    before = student.trained[Expert.HIGH_NOISE].flats[0].key.detach().clone()
    step(student, 0)
    assert not student.trained[Expert.HIGH_NOISE].flats[0].key.equal(before)
