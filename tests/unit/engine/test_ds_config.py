"""The keys and the batch arithmetic against DeepSpeed's own classes; what is refused, and in which words."""

import json
from collections.abc import Iterator, KeysView
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.activation_checkpointing import config as activation_checkpointing
from deepspeed.runtime.config import DeepSpeedConfig

from wandistiller.engine import ds_config, ds_schema
from wandistiller.engine.ds_overrides import fill_steps
from wandistiller.engine.ds_schema import section_types
from wandistiller.teacher import placement
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import SHIPPED

# DeepSpeed 0.19.8 reads these too; they are refused, since none fits a frozen teacher and this student.
NOT_OFFERED = set(
    "amp bfloat16 quantize_training sparse_attention sparse_gradients vocabulary_size "  # removed or old
    "progressive_layer_drop curriculum_learning compression_training weight_quantization "  # of the network
    "pipeline tensor_parallel expert_parallel sequence_parallel_size "
    "hybrid_engine graph_harvesting "  # other ways to split or run it
    "autotuning elasticity nebula datastates_ckpt".split()  # change the batch or where checkpoints are
)
STUDENT = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}


class Recorder(dict):
    """A dict that notes every key it is asked for, whether it has it or not."""

    asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> KeysView[str]:
        return KeysView(self)


@pytest.fixture(scope="module")
def keys_read_by_deepspeed() -> Iterator[set[str]]:
    DeepSpeedConfig(Recorder(train_batch_size=1))
    yield Recorder.asked


def refused(check: Any, *args: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check("x.json", *args)
    return caught.value.problems


def test_every_top_level_key_that_deepspeed_reads_is_known(keys_read_by_deepspeed: set[str]) -> None:
    assert sorted(keys_read_by_deepspeed - section_types()[""].keys() - NOT_OFFERED) == []


def test_no_top_level_key_is_known_that_deepspeed_ignores(keys_read_by_deepspeed: set[str]) -> None:
    assert sorted(section_types()[""].keys() - keys_read_by_deepspeed) == []


def test_the_keys_of_activation_checkpointing_are_deepspeed_s_constants() -> None:
    assert (
        set(activation_checkpointing.ACT_CHKPT_DEFAULT) == section_types()["activation_checkpointing"].keys()
    )


BATCH = dict(zip(ds_schema.BATCH_KEYS, (24, 3, 4), strict=True))  # with two ranks: 3 x 4 x 2 = 24


@pytest.mark.parametrize(
    ("keys", "solved"),
    [
        ((0, 1, 2), (3, 4, 24)),
        ((0, 1), (3, 4, 24)),
        ((0, 2), (3, 4, 24)),
        ((1, 2), (3, 4, 24)),
        ((0,), (12, 1, 24)),
        ((1,), (3, 1, 6)),
    ],
)
def test_what_the_batch_numbers_leave_out_is_solved(
    keys: tuple[int, ...], solved: tuple[int, int, int]
) -> None:
    given = {ds_schema.BATCH_KEYS[k]: BATCH[ds_schema.BATCH_KEYS[k]] for k in keys}
    assert ds_config.batch_size("x.json", given, 2) == ds_config.BatchSize(*solved)


@pytest.mark.parametrize(
    "given",
    [c for n in (1, 2, 3) for c in combinations(ds_schema.BATCH_KEYS, n) if c != ds_schema.BATCH_KEYS[2:]],
)
def test_the_batch_numbers_are_solved_as_deepspeed_solves_them(given: tuple[str, ...]) -> None:
    values = dict(zip(ds_schema.BATCH_KEYS, (12, 3, 4), strict=True))  # one rank
    ds = {k: values[k] for k in given}
    own = DeepSpeedConfig(dict(ds))
    expected = (own.train_micro_batch_size_per_gpu, own.gradient_accumulation_steps, own.train_batch_size)
    assert ds_config.batch_size("x.json", ds, 1) == ds_config.BatchSize(*expected)


@pytest.mark.parametrize("ds", [{}, {"gradient_accumulation_steps": 4}])
def test_no_batch_size_is_refused(ds: dict[str, int]) -> None:
    assert "no batch size" in refused(ds_config.batch_size, ds, 2)[0]


@pytest.mark.parametrize(
    "numbers", [(24, 3, 5), (25, 3, 4), (25, 3, None), (24, 5, None), (25, None, 4), (7, None, None)]
)
def test_batch_numbers_that_do_not_multiply_up_are_refused(numbers: tuple[int | None, ...]) -> None:
    ds = {k: v for k, v in zip(ds_schema.BATCH_KEYS, numbers, strict=True) if v is not None}
    (problem,) = refused(ds_config.batch_size, ds, 2)
    assert problem.startswith(f"x.json: train_batch_size {numbers[0]} is not ") and "x 2 ranks" in problem


@pytest.mark.parametrize(("numbers", "least"), [((2, 3, None), 6), ((1, None, None), 2), ((3, None, 2), 4)])
def test_a_batch_smaller_than_one_sample_a_rank_is_refused(
    numbers: tuple[int | None, ...], least: int
) -> None:
    ds = {k: v for k, v in zip(ds_schema.BATCH_KEYS, numbers, strict=True) if v is not None}
    (problem,) = refused(ds_config.batch_size, ds, 2)
    assert problem == f"x.json: `train_batch_size` is {numbers[0]}. On 2 rank(s) it must be at least {least}."


@pytest.mark.parametrize("section", section_types())
def test_a_misspelled_key_of_every_section_names_the_right_one(section: str) -> None:
    key = min(section_types()[section])
    ds: dict[str, Any] = {f"{key}_": 1}
    for name in reversed(section.split(".") if section else []):
        ds = {name: ds}
    found = [p for p in refused(ds_config.student_engine, STUDENT | ds, 1) if "Unknown key" in p]
    path = ".".join(filter(None, (section, f"{key}_")))
    assert found == [f"x.json: `{path}` is 1. Unknown key. Did you mean `{key}`?"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"gradient_clipping": "auto"}, "gradient_clipping"),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}},
            "zero_optimization.reduce_bucket_size",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr"),
    ],
)
def test_auto_is_refused_wherever_it_stands(change: dict, key: str) -> None:
    assert refused(ds_config.student_engine, STUDENT | change, 1) == [
        f'x.json: `{key}` is "auto". Write the value itself.'
    ]


