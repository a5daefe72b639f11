"""Arithmetic and transfers of a step of published Wans, against sums done by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import EIGHT_80, ON_CPU, ONE_24, RATES, TWO_NODES
from planned import published_job as job

from wandistiller.config.job import Job
from wandistiller.planner.machine import Machine
from wandistiller.planner.step_time import ADAM_BYTES, StageTime, StepTime
from wandistiller.planner.student_network import other_network
from wandistiller.utils.files import read_json
from wandistiller.wan.flops import forward_flops
from wandistiller.wan.transformer import numels


def test_one_gpu_streams_the_whole_teacher_each_call(published: Path) -> None:
    run = job(published, ONE_24)
    call, whole = StepTime(run, ONE_24, RATES).all()[0], 2 * sum(numels(run.folder.config).values())
    assert call.times == 8 and sum(m.nbytes for m in call.moves) == whole
    assert call.moving(RATES) == pytest.approx(8 * whole / 20e9)


@pytest.mark.parametrize(
    ("machine", "placement", "shares"),
    [
        (EIGHT_80, "zero_inference_cpu", {"pcie": 1 / 8, "link": 7 / 8}),
        (ON_CPU, "files", {"disk": 0.9838}),  # its blocks, once a node: the ranks are at the same one
        (TWO_NODES, "zero_inference_cpu_node", {"pcie": 1 / 8, "link": 7 / 8}),
        (TWO_NODES, "sharded", {"link": 15 / 16, "network": 15 / 16}),
        (TWO_NODES, "sharded_node", {"link": 7 / 8}),  # nothing to the other node
    ],
)
def test_the_teacher_s_weights_go_once_to_every_rank_that_shares_them(
    published: Path, machine: Machine, placement: str, shares: dict[str, float]
) -> None:
    run = job(published, machine, teacher_deepspeed_config=f"ds_configs/teacher/{placement}.json")
    moves = {m.way: m.nbytes for m in StepTime(run, machine, RATES).all()[0].moves}
    whole = 2 * sum(numels(run.folder.config).values())
    assert moves == {way: pytest.approx(whole * share, rel=1e-3) for way, share in shares.items()}


def sent_between_nodes(run: Job) -> int:
    """Bytes of a whole step between two nodes."""
    stages = StepTime(run, TWO_NODES, RATES).all()
    moves = [(s.times, m) for s in stages for m in (*s.moves, *s.waits_for)]
    return sum(times * m.nbytes for times, m in moves if m.way == "network")


AROUND = {
    "zero0": lambda micro_steps: 2,
    "zero1": lambda micro_steps: 3,
    "zero2": lambda micro_steps: 2 * micro_steps + 1,
    "zero3": lambda micro_steps: 3 * micro_steps,
}
"""Bytes around the ring in multiples of all weights: gradients twice but under stage 3, then weights."""


@pytest.mark.parametrize("engine", AROUND)
def test_gradients_and_weights_go_around_all_ranks_as_often_as_the_stage_needs(
    published: Path, engine: str
) -> None:
    jsons = {"deepspeed_config": f"ds_configs/student/{engine}.json", "teacher_device_strategy": "gpu"}
    run = job(published, TWO_NODES, **jsons)
    once = 2 * sum(numels(run.student_transformer).values()) * 15 // 16
    times = AROUND[engine](run.batch.accumulation)
    assert sent_between_nodes(run) == pytest.approx(times * once, rel=1e-6)


def test_with_second_parts_in_a_node_weights_go_between_nodes_once_a_step(published: Path) -> None:
    ds = read_json("ds_configs/student/zero3.json")
    ds["zero_optimization"]["zero_hpz_partition_size"] = 8
    run = job(published, TWO_NODES, deepspeed_config=ds, teacher_device_strategy="gpu")
    once = 2 * sum(numels(run.student_transformer).values()) * 15 // 16
    assert sent_between_nodes(run) == pytest.approx((run.batch.accumulation + 1) * once, rel=1e-6)


@pytest.mark.parametrize(("scale", "samples"), [(5.0, 2), (1.0, 1)])
def test_guidance_computes_two_samples_and_a_scale_of_1_one(
    published: Path, scale: float, samples: int
) -> None:
    run = job(published, ONE_24, guidance_scale=scale)
    one = forward_flops(run.folder.config, (16, 1, 60, 104)) / 1e12
    assert StepTime(run, ONE_24, RATES).all()[0].tflop == pytest.approx(samples * one)


def test_the_micro_batch_that_hides_the_streaming_computes_for_as_long(published: Path) -> None:
    costs = StepTime(job(published, ONE_24, guidance_scale=1.0), ONE_24, RATES)
    call, micro = costs.all()[0], costs.micro_batch_that_hides_streaming()
    assert (micro - 1) * call.computing() < call.moving(RATES) <= micro * call.computing()


def test_no_micro_batch_hides_the_streaming_of_a_teacher_that_does_not_stream(published: Path) -> None:
    """An owner's weights stay where they are, whatever goes to it and back."""
    run = job(published, EIGHT_80, teacher_deepspeed_config="ds_configs/teacher/owner.json")
    assert StepTime(run, EIGHT_80, RATES).micro_batch_that_hides_streaming() is None


