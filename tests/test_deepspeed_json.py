"""The keys and the batch arithmetic against DeepSpeed's own classes; what is refused, and in which words."""

import inspect
import json
from collections.abc import Iterator, KeysView
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime import precision_config
from deepspeed.runtime.activation_checkpointing import config as activation_checkpointing
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

from wandistiller import deepspeed_json as dsj
from wandistiller.config import SHIPPED
from wandistiller.problems import ConfigError
from wandistiller.student_json import fill_steps

CLASSES = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "fp16": precision_config.DeepSpeedFP16Config,
    "bf16": precision_config.DeepSpeedBF16Config,
}
# DeepSpeed 0.19.8 looks for these too; they are refused, since none fits a frozen teacher and a student without heads.
NOT_OFFERED = set(
    "amp bfloat16 quantize_training sparse_attention sparse_gradients vocabulary_size "  # removed, or old names
    "progressive_layer_drop curriculum_learning compression_training weight_quantization "  # change the network
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
    assert sorted(keys_read_by_deepspeed - dsj.TOP_KEYS - NOT_OFFERED) == []


def test_no_top_level_key_is_known_that_deepspeed_ignores(keys_read_by_deepspeed: set[str]) -> None:
    assert sorted(dsj.TOP_KEYS - keys_read_by_deepspeed) == []


@pytest.mark.parametrize("section", CLASSES)
def test_the_keys_of_a_section_are_those_of_deepspeed_s_class(section: str) -> None:
    assert {field.alias or name for name, field in CLASSES[section].model_fields.items()} == dsj.SECTION_KEYS[section]


def test_the_keys_of_activation_checkpointing_are_deepspeed_s_constants() -> None:
    assert set(activation_checkpointing.ACT_CHKPT_DEFAULT) == dsj.SECTION_KEYS["activation_checkpointing"]


def test_the_adam_settings_are_those_of_deepspeed_s_cpu_adam_and_its_switches() -> None:
    own = set(inspect.signature(DeepSpeedCPUAdam.__init__).parameters) - {"self", "model_params", "adamw_mode"}
    assert dsj.OPTIMIZER_KEYS == own | {"torch_adam", "adam_w_mode", "foreach"}


BATCH = dict(zip(dsj.BATCH_KEYS, (24, 3, 4), strict=True))  # with two ranks: 3 x 4 x 2 = 24


@pytest.mark.parametrize(
    ("keys", "solved"),
    [((0, 1, 2), (3, 4, 24)), ((0, 1), (3, 4, 24)), ((0, 2), (3, 4, 24)), ((1, 2), (3, 4, 24)),
     ((0,), (12, 1, 24)), ((1,), (3, 1, 6))],
)  # fmt: skip
def test_what_the_batch_numbers_leave_out_is_solved(keys: tuple[int, ...], solved: tuple[int, int, int]) -> None:
    given = {dsj.BATCH_KEYS[k]: BATCH[dsj.BATCH_KEYS[k]] for k in keys}
    assert dsj.batch_size("x.json", given, 2) == dsj.BatchSize(*solved)


@pytest.mark.parametrize(
    "given", [c for n in (1, 2, 3) for c in combinations(dsj.BATCH_KEYS, n) if c != dsj.BATCH_KEYS[2:]]
)
def test_the_batch_numbers_are_solved_as_deepspeed_solves_them(given: tuple[str, ...]) -> None:
    values = dict(zip(dsj.BATCH_KEYS, (12, 3, 4), strict=True))  # one rank
    ds = {k: values[k] for k in given}
    own = DeepSpeedConfig(dict(ds))
    expected = (own.train_micro_batch_size_per_gpu, own.gradient_accumulation_steps, own.train_batch_size)
    assert dsj.batch_size("x.json", ds, 1) == dsj.BatchSize(*expected)


@pytest.mark.parametrize("ds", [{}, {"gradient_accumulation_steps": 4}])
def test_no_batch_size_is_refused(ds: dict[str, int]) -> None:
    assert "no batch size" in refused(dsj.batch_size, ds, 2)[0]


@pytest.mark.parametrize(
    "numbers",
    [
        (24, 3, 5),
        (25, 3, 4),
        (25, 3, None),
        (24, 5, None),
        (25, None, 4),
        (7, None, None),
    ],
)
def test_batch_numbers_that_do_not_multiply_up_are_refused(numbers: tuple[int | None, ...]) -> None:
    ds = {k: v for k, v in zip(dsj.BATCH_KEYS, numbers, strict=True) if v is not None}
    (problem,) = refused(dsj.batch_size, ds, 2)
    assert problem.startswith(f"x.json: train_batch_size {numbers[0]} is not ") and "x 2 ranks" in problem


@pytest.mark.parametrize(("numbers", "least"), [((2, 3, None), 6), ((1, None, None), 2), ((3, None, 2), 4)])
def test_a_batch_smaller_than_one_sample_a_rank_is_refused(numbers: tuple[int | None, ...], least: int) -> None:
    ds = {k: v for k, v in zip(dsj.BATCH_KEYS, numbers, strict=True) if v is not None}
    (problem,) = refused(dsj.batch_size, ds, 2)
    assert problem == f"x.json: `train_batch_size` is {numbers[0]}. On 2 rank(s) it must be at least {least}."


@pytest.mark.parametrize("key", dsj.BATCH_KEYS)
@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True])
def test_a_batch_number_that_is_no_positive_integer_is_refused(key: str, value: Any) -> None:
    assert refused(dsj.batch_size, BATCH | {key: value}, 2) == [
        f"x.json: `{key}` is {json.dumps(value)}. Write a positive integer."
    ]