@pytest.mark.parametrize(
    "section",
    [
        {
            "zero_optimization": {
                "stage": 3,
                "memory_efficient_linear": False,
                "zero_quantized_weights": False,
                "stage3_module_granularity_threshold": 0,
            }
        },
        {
            "gradient_predivide_factor": 1.0,
            "eigenvalue": {"enabled": False},
            "compile": {"deepcompile": False},
        },
    ],
    ids=str,
)
def test_the_same_keys_switched_off_are_taken(section: dict[str, Any]) -> None:
    ds, _ = ds_config.student_engine("x.json", STUDENT | section, 1)
    assert all(
        ds["zero_optimization"].items() >= section[key].items()
        if key == "zero_optimization"
        else ds[key] == section[key]
        for key in section
    )


def test_what_deepspeed_would_choose_in_silence_is_written_out() -> None:
    ds, _ = ds_config.student_engine("x.json", STUDENT | {"zero_optimization": {"stage": 3}}, 1)
    assert ds["gradient_clipping"] == 1.0 and ds[
        "zero_optimization"
    ] == ds_config.BUCKETS | ds_config.LEAN_STAGE_3 | {"stage": 3, "memory_efficient_linear": False}


def test_all_problems_of_a_student_json_are_reported_at_once() -> None:
    ds = {"train_batch_size": 7, "bf17": {}, "zero_optimization": {"stage": 4, "stag": 1}}
    assert len(refused(ds_config.student_engine, ds, 2)) == 5


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_teacher_may_be_replicated_or_sharded(stage: int) -> None:
    assert (
        ds_config.stage(placement.teacher_engine("x.json", {"zero_optimization": {"stage": stage}})) == stage
    )


def test_a_teacher_s_batch_numbers_mean_nothing_and_are_replaced() -> None:
    ds = placement.teacher_engine("x.json", dict.fromkeys(ds_schema.BATCH_KEYS, 7))
    assert {k: ds[k] for k in ds_schema.BATCH_KEYS if k in ds} == {"train_micro_batch_size_per_gpu": 1}


def test_the_completed_student_json_says_all_that_deepspeed_would_choose_in_silence() -> None:
    ds, batch = ds_config.student_engine("x.json", STUDENT, 2)
    assert (batch.micro, batch.accumulation, batch.total) == (4, 1, 8)
    assert {k: ds[k] for k in ds_schema.BATCH_KEYS} == dict(zip(ds_schema.BATCH_KEYS, (8, 4, 1), strict=True))
    assert ds["gradient_clipping"] == DeepSpeedConfig(dict(train_batch_size=1)).gradient_clipping == 1.0
    assert ds["zero_optimization"]["memory_efficient_linear"] is False


def test_checking_changes_nothing_in_what_was_given() -> None:
    given = json.loads(json.dumps(STUDENT))
    ds_config.student_engine("x.json", given, 1)
    assert given == STUDENT


def test_a_completed_json_can_be_passed_back_in() -> None:
    ds, _ = ds_config.student_engine("x.json", STUDENT, 2)
    assert ds_config.student_engine("x.json", ds, 2)[0] == ds
    teacher = placement.teacher_engine("x.json", {"bf16": {"enabled": True}})
    assert placement.teacher_engine("x.json", teacher) == teacher


@pytest.mark.parametrize(
    ("ds", "name"),
    [
        ({}, "float32"),
        ({"bf16": {"enabled": True}}, "bfloat16"),
        ({"fp16": {"enabled": True}}, "float16"),
        ({"bf16": {}}, "float32"),
        ({"bf16": {"enabled": False}}, "float32"),
    ],
)
def test_the_precision_is_read_off_the_sections(ds: dict, name: str) -> None:
    assert ds_config.dtype_name(ds) == name


@pytest.mark.parametrize("file", sorted((SHIPPED / "student").glob("*.json")), ids=lambda f: f.name)
@pytest.mark.parametrize("world", [1, 2])
def test_a_shipped_student_json_passes(file: Path, world: int) -> None:
    where, ds = ds_config.load(str(file))
    ds, batch = ds_config.student_engine(where, fill_steps(ds, 700), world)
    assert batch.micro * batch.accumulation * world == batch.total == ds["train_batch_size"]


@pytest.mark.parametrize("file", sorted((SHIPPED / "teacher").glob("*.json")), ids=lambda f: f.name)
def test_a_shipped_teacher_json_passes(file: Path) -> None:
    ds = placement.teacher_engine(*ds_config.load(str(file)))
    assert DeepSpeedConfig(ds).zero_config.stage == ds_config.stage(ds)


def test_a_section_given_in_the_recipe_is_a_copy() -> None:
    where, ds = ds_config.load(STUDENT)
    assert where == "recipe" and ds == STUDENT and ds["optimizer"] is not STUDENT["optimizer"]