def test_adapters_need_no_gradients_of_the_frozen_weights(published: Path) -> None:
    half = {"student_config": "ds_configs/students/half.json"}
    full, adapters = (
        StepTime(job(published, ONE_24, lora=lora, **half), ONE_24, RATES).all()[1].tflop
        for lora in (None, {"rank": 16})
    )
    # twice forward and once backward, not twice; but for the text
    assert adapters / full == pytest.approx(3 / 4, rel=0.05)


@pytest.mark.parametrize("media", [True, False])
def test_a_step_computes_for_the_mean_of_the_buckets_that_media_are_cut_to(
    published: Path, tmp_path: Path, *, media: bool
) -> None:
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("a red circle")
        (tmp_path / f"{i}.png").touch()
    data = {"data_path": str(tmp_path)} if media else {}
    sizes = [(480, 832), (240, 416)]
    run = job(published, ONE_24, guidance_scale=1.0, buckets=[list(s) for s in sizes], **data)
    each = [forward_flops(run.folder.config, run.folder.latent_shape(*s, 1)) / 1e12 for s in sizes]
    assert StepTime(run, ONE_24, RATES).all()[0].tflop == pytest.approx(sum(each) / 2 if media else each[0])


def test_adam_on_the_cpu_goes_as_fast_as_memory(published: Path) -> None:
    step = StepTime(job(published, ONE_24), ONE_24, RATES).all()[-1]
    elements = sum(numels(job(published, ONE_24).student_transformer).values())
    assert step.moving(RATES) == pytest.approx(ADAM_BYTES * elements / 100e9)


def test_a_head_start_takes_the_critic_s_passes_and_the_samples_for_them(published: Path) -> None:
    """A sample takes 1.5 calls of the student to a drawn one of four steps, and one more for x0."""
    dmd2, rates = (
        {"name": "dmd2", "steps": 4, "critic_updates": 2},
        replace(RATES, pcie=1e9, link=1e9, memory=1e9),
    )
    run, plain = (job(published, EIGHT_80, objective=dmd2 | {"critic_warmup": n}) for n in (7, 0))
    (critic,) = (work for work in StepTime(run, EIGHT_80, rates).all() if work.what == "the critic's passes")
    call = run.batch.micro * forward_flops(run.student_transformer, (16, 1, 60, 104)) / 1e12
    each = run.batch.accumulation * (critic.tflop - call / 2 + 2.5 * call)  # of a step's, half a call judges
    assert StepTime(run, EIGHT_80, rates).warm_up() == pytest.approx(7 * each / rates.tflops, rel=1e-3)
    assert StepTime(plain, EIGHT_80, rates).warm_up() == 0


def test_a_critic_of_adapters_from_the_teacher_is_as_large_as_from_the_student(published: Path) -> None:
    lora = {"lora": {"rank": 8}, "student_config": {}}
    runs = (
        job(published, ONE_24, **lora, objective={"name": "dmd2", "critic_start": start})
        for start in ("student", "teacher")
    )
    student, teacher = (other_network(run, run.objective.others["critic"]) for run in runs)
    assert student == teacher and all(".lora_" in name for name in teacher.trained)


def test_rollouts_are_every_step_of_the_path_of_each_sample_on_all_gpus(published: Path) -> None:
    more = {"rollouts_per_prompt": 3, "rollout_steps": 20, "guidance_scale": 5.0, "max_steps": 1000}
    run = job(published, EIGHT_80, **more)
    each = 2 * 20 * forward_flops(run.folder.config, (16, 1, 60, 104)) / 1e12
    seconds = len(run.items) * 3 * each / 8 / RATES.tflops
    assert StepTime(run, EIGHT_80, RATES).rollouts() == pytest.approx(seconds)