@pytest.mark.parametrize(
    ("change", "key", "nearest"),
    [({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "zero_optimization"),
     ({"gradient_accumulation_step": 2}, "gradient_accumulation_step", "gradient_accumulation_steps"),
     ({"train_micro_batch_size": 2}, "train_micro_batch_size", "train_micro_batch_size_per_gpu"),
     ({"zero_optimization": {"stag": 3}}, "zero_optimization.stag", "stage"),
     ({"zero_optimization": {"offload_param": {"devices": 1}}}, "zero_optimization.offload_param.devices", "device"),
     ({"zero_optimization": {"offload_optimizer": {"pinned_memory": 1}}},
      "zero_optimization.offload_optimizer.pinned_memory", "pin_memory"),
     ({"bf16": {"enable": True}}, "bf16.enable", "enabled"),
     ({"fp16": {"loss_scal": 0}}, "fp16.loss_scal", "loss_scale"),
     ({"activation_checkpointing": {"cpu_checkpoint": 1}},
      "activation_checkpointing.cpu_checkpoint", "cpu_checkpointing"),
     ({"optimizer": {"type": "AdamW", "param": {}}}, "optimizer.param", "params"),
     ({"optimizer": {"type": "AdamW", "params": {"weight_decai": 0}}}, "optimizer.params.weight_decai", "weight_decay"),
     ({"scheduler": {"typ": "WarmupLR"}}, "scheduler.typ", "type")],
)  # fmt: skip
def test_an_unknown_key_at_any_level_names_the_nearest_right_one(change: dict, key: str, nearest: str) -> None:
    (problem,) = refused(dsj.student_engine, STUDENT | change, 1)
    assert problem.startswith(f"x.json: `{key}` is ") and problem.endswith(f"Did you mean `{nearest}`?")


@pytest.mark.parametrize(
    ("change", "key"),
    [({"gradient_clipping": "auto"}, "gradient_clipping"),
     ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}, "zero_optimization.reduce_bucket_size"),
     ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr")],
)  # fmt: skip
def test_auto_is_refused_wherever_it_stands(change: dict, key: str) -> None:
    assert refused(dsj.student_engine, STUDENT | change, 1) == [f'x.json: `{key}` is "auto". Write the value itself.']


@pytest.mark.parametrize(
    "section", ["zero_optimization", "bf16", "fp16", "activation_checkpointing", "optimizer", "scheduler"]
)
@pytest.mark.parametrize("value", [3, True, "AdamW", []])
def test_a_section_that_is_no_object_is_refused(section: str, value: Any) -> None:
    assert any(f"`{section}`" in p and "{...}" in p for p in refused(dsj.student_engine, STUDENT | {section: value}, 1))


