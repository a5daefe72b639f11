"""Plans of ranks that compute each sample together: memory, arithmetic, exchanges, and recommendations."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import EIGHT_80, ON_CPU, RATES, TWO_NODES, gpus
from planned import published_job as job
from recipes import ADAM
from slow_cases import slow_but

from wandistiller.cli.plan import _keeps_sharing
from wandistiller.config.job import Job
from wandistiller.engine.transfers import Topology, Transfer, exchange_transfers
from wandistiller.planner.machine import Machine, demands
from wandistiller.planner.peak_memory import NCCL, plan
from wandistiller.planner.phase_peak import moments
from wandistiller.planner.resolve_auto import choices, chosen, sharings
from wandistiller.planner.step_time import StageTime, StepTime

SMALL, LARGE, FIVE, TWO = "Wan2.1-T2V-1.3B", "Wan2.1-T2V-14B", "Wan2.2-TI2V-5B", "Wan2.2-T2V-A14B"
VIDEO = {"num_frames": 81, "deepspeed_config": "ds_configs/student/zero2.json"}
TOKENS, WIDTH, LAYERS = 32_760, 5120, 40  # of 81 frames of 480x832; of the 14B


def video(folder: Path, sharers: int, machine: Machine = EIGHT_80, wan: str = LARGE, **more: Any) -> Job:
    return job(folder, machine, wan, context_parallel=sharers, **VIDEO | more)


# Memory


@pytest.mark.parametrize(
    ("wan", "sharers", "teacher", "size"),
    slow_but(
        [(SMALL, 4, "replicated", {})],
        [
            (SMALL, 4, "replicated", {}),
            (LARGE, 8, "replicated", {}),
            (TWO, 8, "sharded", {}),
            (FIVE, 8, "replicated", {"height": 704, "width": 1280}),
            (FIVE, 2, "replicated", {}),  # 8,190 patches
        ],
    ),
)
def test_81_frames_of_every_published_wan_fit_eight_gpus_of_80_gb(
    published: Path, wan: str, sharers: int, teacher: str, size: dict[str, int]
) -> None:
    placed = {"teacher_deepspeed_config": f"ds_configs/teacher/{teacher}.json"}
    run = video(published, sharers, wan=wan, **placed, **size)
    assert all(demand.is_met for demand in demands(moments(plan(run, EIGHT_80)), EIGHT_80))


def test_a_14b_and_its_half_beside_it_need_several_ranks_a_clip(published: Path) -> None:
    taken = []
    for sharers in (1, 8):
        run = video(published, sharers, teacher_device_strategy="gpu")
        taken.append([d.is_met for d in demands(moments(plan(run, EIGHT_80)), EIGHT_80)])
    assert taken == [[False, True, True], [True, True, True]]


def parts(run: Job, phase: str, turn: str) -> dict[str, int]:
    return {use: b.transient for use, b in plan(run, EIGHT_80)[phase].alternatives[turn].items()}


@pytest.mark.parametrize(
    ("phase", "turn", "use"),
    [
        ("train", "student", "student's activations"),
        ("train", "teacher", "a call of the teacher"),
        ("draw", "student", "student's activations"),
    ],
)
def test_activations_of_two_ranks_are_half_but_for_the_ends(
    published: Path, phase: str, turn: str, use: str
) -> None:
    one, two = (parts(video(published, n), phase, turn)[use] for n in (1, 2))
    assert 0.5 < two / one < 0.75


def test_an_owner_s_rank_computes_whole_samples(published: Path) -> None:
    owner = {"teacher_deepspeed_config": "ds_configs/teacher/owner.json"}
    one, eight = (
        parts(video(published, n, **owner), "train", "teacher")["a call of the teacher"] for n in (1, 8)
    )
    assert one == eight


def test_hidden_states_to_compare_are_those_of_own_tokens(published: Path) -> None:
    use = "hidden states to compare"
    one, eight = (parts(video(published, n, objective="feature"), "train", "student")[use] for n in (1, 8))
    assert one == 8 * eight


@pytest.mark.slow
def test_a_teacher_that_is_measured_computes_whole_samples(published: Path) -> None:
    narrow = {"student_config": {"num_attention_heads": 0.4}}
    one, eight = (parts(video(published, n, **narrow), "load", "calibration") for n in (1, 8))
    whole = parts(video(published, 8, **narrow), "load", "measuring")
    assert whole["a call of the teacher"] == one["a call of the teacher"] > eight["a call of the teacher"]


def test_the_ranks_of_a_sample_have_channels_of_their_own(published: Path) -> None:
    libraries = [plan(video(published, n), EIGHT_80)["train"].kept["libraries"].device for n in (1, 2)]
    assert libraries[1] - libraries[0] == NCCL


# Time


def stage(run: Job, name: str, machine: Machine = EIGHT_80) -> StageTime:
    return next(one for one in StepTime(run, machine, RATES).all() if name in one.what)


@pytest.mark.parametrize("name", ["the teacher's", "the student's passes"])
def test_each_rank_of_a_sample_computes_its_share(published: Path, name: str) -> None:
    one, eight = (stage(video(published, n), name).tflop for n in (1, 8))
    assert one == pytest.approx(8 * eight)


def exchanged(work: StageTime) -> list[int]:
    return [one.nbytes for one in work.waits_for if one.what.startswith("attention")]


@pytest.mark.parametrize("sharers", [2, 8])
def test_the_teacher_waits_for_four_tensors_of_each_block(published: Path, sharers: int) -> None:
    """Both branches of guidance; in bf16; a rank keeps its own part."""
    sent = 4 * 2 * TOKENS // sharers * WIDTH * 2 * LAYERS * (sharers - 1) // sharers
    assert exchanged(stage(video(published, sharers), "the teacher's call")) == [sent]


@pytest.mark.parametrize(
    ("checkpointed", "passes"),
    [({"activation_checkpointing": {}}, 3), ({"wandistiller": {"checkpoint": "feed_forward"}}, 2), ({}, 2)],
)
def test_attention_is_exchanged_again_in_backward_and_where_it_is_computed_anew(
    published: Path, checkpointed: dict[str, Any], passes: int
) -> None:
    ds = {"train_batch_size": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    ds |= {"optimizer": ADAM} | checkpointed
    ds |= {"activation_checkpointing": {}} if checkpointed else {}
    work = stage(video(published, 2, deepspeed_config=ds), "the student's passes")
    half_the_layers = LAYERS // 2
    assert exchanged(work) == [passes * 4 * TOKENS // 2 * WIDTH * 2 * half_the_layers // 2]


@pytest.mark.parametrize(
    ("sharers", "topology", "sent"),
    [
        (1, Topology(8, 8, True), {}),
        (4, Topology(8, 8, True), {"link": 75}),
        (
            16,
            Topology(16, 8, True),
            {"link": 43, "network": 400},
        ),  # 7 and 8 of 16 parts, the latter of 8 ranks
        (2, Topology(2, 1, True), {"network": 50}),
    ],
)
def test_an_exchange_goes_over_links_within_a_node_and_the_network_between_nodes(
    sharers: int, topology: Topology, sent: dict[str, int]
) -> None:
    moved: list[Transfer] = [*exchange_transfers("x", 100, sharers, topology)]
    assert {one.way: one.nbytes for one in moved} == sent


def test_an_owner_computes_once_for_the_ranks_of_a_sample(published: Path) -> None:
    owner = {"teacher_deepspeed_config": "ds_configs/teacher/owner.json"}
    one, four = (stage(video(published, n, **owner), "the teacher's call") for n in (1, 4))
    assert one.tflop == pytest.approx(4 * four.tflop) and exchanged(four) == []


def test_rollouts_take_as_long_however_many_ranks_share_them(published: Path) -> None:
    one, eight = (StepTime(video(published, n), EIGHT_80, RATES).rollouts() for n in (1, 8))
    assert one == pytest.approx(eight)


def test_a_teacher_that_shares_samples_does_not_work_ahead(published: Path) -> None:
    streamed = {"teacher_deepspeed_config": "ds_configs/teacher/streamed.json"}
    offload = {"deepspeed_config": "ds_configs/student/zero2_offload.json"}
    times = [StepTime(video(published, n, **streamed, **offload), EIGHT_80, RATES) for n in (1, 2)]
    assert times[0].ahead() > 0 == times[1].ahead()


# Recommendations


@pytest.mark.parametrize(
    ("wan", "machine", "size", "numbers"),
    [
        (LARGE, EIGHT_80, {"num_frames": 81}, [1, 2, 4, 8]),
        (LARGE, gpus(4, 24, 256), {"num_frames": 81}, [1, 2, 4]),
        (SMALL, EIGHT_80, {"num_frames": 81}, [1, 2, 4]),  # twelve heads
        (FIVE, EIGHT_80, {"num_frames": 81}, [1, 2]),  # 8,190 patches
        (LARGE, EIGHT_80, {"num_frames": 1}, [1]),
        (LARGE, EIGHT_80, {"num_frames": 81, "context_parallel": 4}, [4]),
        (LARGE, TWO_NODES, {"num_frames": 81}, [1, 2, 4, 8]),
    ],
)
def test_a_video_s_samples_may_be_shared_by_what_divides_a_node_s_ranks_heads_and_patches(
    published: Path, wan: str, machine: Machine, size: dict[str, int], numbers: list[int]
) -> None:
    run = job(published, machine, wan, **size)
    shared = [*sharings(run, machine)]
    assert [one.run.context_parallel for one in shared] == numbers
    assert {one.batch.total for one in shared} == {run.batch.total}


@pytest.mark.slow
def test_where_no_clip_fits_a_gpu_several_ranks_are_recommended(published: Path) -> None:
    machine = gpus(4, 24, 512)
    run = job(published, machine, LARGE, num_frames=81, height=720, width=1280)
    best = next(choices(run, machine, keeps_sharing=False))
    number = best.settings["context_parallel"]
    assert number > 1 and f", {number} ranks a sample" in str(best)
    assert best.job.batch.ranks * number == machine.ranks and best.job.batch.total == run.batch.total


def test_auto_keeps_the_recipe_s_number_of_ranks_a_sample(published: Path) -> None:
    teacher = "ds_configs/teacher/auto.json"
    run = video(published, 4, wan=SMALL, deepspeed_config="auto", teacher_deepspeed_config=teacher)
    best = chosen(run, EIGHT_80)
    assert best.job.run.context_parallel == best.settings["context_parallel"] == 4


@pytest.mark.parametrize(
    ("given", "keeps"),
    [
        ({}, False),
        ({"context_parallel": 1}, True),
        ({"stages": [{"name": "a"}, {"name": "b", "context_parallel": 2}]}, True),
    ],
)
def test_a_number_that_the_recipe_gives_is_not_searched(given: dict[str, Any], keeps: bool) -> None:
    assert _keeps_sharing(given) is keeps


def test_on_cpus_a_plan_has_no_accelerator_s_memory_however_samples_are_shared(published: Path) -> None:
    run = replace(job(published, ON_CPU, SMALL, num_frames=5, context_parallel=2))
    assert all(phase.peak().device == 0 for phase in plan(run, ON_CPU).values())
