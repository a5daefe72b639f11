"""Memory, streamed bytes and choices for teachers in 8 and 4 bits."""

from pathlib import Path
from typing import Any

import pytest
from planned import ONE_24, gpus
from planned import published_job as job
from shipped import placement
from slow_cases import slow_but
from test_teacher_memory import LARGE, WIDTH

from wandistiller.config.job import Job
from wandistiller.engine.zero_memory import Bytes, Topology
from wandistiller.planner.peak_memory import plan
from wandistiller.planner.resolve_auto import choices, chosen, formats, pairs
from wandistiller.planner.teacher_memory import teacher_bytes, teacher_parts
from wandistiller.utils.files import read_json
from wandistiller.wan.folder import WanFolder


def whole(folder: WanFolder, name: str, weights: str | None) -> Bytes:
    return teacher_bytes(folder, placement(name, "bfloat16", weights=weights), 1)


def test_half_or_a_quarter_of_the_bytes_are_streamed(wans: dict[str, WanFolder]) -> None:
    config, moved = wans[LARGE].config, {}
    for weights in (None, "int8", "float8", "nf4"):
        placed = placement("streamed", "bfloat16", weights=weights)
        moved[weights] = placed.fetched(config, Topology(1, 1, True))
        assert whole(wans[LARGE], "streamed", weights).node == moved[weights]
    assert moved["float8"] < moved["int8"] < 0.502 * moved[None]
    assert moved["nf4"] < 0.261 * moved[None]


@pytest.mark.parametrize(("weights", "each"), [("int8", 2), ("float8", 10), ("nf4", 14)])
def test_a_call_has_room_for_the_largest_layer_that_is_unpacked(
    published: Path, weights: str, each: int
) -> None:
    block = {"placement": "streamed"}
    plain, small = (
        teacher_parts(
            job(published, ONE_24, teacher_deepspeed_config={"bf16": {"enabled": True}, "wandistiller": b}),
            ONE_24,
            (16, 1, 60, 104),
            1,
        )[1]["a call of the teacher"].transient
        for b in (block, block | {"weights": weights})
    )
    assert small - plain == each * WIDTH * 13824


@pytest.mark.parametrize(
    ("weights", "kept", "coming", "given", "blocks"),
    slow_but(
        [("int8", 2, 0, {"checkpoint_but_last": 9}, 9)],
        [
            ("int8", 2, 0, {}, 1),
            ("int8", 2, 0, {"checkpoint_but_last": 9}, 9),
            ("float8", 2, 8, {"checkpoint_every": 2}, 20),
            ("nf4", 0, 14, {"checkpoint": "feed_forward"}, None),
        ],
    ),
)
def test_a_block_s_layers_stay_unpacked_until_backward_where_adapters_learn_on_them(
    published: Path, weights: str, kept: int, coming: int, given: dict[str, Any], blocks: int | None
) -> None:
    """8 maps of 5120 x 5120 and two of the feed-forward, of one block of 40 if all are recomputed."""
    recipe = read_json("ds_configs/machines/1x16_wan2.1_14b_lora.json")
    teacher = {"bf16": {"enabled": True}, "wandistiller": {"weights": weights}}
    engine = read_json("ds_configs/student/lora_wan.json") | {"wandistiller": given}
    paths = ("teacher_path", "data_path", "output_dir")
    more = {key: value for key, value in recipe.items() if key not in paths}
    run = job(published, ONE_24, **more | {"deepspeed_config": engine, "teacher_deepspeed_config": teacher})
    feed_forward, maps = 2 * WIDTH * 13824, 8 * WIDTH * WIDTH
    layers = 40 * maps + feed_forward if blocks is None else blocks * (maps + feed_forward)
    for role in ("student", "critic"):
        parts = plan(run, ONE_24, coding=False)["train"].alternatives[role]
        needs = kept * layers + coming * feed_forward // 2
        assert parts["the base's weights, unpacked"].transient == needs


AUTO = {"bf16": {"enabled": True}, "wandistiller": {"placement": "auto"}}


@pytest.mark.slow
def test_auto_tries_all_placements_that_hold_the_weights_and_no_other_weights(published: Path) -> None:
    block = AUTO["wandistiller"] | {"weights": "nf4"}
    given = {"teacher_deepspeed_config": AUTO | {"wandistiller": block}}
    machine = gpus(4, 24, 256)
    run = job(published, machine, "Wan2.2-T2V-A14B", **given)
    every = pairs(run, machine, (False, True), weights="nf4")
    assert {pair.teacher for pair in every} == {"replicated", "streamed", "host_cpu"}
    assert {pair.sizes[0].teacher.weights for pair in every} == {"nf4"}
    assert all(" in nf4, " in str(pair.choice(pair.sizes[0], machine)) for pair in every)


def test_in_8_bits_auto_leaves_a_teacher_on_a_gpu_that_is_too_small_for_it_in_16(published: Path) -> None:
    machine, found = gpus(1, 40, 256), []
    for weights in ({}, {"weights": "int8"}):
        given = AUTO | {"wandistiller": AUTO["wandistiller"] | weights}
        found.append(chosen(job(published, machine, teacher_deepspeed_config=given), machine).teacher)
    assert found == ["streamed", "replicated"]


def of_adapters(published: Path, **teacher: Any) -> Job:
    """A run of adapters of A14B's low-noise expert, which needs both experts, on one GPU."""
    recipe = read_json("ds_configs/machines/1x16_wan2.2_a14b_lora.json")
    keys = ("lora", "deepspeed_config", "teacher_deepspeed_config", "lr", "shift")
    return job(
        published,
        ONE_24,
        "Wan2.2-T2V-A14B",
        **{key: recipe[key] for key in keys} | teacher,
        objective=recipe["stages"][1]["objective"],
    )


def test_where_a_recipe_s_8_bits_do_not_fit_whole_weights_that_do_are_recommended(published: Path) -> None:
    run, machine = of_adapters(published), gpus(1, 16, 32)  # 26.2 GiB beside 11
    best = next(choices(run, machine))
    assert (run.teacher.weights, best.job.teacher.weights, best.teacher) == ("int8", None, "files")
    assert best.settings["teacher_deepspeed_config"] == "ds_configs/teacher/files.json"


def test_where_a_recipe_s_8_bits_fit_they_stay(published: Path) -> None:
    best = next(choices(of_adapters(published), gpus(1, 16, 64)))
    assert (best.job.teacher.weights, best.teacher) == ("int8", "streamed")


def test_of_a_teacher_without_weights_in_fewer_bits_8_come_after_16_and_4_after_8(published: Path) -> None:
    run, machine = of_adapters(published, teacher_deepspeed_config="stream"), gpus(1, 16, 128)
    assert formats(run) == [None, "int8", "nf4"] and formats(run, (True, False)) == [None]
    fits = [(c.job.teacher.weights, c.teacher) for c in choices(run, machine, by_teacher=True)]
    assert fits[0][0] is None and fits[-2:] == [("int8", "streamed_int8"), ("nf4", "streamed_nf4")]


def test_auto_takes_no_fewer_bits_than_the_json_says(published: Path) -> None:
    assert formats(of_adapters(published), exact=True) == ["int8", None]