@pytest.mark.parametrize("value", [[1e-4], "lr", None])
def test_optimizer_params_that_are_no_object_are_refused(value: Any) -> None:
    change = {"optimizer": {"type": "AdamW", "params": value}}
    assert any("optimizer.params" in p and "{...}" in p for p in refused(dsj.student_engine, STUDENT | change, 1))


@pytest.mark.parametrize("optimizer", [{}, {"params": {"lr": 1e-4}}])
def test_an_optimizer_without_a_type_is_refused(optimizer: dict) -> None:
    assert "type" in refused(dsj.student_engine, STUDENT | {"optimizer": optimizer}, 1)[0]


def test_a_student_without_an_optimizer_is_refused() -> None:
    assert "no `optimizer` section" in refused(dsj.student_engine, {"train_batch_size": 8}, 1)[0]


@pytest.mark.parametrize("stage", [4, -1, "3", None])
def test_a_stage_that_does_not_exist_is_refused(stage: Any) -> None:
    assert (
        "`zero_optimization.stage`"
        in refused(dsj.student_engine, STUDENT | {"zero_optimization": {"stage": stage}}, 1)[0]
    )


@pytest.mark.parametrize("section", [
    {"zero_optimization": {"stage": 3, key: value}} for key, value in (
        ("memory_efficient_linear", True), ("zero_quantized_weights", True), ("zero_quantized_gradients", True),
        ("stage3_module_granularity_threshold", 1000), ("zenflow", {"topk_ratio": 0.1}),
        ("offload_optimizer", {"device": "cpu", "super_offload": True}))
] + [{"gradient_predivide_factor": 2.0}, {"eigenvalue": {"enabled": True}}, {"data_efficiency": {"enabled": True}},
     {"compile": {"deepcompile": True}},
     {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}], ids=str)  # fmt: skip
def test_what_does_not_work_on_wan_is_refused_with_the_reason(section: dict[str, Any]) -> None:
    (problem,) = refused(dsj.student_engine, STUDENT | section, 1)
    assert problem.endswith(("Remove it.", "remove it.", "Write false."))


@pytest.mark.parametrize("section", [
    {"zero_optimization": {"stage": 3, "memory_efficient_linear": False, "zero_quantized_weights": False,
                           "stage3_module_granularity_threshold": 0}},
    {"gradient_predivide_factor": 1.0, "eigenvalue": {"enabled": False}, "compile": {"deepcompile": False}},
], ids=str)  # fmt: skip
def test_the_same_keys_switched_off_are_taken(section: dict[str, Any]) -> None:
    ds, _ = dsj.student_engine("x.json", STUDENT | section, 1)
    assert all(ds["zero_optimization"].items() >= section[key].items() if key == "zero_optimization" else ds[key] == section[key]
               for key in section)  # fmt: skip


@pytest.mark.parametrize(("section", "key"), [
    ({"wandistiller": {"checkpoint": "blocks"}}, "activation_checkpointing"),
    ({"wandistiller": {"checkpoint": "block"}, "activation_checkpointing": {}}, "wandistiller.checkpoint"),
    ({"wandistiller": {"checkpoint_every": 0}, "activation_checkpointing": {}}, "wandistiller.checkpoint_every"),
    ({"wandistiller": {"checkpoints": 2}, "activation_checkpointing": {}}, "wandistiller.checkpoints"),
    ({"wandistiller": 3, "activation_checkpointing": {}}, "wandistiller"),
    ({"activation_checkpointing": {"contiguous_memory_optimization": True}}, "partition_activations"),
])  # fmt: skip
def test_activation_checkpointing_that_cannot_work_is_refused(section: dict[str, Any], key: str) -> None:
    (problem,) = refused(dsj.student_engine, STUDENT | section, 1)
    assert f"`{key}`" in problem


def test_what_deepspeed_would_choose_in_silence_is_written_out() -> None:
    ds, _ = dsj.student_engine("x.json", STUDENT | {"zero_optimization": {"stage": 3}}, 1)
    assert ds["gradient_clipping"] == 1.0 and ds["zero_optimization"] == dsj.BUCKETS | dsj.LEAN_STAGE_3 | {
        "stage": 3, "memory_efficient_linear": False}  # fmt: skip


