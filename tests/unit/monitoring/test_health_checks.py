"""A student of few steps that goes wrong raises alarms in words, with what to do."""

import math
import random
from pathlib import Path
from statistics import mean

import pytest
import torch

from wandistiller.monitoring.health_checks import (
    WARMED_UP,
    WINDOW,
    HealthChecks,
    SampleStats,
    colour_stats,
    picture_stats,
    sample_stats,
    write_stats,
)
from wandistiller.monitoring.metrics import read_lines
from wandistiller.objectives.dmd2 import Dmd2
from wandistiller.tiny import shapes

WELL = {"critic_lag": 0.2, "gradient": 0.8, "deviation": 1.0, "exit": 1.0, "cosine": 0.9, "gap": 0.3}
LONG = WARMED_UP + 2 * WINDOW


def raised(steps: list[dict[str, float]], norms: list[float] | None = None) -> set[str]:
    """Return the kinds of alarms in a run that watches these numbers."""
    checks, norms = HealthChecks(Dmd2.limits), norms or [1.0] * len(steps)
    given = enumerate(zip(steps, norms, strict=True), 1)
    return {kind for step, (watched, norm) in given for kind, _ in checks.step(step, watched, norm)}


def test_a_run_that_goes_well_has_none() -> None:
    assert raised([WELL] * LONG) == set()
    assert raised([{}] * LONG, [1.0] * (LONG - 1) + [100.0]) == set()  # no critic: nothing to check


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"critic_lag": 0.8}, "critic lags"),
        ({"critic_lag": -0.8}, "critic lags"),
        ({"gradient": 1.0}, "critic diverges"),
        ({"deviation": 1.2}, "saturation"),
        ({"gap": 0.5}, "velocities part"),
    ],
)
def test_a_number_that_leaves_its_range_for_long_is_a_sign(changed: dict[str, float], kind: str) -> None:
    assert raised([WELL] * LONG + [WELL | changed] * WINDOW) == {kind}
    assert raised([WELL] * LONG + [WELL | changed] * 3) == set()


def test_a_large_gap_from_the_start_on_and_one_that_grows_but_stays_small_are_no_sign() -> None:
    """As of a teacher with strong guidance, and of one without, from whose weights the critic starts."""
    assert raised([WELL | {"gap": 0.7}] * LONG) == set()
    assert raised([WELL | {"gap": 0.05}] * WINDOW + [WELL | {"gap": 0.35}] * LONG) == set()


def test_samples_of_earlier_exits_which_are_blurred_do_not_hide_saturation() -> None:
    blurred = {"exit": 0.0, "deviation": 0.5}
    start = [WELL | blurred, WELL] * LONG
    assert raised(start + [WELL | blurred, WELL | {"deviation": 1.2}] * WINDOW) == {"saturation"}


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_saturation_shows_in_steps_whose_parts_have_exits_of_their_own(parts: int) -> None:
    draw = random.Random(0)

    def step(spread: float) -> dict[str, float]:
        exits = [draw.randrange(4) for _ in range(parts)]
        return WELL | {"exit": mean(exits), "deviation": spread * mean(0.5 + exit_ / 6 for exit_ in exits)}

    start = [step(1.0) for _ in range(1000)]
    assert raised(start) == set()
    assert raised(start + [step(1.3) for _ in range(500)]) == {"saturation"}


def test_a_step_whose_numbers_are_not_finite_is_left_out() -> None:
    assert raised([WELL | {"gradient": None, "deviation": None}] * 2 + [WELL] * LONG) == set()


def test_a_critic_may_lag_at_the_start() -> None:
    assert raised([WELL | {"critic_lag": 1.0}] * WARMED_UP + [WELL] * WINDOW) == set()


