"""The keys and the batch arithmetic against DeepSpeed's own classes; refusals and their messages."""

from collections.abc import KeysView
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.activation_checkpointing import config as activation_checkpointing
from deepspeed.runtime.config import DeepSpeedConfig

from wandistiller.engine import ds_config, ds_schema
from wandistiller.engine.batch_size import BatchSize, batch_size
from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.engine.ds_overrides import fill_auto
from wandistiller.engine.ds_schema import section_types
from wandistiller.teacher.teacher_json import read_placement
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import SHIPPED

# DeepSpeed 0.19.8 reads these too, and has removed them, or reads an old name
GONE = {"bfloat16", "vocabulary_size"}
REFUSED = {"managed_gradient_accumulation", "gradient_allreduce_op"}
STUDENT = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}


class Recorder(dict):
    """A dict that notes every key that is read, whether it has it or not."""

    read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def keys(self) -> KeysView[str]:
        return KeysView(self)


def x_json(ds: dict[str, Any]) -> DeepSpeedJson:
    return DeepSpeedJson("x.json", ds)


def refused(check: Any, ds: dict[str, Any], *args: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(x_json(ds), *args)
    return caught.value.problems


def test_the_top_level_keys_are_those_that_deepspeed_reads() -> None:
    DeepSpeedConfig(Recorder(train_batch_size=1))
    assert section_types()[""].keys() == Recorder.read - {*ds_config.NOT_OFFERED} - GONE - REFUSED


def test_the_keys_of_activation_checkpointing_are_deepspeed_s_constants() -> None:
    expected = activation_checkpointing.ACT_CHKPT_DEFAULT.keys()
    assert section_types()["activation_checkpointing"].keys() == expected


def batch_json(*numbers: int | None) -> dict[str, int]:
    """Total, micro-batch and accumulation, but for those that are None."""
    return {k: v for k, v in zip(ds_schema.BATCH_KEYS, numbers, strict=True) if v is not None}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "numbers", [(24, 3, 4), (24, 3, None), (24, None, 4), (24, None, None), (None, 3, 4), (None, 3, None)]
)
def test_the_batch_numbers_are_solved_as_deepspeed_solves_them(numbers: tuple[int | None, ...]) -> None:
    ds, ranks = batch_json(*numbers), SimpleNamespace(get_data_parallel_world_size=lambda: 2)
    own = DeepSpeedConfig(dict(ds), mpu=ranks)
    expected = (own.train_micro_batch_size_per_gpu, own.gradient_accumulation_steps, own.train_batch_size)
    assert batch_size(x_json(ds), 2) == BatchSize(*expected)


@pytest.mark.parametrize("ds", [{}, {"gradient_accumulation_steps": 4}])
def test_no_batch_size_is_refused(ds: dict[str, int]) -> None:
    assert "no batch size" in refused(batch_size, ds, 2)[0]


@pytest.mark.parametrize("section", section_types())
def test_a_misspelled_key_of_every_section_names_the_right_one(section: str) -> None:
    key = min(section_types()[section])
    ds: dict[str, Any] = {f"{key}_": 1}
    for name in reversed(section.split(".") if section else []):
        ds = {name: ds}
    unknown = [p for p in refused(ds_config.student_engine, STUDENT | ds, 1) if "Unknown key" in p]
    path = ".".join(filter(None, (section, f"{key}_")))
    assert unknown == [f"x.json: `{path}` is 1. Unknown key. Did you mean `{key}`?"]


def test_keys_that_are_refused_may_stand_there_switched_off() -> None:
    zero = {"stage": 3, "memory_efficient_linear": False, "zero_quantized_weights": False}
    zero["stage3_module_granularity_threshold"] = 0
    more, off = (
        {"gradient_predivide_factor": 1.0},
        {"eigenvalue": {"enabled": False}, "amp": {"enabled": "auto"}},
    )
    off |= {"compile": {"deepcompile": False}}
    ds = ds_config.student_engine(ds_config.load(STUDENT | more | off | {"zero_optimization": zero}), 1).raw
    assert ds.items() >= more.items() and ds["zero_optimization"].items() >= zero.items()
    assert not ds.keys() & off.keys()


def test_what_deepspeed_would_choose_in_silence_is_written_out() -> None:
    engine = ds_config.student_engine(x_json(STUDENT | {"zero_optimization": {"stage": 3}}), 2)
    ds = engine.raw
    assert engine.batch == BatchSize(4, 1, 8) and ds.items() >= batch_json(8, 4, 1).items()
    assert ds["gradient_clipping"] == DeepSpeedConfig({"train_batch_size": 1}).gradient_clipping == 1.0
    lean = ds_config.BUCKETS | ds_config.LEAN_STAGE_3
    assert ds["zero_optimization"] == lean | {"stage": 3, "memory_efficient_linear": False}
    assert ds["timers"] == {"throughput": {"enabled": False}}


@pytest.mark.parametrize(
    ("optimizer", "decay"),
    [
        ({"type": "AdamW", "params": {"lr": 1e-4}}, 0.0),
        ({"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}}, 0.0),
        ({"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}}, 0.1),
    ],
    ids=str,
)
def test_the_decay_of_adam_is_the_same_whoever_computes_it(
    optimizer: dict[str, Any], decay: float | None
) -> None:
    engine = ds_config.student_engine(x_json(STUDENT | {"optimizer": optimizer}), 1)
    assert engine.section("optimizer.params").get("weight_decay") == decay


def test_a_teacher_s_batch_numbers_mean_nothing_and_are_replaced() -> None:
    ds = read_placement(x_json(dict.fromkeys(ds_schema.BATCH_KEYS, 7))).engine.raw
    assert {k: ds[k] for k in ds_schema.BATCH_KEYS if k in ds} == {"train_micro_batch_size_per_gpu": 1}


def test_a_completed_json_can_be_passed_back_in() -> None:
    student = ds_config.student_engine(x_json(STUDENT), 2)
    assert ds_config.student_engine(student, 2) == student
    teacher = read_placement(x_json({"bf16": {"enabled": True}}))
    assert read_placement(teacher.engine) == teacher


@pytest.mark.parametrize("file", sorted((SHIPPED / "student").glob("*.json")), ids=lambda f: f.name)
@pytest.mark.parametrize("world", [1, 2])
def test_a_shipped_student_json_passes(file: Path, world: int) -> None:
    json = fill_auto(ds_config.load(str(file)), 700)
    batch = ds_config.student_engine(json, world).batch
    assert batch.micro * batch.accumulation * world == batch.total and batch.ranks == world


@pytest.mark.parametrize("file", sorted((SHIPPED / "teacher").glob("*.json")), ids=lambda f: f.name)
def test_a_shipped_teacher_json_passes(file: Path) -> None:
    engine = read_placement(ds_config.load(str(file))).engine
    assert DeepSpeedConfig(engine.for_deepspeed).zero_config.stage == engine.stage
