"""Arithmetic and transfers of a step of published Wans, against sums done by hand."""

from pathlib import Path

import pytest
from planned import EIGHT_80, ONE_24, RATES, TWO_NODES
from planned import published_job as job

from wandistiller.config.job import Job
from wandistiller.planner.machine import Machine
from wandistiller.planner.step_time import ADAM_BYTES, StepTime
from wandistiller.utils.files import read_json
from wandistiller.wan.flops import forward_flops
from wandistiller.wan.transformer import numels


def test_one_gpu_streams_the_whole_teacher_each_call(published: Path) -> None:
    costs = StepTime(job(published, ONE_24), ONE_24, RATES)
    call = costs.all()[0]
    parameters = sum(numels(job(published, ONE_24).folder.config).values())
    assert call.times == 8 and sum(m.nbytes for m in call.moves) == 2 * parameters
    assert call.moving(RATES) == pytest.approx(8 * 2 * parameters / 20e9)


def test_eight_gpus_each_bring_an_eighth_and_send_it_to_the_others(published: Path) -> None:
    moves = {m.way: m.nbytes for m in StepTime(job(published, EIGHT_80), EIGHT_80, RATES).all()[0].moves}
    whole = 2 * sum(numels(job(published, EIGHT_80).folder.config).values())
    assert moves == {"pcie": whole // 8, "link": whole * 7 // 8}


def _moved(job: Job, machine: Machine) -> dict[str, int]:
    """Bytes of all transfers by way."""
    moves = [
        move for cost in StepTime(job, machine, RATES).all() for move in cost.moves for _ in range(cost.times)
    ]
    return {
        way: sum(move.nbytes for move in moves if move.way == way) for way in {move.way for move in moves}
    }


@pytest.mark.parametrize(("placement", "elsewhere"), [("sharded", 15), ("sharded_node", 0)])
def test_a_teacher_whose_shards_stay_in_a_node_sends_none_to_the_other(
    published: Path, placement: str, elsewhere: int
) -> None:
    asked = job(
        published,
        TWO_NODES,
        teacher_deepspeed_config=f"ds_configs/teacher/{placement}.json",
        objective="velocity",
    )
    moves = {m.way: m.nbytes for m in StepTime(asked, TWO_NODES, RATES).all()[0].moves}
    whole = 2 * sum(numels(asked.folder.config).values())
    assert moves == (
        {"link": whole * 15 // 16, "network": whole * 15 // 16} if elsewhere else {"link": whole * 7 // 8}
    )


AROUND = {
    "zero0": lambda micro_steps: 2,
    "zero1": lambda micro_steps: 3,
    "zero2": lambda micro_steps: 2 * micro_steps + 1,
    "zero3": lambda micro_steps: 3 * micro_steps,
}
"""Bytes around the ring in multiples of all weights: gradients twice but under stage 3, then weights."""


@pytest.mark.parametrize("engine", AROUND)
def test_gradients_and_weights_go_around_all_ranks_as_often_as_the_stage_asks(
    published: Path, engine: str
) -> None:
    asked = job(
        published,
        TWO_NODES,
        deepspeed_config=f"ds_configs/student/{engine}.json",
        teacher_device_strategy="gpu",
    )
    once = 2 * sum(numels(asked.student_transformer).values()) * 15 // 16
    assert _moved(asked, TWO_NODES)["network"] == pytest.approx(
        AROUND[engine](asked.batch.accumulation) * once, rel=1e-6
    )


def test_with_second_parts_in_a_node_weights_go_between_nodes_once_a_step(published: Path) -> None:
    ds = read_json("ds_configs/student/zero3.json")
    ds["zero_optimization"]["zero_hpz_partition_size"] = 8
    asked = job(published, TWO_NODES, deepspeed_config=ds, teacher_device_strategy="gpu")
    once = 2 * sum(numels(asked.student_transformer).values()) * 15 // 16
    assert _moved(asked, TWO_NODES)["network"] == pytest.approx(
        (asked.batch.accumulation + 1) * once, rel=1e-6
    )


def test_guidance_asks_for_two_samples_and_a_scale_of_1_for_one(published: Path) -> None:
    one = forward_flops(job(published, ONE_24).folder.config, (16, 1, 60, 104)) / 1e12
    both, text = (
        StepTime(job(published, ONE_24, guidance_scale=w), ONE_24, RATES).all()[0].tflop for w in (5.0, 1.0)
    )
    assert (both, text) == (pytest.approx(2 * one), pytest.approx(one))


def test_the_micro_batch_that_hides_the_streaming_computes_for_as_long(published: Path) -> None:
    costs = StepTime(job(published, ONE_24, guidance_scale=1.0), ONE_24, RATES)
    call, micro = costs.all()[0], costs.micro_batch_that_hides_streaming()
    assert (micro - 1) * call.computing() < call.moving(RATES) <= micro * call.computing()


def test_only_of_a_teacher_that_streams_a_micro_batch_is_told(published: Path) -> None:
    """An owner's weights stay where they are, whatever goes to it and back."""
    asked = job(published, EIGHT_80, teacher_deepspeed_config="ds_configs/teacher/owner.json")
    assert StepTime(asked, EIGHT_80, RATES).micro_batch_that_hides_streaming() is None


def test_adapters_need_no_gradients_of_the_frozen_weights(published: Path) -> None:
    full, adapters = (
        StepTime(job(published, ONE_24, lora=lora), ONE_24, RATES).all()[1].tflop
        for lora in (None, {"rank": 16})
    )
    assert adapters / full == pytest.approx(
        3 / 4, rel=0.05
    )  # twice forward and once backward, not twice; but for the text


@pytest.mark.parametrize("media", [True, False])
def test_a_step_computes_for_the_mean_of_the_buckets_that_media_are_cut_to(
    published: Path, tmp_path: Path, *, media: bool
) -> None:
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("a red circle")
        (tmp_path / f"{i}.png").touch()
    data = {"data_path": str(tmp_path)} if media else {}
    sizes = [(480, 832), (240, 416)]
    asked = job(published, ONE_24, guidance_scale=1.0, buckets=[list(s) for s in sizes], **data)
    each = [forward_flops(asked.folder.config, asked.folder.latent_shape(*s, 1)) / 1e12 for s in sizes]
    assert StepTime(asked, ONE_24, RATES).all()[0].tflop == pytest.approx(sum(each) / 2 if media else each[0])


def test_adam_on_the_cpu_goes_as_fast_as_memory(published: Path) -> None:
    step = StepTime(job(published, ONE_24), ONE_24, RATES).all()[-1]
    elements = sum(numels(job(published, ONE_24).student_transformer).values())
    assert step.moving(RATES) == pytest.approx(ADAM_BYTES * elements / 100e9)


def test_rollouts_are_every_step_of_the_path_of_each_sample_on_all_gpus(published: Path) -> None:
    asked = job(
        published, EIGHT_80, rollouts_per_prompt=3, rollout_steps=20, guidance_scale=5.0, max_steps=1000
    )
    each = 2 * 20 * forward_flops(asked.folder.config, (16, 1, 60, 104)) / 1e12
    assert StepTime(asked, EIGHT_80, RATES).rollouts() == pytest.approx(
        len(asked.items) * 3 * each / 8 / RATES.tflops
    )