def test_all_problems_of_a_student_json_are_reported_at_once() -> None:
    ds = {"train_batch_size": 7, "bf17": {}, "zero_optimization": {"stage": 4, "stag": 1}}
    assert len(refused(dsj.student_engine, ds, 2)) == 5


@pytest.mark.parametrize("stage", [1, 2])
def test_a_frozen_teacher_with_optimizer_stages_is_refused(stage: int) -> None:
    (problem,) = refused(dsj.teacher_engine, {"zero_optimization": {"stage": stage}})
    assert problem == (
        f"x.json: `zero_optimization.stage` is {stage}. "
        "A frozen teacher has no optimizer; use 0 (replicated) or 3 (sharded)."
    )


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_frozen_teacher_takes_no_optimizer_and_no_scheduler(section: str) -> None:
    assert "remove this section" in refused(dsj.teacher_engine, {section: {"type": "AdamW"}})[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_teacher_may_be_replicated_or_sharded(stage: int) -> None:
    assert dsj.stage(dsj.teacher_engine("x.json", {"zero_optimization": {"stage": stage}})) == stage


def test_a_teacher_s_batch_numbers_mean_nothing_and_are_replaced() -> None:
    ds = dsj.teacher_engine("x.json", dict.fromkeys(dsj.BATCH_KEYS, 7))
    assert {k: ds[k] for k in dsj.BATCH_KEYS if k in ds} == {"train_micro_batch_size_per_gpu": 1}


def test_the_completed_student_json_says_all_that_deepspeed_would_choose_in_silence() -> None:
    ds, batch = dsj.student_engine("x.json", STUDENT, 2)
    assert (batch.micro, batch.accumulation, batch.total) == (4, 1, 8)
    assert {k: ds[k] for k in dsj.BATCH_KEYS} == dict(zip(dsj.BATCH_KEYS, (8, 4, 1), strict=True))
    assert ds["gradient_clipping"] == DeepSpeedConfig(dict(train_batch_size=1)).gradient_clipping == 1.0
    assert ds["zero_optimization"]["memory_efficient_linear"] is False


def test_checking_changes_nothing_in_what_was_given() -> None:
    given = json.loads(json.dumps(STUDENT))
    dsj.student_engine("x.json", given, 1)
    assert given == STUDENT


def test_a_completed_json_can_be_passed_back_in() -> None:
    ds, _ = dsj.student_engine("x.json", STUDENT, 2)
    assert dsj.student_engine("x.json", ds, 2)[0] == ds
    teacher = dsj.teacher_engine("x.json", {"bf16": {"enabled": True}})
    assert dsj.teacher_engine("x.json", teacher) == teacher


@pytest.mark.parametrize(
    ("ds", "name"),
    [({}, "float32"), ({"bf16": {"enabled": True}}, "bfloat16"), ({"fp16": {"enabled": True}}, "float16"),
     ({"bf16": {}}, "float32"), ({"bf16": {"enabled": False}}, "float32")],
)  # fmt: skip
def test_the_precision_is_read_off_the_sections(ds: dict, name: str) -> None:
    assert dsj.dtype_name(ds) == name


@pytest.mark.parametrize("file", sorted((SHIPPED / "student").glob("*.json")), ids=lambda f: f.name)
@pytest.mark.parametrize("world", [1, 2])
def test_a_shipped_student_json_passes(file: Path, world: int) -> None:
    where, ds = dsj.load(str(file))
    ds, batch = dsj.student_engine(where, fill_steps(ds, 700), world)
    assert batch.micro * batch.accumulation * world == batch.total == ds["train_batch_size"]


@pytest.mark.parametrize("file", sorted((SHIPPED / "teacher").glob("*.json")), ids=lambda f: f.name)
def test_a_shipped_teacher_json_passes(file: Path) -> None:
    ds = dsj.teacher_engine(*dsj.load(str(file)))
    assert DeepSpeedConfig(ds).zero_config.stage == dsj.stage(ds)


def test_a_section_given_in_the_recipe_is_a_copy() -> None:
    where, ds = dsj.load(STUDENT)
    assert where == "recipe" and ds == STUDENT and ds["optimizer"] is not STUDENT["optimizer"]