@pytest.mark.parametrize(("frames", "together"), [(1, 33), (81, 1)])
def test_weights_move_once_for_all_micro_steps_whose_hidden_states_take_a_gib(
    published: Path, frames: int, together: int
) -> None:
    ds = {
        "train_batch_size": 66,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    size = {"num_frames": frames, "prepare_batch": 1, "deepspeed_config": ds | {"bf16": {"enabled": True}}}
    found = []
    for name in ("streamed", "zero_inference_cpu"):
        run = job(published, ONE_24, teacher_deepspeed_config=f"ds_configs/teacher/{name}.json", **size)
        found.append(StepTime(run, ONE_24, RATES).all()[0])
    assert (found[0].times, found[1].times) == (66 // together, 66)
    assert found[0].computing() == pytest.approx(found[1].computing())
    assert found[0].moves[0].nbytes < found[1].moves[0].nbytes  # what is not in the blocks stays there


def passes(run: Job, machine: Machine) -> StageTime:
    return next(stage for stage in StepTime(run, machine, RATES).all() if "passes" in stage.what)


def with_zero(**settings: object) -> dict[str, object]:
    """The shipped ZeRO-2 with the optimizer in CPU memory, with other settings."""
    ds = read_json("ds_configs/student/zero2_offload.json")
    return ds | {"zero_optimization": ds["zero_optimization"] | settings}


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_sent_while_the_next_are_computed_only_with_overlap_comm(
    published: Path, *, overlap: bool
) -> None:
    ds = read_json("ds_configs/student/zero2.json")
    ds["zero_optimization"]["overlap_comm"] = overlap
    stage = passes(job(published, EIGHT_80, deepspeed_config=ds), EIGHT_80)
    assert [one.what for one in (stage.moves if overlap else stage.waits_for)] == [
        "gradients to the other ranks"
    ]
    assert not (stage.waits_for if overlap else stage.moves)
    waits = stage.seconds(RATES) - stage.computing()
    assert waits == pytest.approx(0 if overlap else stage.waiting(RATES)) and (overlap or waits > 0)


def test_gradients_to_cpu_memory_are_waited_for_whatever_overlap_comm_says(published: Path) -> None:
    run = job(published, EIGHT_80, deepspeed_config=with_zero(overlap_comm=True))
    stage = passes(run, EIGHT_80)
    assert len(stage.waits_for) == 2 and not stage.moves
    each = [one.nbytes / 1e9 / getattr(RATES, one.way) for one in stage.waits_for]
    assert stage.waiting(RATES) == pytest.approx(stage.times * sum(each))


@pytest.mark.parametrize(("micro_steps", "nbytes"), [(1, 4), (2, 10), (8, 34)])
def test_offloaded_gradients_go_there_and_back_for_each_micro_step_of_stage_2(
    published: Path, micro_steps: int, nbytes: int
) -> None:
    ds = with_zero() | {"gradient_accumulation_steps": micro_steps}
    run = job(published, ONE_24, deepspeed_config=ds)
    stage, numel = passes(run, ONE_24), sum(numels(run.student_transformer).values())
    moved = sum(one.nbytes for one in (*stage.moves, *stage.waits_for))
    assert stage.times * moved == pytest.approx(nbytes * numel, rel=1e-6)  # 4 k + 2, and 4 of one


@pytest.mark.parametrize(("objective", "sweeps"), [("velocity", 1), (["velocity", "feature"], 4)])
def test_the_teacher_s_sweep_hides_behind_adam_or_adam_behind_it(
    published: Path, objective: Any, sweeps: int
) -> None:
    """Of hidden states only those of the first of four sweeps are held meanwhile."""
    times, more = {}, {"objective": objective}
    for ahead in (True, False):
        ds = read_json("ds_configs/teacher/streamed.json")
        ds["wandistiller"] |= {"ahead": ahead, "sweep_micro_steps": 2}
        times[ahead] = StepTime(job(published, ONE_24, teacher_deepspeed_config=ds, **more), ONE_24, RATES)
    teacher, *_, adam = times[True].all()
    shorter = min(teacher.seconds(RATES) / sweeps, adam.moving(RATES))
    assert times[True].floor() == pytest.approx(times[False].floor() - shorter)