def test_noise_about_a_small_lag_is_no_sign_and_about_a_large_one_does_not_hide_it() -> None:
    for lag, kinds in ((0.4, set()), (0.9, {"critic lags"})):
        steps = [WELL | {"critic_lag": lag + noise} for noise in (-0.5, 0.5)]
        assert raised(steps * LONG) == kinds
    assert raised([WELL | {"critic_lag": lag} for lag in (-2.0, 4.0)] * LONG) == set()  # 1 by chance


def test_a_gradient_norm_of_five_times_the_usual_is_a_sign() -> None:
    assert raised([WELL] * LONG, [1.0] * (LONG - 1) + [5.5]) == {"student jumps"}


def test_a_resumed_run_is_compared_with_its_own_start() -> None:
    checks = HealthChecks(Dmd2.limits)
    checks.go_on_from([{"watched": WELL}] * LONG)
    grown = WELL | {"gradient": 1.0}
    kinds = {kind for step in range(LONG, LONG + WINDOW) for kind, _ in checks.step(step, grown, 1.0)}
    assert kinds == {"critic diverges"}


TEACHER = SampleStats(1.0, 0.1, 0.5, 0.8)


@pytest.mark.parametrize(
    ("student", "kinds"),
    [
        (SampleStats(1.1, 0.09, 0.4, 0.88), []),
        (SampleStats(1.2, 0.1, 0.5, 0.96), ["saturation"]),
        (SampleStats(1.0, 0.1, 0.2, 0.8), ["collapse"]),
        (SampleStats(1.0, 0.05, 0.5, 0.8), ["slow motion"]),
    ],
)
def test_samples_are_compared_with_the_teacher_s(student: SampleStats, kinds: list[str]) -> None:
    assert [kind for kind, _ in HealthChecks().samples(TEACHER, student)] == kinds


@pytest.mark.parametrize(
    ("spreads", "sizes", "kinds"),
    [
        ([1.0, 1.08], [1.0, 1.07], [[], ["saturation"]]),
        ([0.99, 0.92], [1.0, 0.93], [[], ["faded"]]),
        ([1.0, 1.08], [1.0, 1.05], [[], []]),  # one of both is not beyond
        ([1.13, 1.08, 1.08], [1.13, 1.08, 1.08], [[], [], ["saturation"]]),  # first on its way to the teacher
        ([0.8, 0.9], [0.8, 0.9], [[], []]),
    ],
)
def test_few_step_samples_whose_colours_leave_the_teacher_s_are_a_sign(
    spreads: list[float], sizes: list[float], kinds: list[list[str]]
) -> None:
    checks, of_many_steps = HealthChecks(), HealthChecks()
    for spread, size, expected in zip(spreads, sizes, kinds, strict=True):
        student = TEACHER._replace(deviation=spread, size=0.8 * size)
        assert [kind for kind, _ in checks.samples(TEACHER, student)] == expected
        assert not list(of_many_steps.samples(TEACHER, student._replace(distance=math.nan)))


@pytest.mark.parametrize(
    ("contrasts", "kinds"),
    [
        ([0.1, 0.1], ["contrast"]),
        ([0.05, 0.1], []),
        ([0.4, 0.5], ["contrast"]),
        ([0.2, 0.25], []),
        ([0.1], []),
    ],
)
def test_pictures_whose_contrast_leaves_the_teacher_s_and_does_not_come_back_are_a_sign(
    contrasts: list[float], kinds: list[str]
) -> None:
    checks, teacher = HealthChecks(), TEACHER._replace(contrast=0.25)
    drawn = [checks.samples(teacher, teacher._replace(contrast=contrast)) for contrast in contrasts]
    assert [kind for alarms in drawn for kind, _ in alarms] == kinds


def test_images_without_a_second_seed_have_no_motion_and_no_distance_to_compare() -> None:
    none = SampleStats(*sample_stats(torch.randn(2, 4, 1, 8, 8)).mean(0).tolist())
    assert list(HealthChecks().samples(none, none)) == []


def test_statistics_of_known_samples() -> None:
    x0_BCFHW = torch.zeros(1, 1, 2, 1, 2)
    x0_BCFHW[0, 0, 1] = 2.0
    deviation, motion, distance, size = sample_stats(x0_BCFHW, x0_BCFHW - 3)[0].tolist()
    assert size == 1.0
    assert deviation == pytest.approx((4 / 3) ** 0.5) and motion == 2.0 and distance == pytest.approx(3.0)


def test_the_way_from_a_given_first_frame_to_a_still_clip_is_no_motion() -> None:
    x0_BCFHW = torch.zeros(1, 1, 3, 1, 2)
    x0_BCFHW[:, :, 0] = 5.0
    _, with_it, *_ = sample_stats(x0_BCFHW)[0].tolist()
    _, after_it, *_ = sample_stats(x0_BCFHW, given_frames=1)[0].tolist()
    assert with_it == 2.5 and after_it == 0.0


def test_statistics_of_a_step_drawn_again_take_the_place_of_the_earlier_ones(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    for step, motion in ((1, 0.0), (2, 0.1), (2, 0.2)):
        write_stats(file, step, {"teacher": TEACHER, "student": SampleStats(1.0, motion, 0.0)})
    assert [line["motion"]["student"] for line in read_lines(file)] == [0.0, 0.2]


def test_numbers_that_there_are_none_of_are_not_written_and_those_of_one_side_alone_are_null_on_the_other(
    tmp_path: Path,
) -> None:
    write_stats(file := tmp_path / "samples.jsonl", 1, {"teacher": SampleStats(1.0), "student": TEACHER})
    assert read_lines(file) == [
        {
            "step": 1,
            "deviation": {"teacher": 1.0, "student": 1.0},
            "motion": {"teacher": None, "student": 0.1},
            "distance": {"teacher": None, "student": 0.5},
            "size": {"teacher": None, "student": 0.8},
        }
    ]


def test_pictures_of_a_world_have_numbers_of_their_colours_and_others_of_their_contrast_alone() -> None:
    name = "a white circle on a black background, left"
    pixels_BCFHW = shapes.render(name)[None, :, None].repeat(2, 1, 1, 1, 1)
    pixels_BCFHW[1, :, 0, 40:43, 50:53] = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)
    of_world, others = picture_stats(pixels_BCFHW, [name] * 2), picture_stats(pixels_BCFHW, None)
    assert of_world[:, 4].tolist() == [0, 1] and of_world[0, 3] < 1e-6 < of_world[1, 3]
    assert torch.equal(of_world[:, :3], others[:, :3]) and others[:, 3:].isnan().all()


def test_the_spread_of_local_contrast_is_that_of_windows_in_which_pixels_alternate_and_flat_ones() -> None:
    pixels_BCFHW = torch.zeros(1, 3, 2, 16, 16)
    pixels_BCFHW[..., :8, ::2] = 0.8  # a deviation of 0.4 in half of the windows
    assert colour_stats(pixels_BCFHW)[0, 0].item() == pytest.approx(0.2)
    assert colour_stats(pixels_BCFHW[..., :8, :])[0, 0].item() == pytest.approx(0.0, abs=1e-6)


def test_saturation_is_the_range_of_channels_and_contrast_the_deviation_of_all_pixels() -> None:
    pixels_BCFHW = (
        torch.tensor([[0.9, 0.5, 0.1], [0.4, 0.4, 0.4]]).view(2, 3, 1, 1, 1).repeat(1, 1, 2, 16, 16)
    )
    pixels_BCFHW[1, :, 1, :, 8:] = 0.8  # of the second frame alone
    _, contrast_B, saturation_B = colour_stats(pixels_BCFHW).T
    assert saturation_B.tolist() == pytest.approx([0.8, 0])
    assert contrast_B.tolist() == pytest.approx(
        [(0.32 / 3) ** 0.5, 0.1]
    )  # of three values; of one frame in two
