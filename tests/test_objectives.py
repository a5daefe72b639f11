"""Losses against sums done by hand and closed forms."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from wandistiller import wan
from wandistiller.batch import Answer, Batch, Expert, join, split
from wandistiller.blocks import add_projections
from wandistiller.deepspeed_json import student_engine
from wandistiller.noise import FlowSchedule, keyed_normal, path
from wandistiller.objectives import (
    NOISED,
    OBJECTIVES,
    PATH,
    SIGMA_WEIGHTS,
    FeatureMatching,
    Objective,
    Teacher,
    TrajectoryRegression,
    VelocityMatching,
    mean_square,
    objective_keys,
    read_objective,
)
from wandistiller.problems import ConfigError
from wandistiller.student import Student
from wandistiller.student_config import lineage, read_student_config
from wandistiller.teacher import Guidance, GuidedTeacher, LocalTeacher

X0, NOISE = torch.zeros(2, 1, 1, 2, 2), torch.full((2, 1, 1, 2, 2), 2.0)
BATCH = Batch(X0, NOISE, X0, torch.tensor([0.5, 0.5]), torch.zeros(2, 1, 1), Expert.HIGH_NOISE)


class Constant(Teacher):
    """A teacher whose velocity is one number everywhere, and whose hidden states are the blocks' numbers."""

    def __init__(self, value: float):
        self.value = value

    def answer(self, batch: Batch, blocks: tuple[int, ...]) -> Answer:
        features = {k: torch.full((len(batch.sigma_B), 3, 2), float(k)) for k in blocks}
        return Answer(torch.full_like(batch.x_t_BCFHW, self.value), features)


def constant(*values: float) -> Tensor:
    return torch.stack([torch.full((1, 1, 2, 2), v) for v in values])


def velocity_loss(v: Tensor, v_teacher: Tensor, batch: Batch = BATCH, **settings: Any) -> Tensor:
    return VelocityMatching(**settings).loss(Answer(v), Answer(v_teacher), batch)


def problems(given: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_objective(given)
    return caught.value.problems


# velocity


def test_the_target_is_the_teacher_s_velocity() -> None:
    target = read_objective("velocity").target(Constant(3.0), {NOISED: BATCH})
    assert torch.equal(target.v_BCFHW, constant(3.0, 3.0))


def test_equal_velocities_have_no_loss() -> None:
    assert velocity_loss(constant(3.0, 1.0), constant(3.0, 1.0)).tolist() == [0.0, 0.0]


def test_the_loss_is_the_mean_square_of_each_sample() -> None:
    assert velocity_loss(constant(3.0, 1.0), constant(1.0, 2.0)).tolist() == [4.0, 1.0]


@pytest.mark.parametrize(("weight", "loss"), [(0.0, 4.0), (0.25, 3.25), (1.0, 1.0)])
def test_data_weight_blends_in_the_distance_to_noise_minus_x0(weight: float, loss: float) -> None:
    # v = 3, teacher 1: square 4; noise - x0 = 2: square 1
    assert velocity_loss(constant(3.0, 3.0), constant(1.0, 1.0), data_weight=weight).tolist() == [loss] * 2


def test_the_loss_is_float32_and_does_not_lose_small_terms_of_bf16_input() -> None:
    difference = torch.ones(1, 1, 1, 100, 100, dtype=torch.bfloat16)
    difference[..., 0, 0] = 101.0  # 10 200 / 10 000; a bf16 sum of ones stops at 256
    loss_B = mean_square(difference)
    assert loss_B.dtype is torch.float32 and loss_B.item() == pytest.approx(2.02)


def test_gradient_reaches_the_student_only() -> None:
    v = constant(3.0, 1.0).requires_grad_()
    velocity_loss(v, constant(1.0, 1.0)).sum().backward()
    assert torch.equal(v.grad, constant(1.0, 0.0))  # 2 (v - v*) / 4 elements


@pytest.mark.parametrize("name", ["uniform", "logit_normal", "cosmap"])
def test_a_sigma_weight_that_is_a_density_has_the_mean_1(name: str) -> None:
    sigma = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    assert SIGMA_WEIGHTS[name](sigma).mean().item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", SIGMA_WEIGHTS)
def test_a_sigma_weight_is_finite_and_not_negative_at_both_ends(name: str) -> None:
    weight = SIGMA_WEIGHTS[name](torch.tensor([0.0, 1e-8, 0.5, 1 - 1e-7, 1.0]))
    assert torch.isfinite(weight).all() and (weight >= 0).all() and weight[2] > 0


@pytest.mark.parametrize(
    ("name", "sigma", "weight"),
    [("logit_normal", 0.5, 4 / math.sqrt(2 * math.pi)), ("cosmap", 0.5, 4 / math.pi), ("cosmap", 1.0, 2 / math.pi),
     ("min_snr", 0.5, 0.25), ("min_snr", 0.1, 0.05), ("min_snr", 1.0, 0.0)],
)  # fmt: skip
def test_sigma_weights_are_their_closed_forms(name: str, sigma: float, weight: float) -> None:
    assert SIGMA_WEIGHTS[name](torch.tensor([sigma])).item() == pytest.approx(weight, rel=1e-5, abs=1e-7)


def test_min_snr_weighs_the_error_of_x0_by_the_signal_to_noise_ratio() -> None:
    sigma, error = torch.tensor([0.4, 0.7, 0.95]), 3.0  # SNR 2.25 and less, so the limit of 5 is not reached
    snr = ((1 - sigma) / sigma).square()
    torch.testing.assert_close(SIGMA_WEIGHTS["min_snr"](sigma) * error**2, snr * (sigma * error) ** 2)


def test_the_sigma_weight_multiplies_each_sample_s_loss() -> None:
    batch = BATCH.at(sigma_B=torch.tensor([0.5, 1.0]))
    found = velocity_loss(constant(3.0, 3.0), constant(1.0, 1.0), batch, sigma_weight="cosmap")
    torch.testing.assert_close(found, torch.tensor([16 / math.pi, 8 / math.pi]))


MEAN, DEVIATION, SAMPLES = 0.7, 0.5, 400_000


def gaussian_data(sigma: float) -> Batch:
    """x0 ~ N(MEAN, DEVIATION^2), each sample a number of its own."""
    x0, noise = MEAN + DEVIATION * keyed_normal((SAMPLES, 1, 1, 1, 1), "x0"), keyed_normal((SAMPLES, 1, 1, 1, 1), "noise")
    sigma_B = torch.full((SAMPLES,), sigma)
    return Batch(x0, noise, path(x0, noise, sigma_B), sigma_B, torch.zeros(SAMPLES, 1, 1), Expert.HIGH_NOISE)


def closed_form(sigma: float) -> tuple[float, float, float]:
    """E[noise - x0 | x_t] = slope x_t + offset, and the variance about it.

    x_t is normal with mean (1 - sigma) MEAN and variance V = (1 - sigma)^2 DEVIATION^2 + sigma^2; noise - x0 has the
    covariance sigma - (1 - sigma) DEVIATION^2 with it and the variance 1 + DEVIATION^2.
    """
    variance = ((1 - sigma) * DEVIATION) ** 2 + sigma**2
    covariance = sigma - (1 - sigma) * DEVIATION**2
    slope = covariance / variance
    return slope, -MEAN - slope * (1 - sigma) * MEAN, 1 + DEVIATION**2 - covariance**2 / variance


@pytest.mark.parametrize("sigma", [0.1, 0.5, 0.9])
def test_the_data_term_is_least_at_a_gaussian_data_set_s_closed_form_velocity(sigma: float) -> None:
    batch, (slope, offset, floor) = gaussian_data(sigma), closed_form(sigma)
    coefficients = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def loss(c: Tensor) -> Tensor:
        v = (c[0] * batch.x_t_BCFHW.double() + c[1]).float()
        return VelocityMatching(data_weight=1).loss(Answer(v), None, batch).double().mean()

    gradient = torch.autograd.functional.jacobian(loss, coefficients)
    curvature = torch.autograd.functional.hessian(loss, coefficients)
    least = -torch.linalg.solve(curvature, gradient)  # the loss is a parabola, so one Newton step is its minimum
    assert least.tolist() == pytest.approx([slope, offset], abs=6 / math.sqrt(SAMPLES) / sigma)
    assert loss(least).item() == pytest.approx(floor, rel=0.01)


def test_a_teacher_with_the_closed_form_velocity_leaves_the_data_term_its_floor_and_the_other_none() -> None:
    batch, (slope, offset, floor) = gaussian_data(0.5), closed_form(0.5)
    v = slope * batch.x_t_BCFHW + offset
    blended = VelocityMatching(data_weight=0.1).loss(Answer(v), Answer(v), batch)
    assert blended.mean().item() == pytest.approx(0.1 * floor, rel=0.01)


# trajectory

STEPS_DOWN = torch.tensor([1.0, 0.9, 0.6, 0.2, 0.0])
SCHEDULE = FlowSchedule(shift=5.0, boundary=0.875, seed=7, global_batch=4)


def states(v: Tensor, x0: Tensor) -> Tensor:
    """x_BSCFHW of the straight line with velocity v that ends at x0."""
    return torch.stack([x0 + sigma * v for sigma in STEPS_DOWN], dim=1)


def on_path(x_BSCFHW: Tensor, step: int = 0, schedule: FlowSchedule = SCHEDULE) -> Batch:
    indices = [4 * step + i for i in range(4)]
    return schedule.on_path(STEPS_DOWN, x_BSCFHW, torch.zeros(4, 1, 1), indices, step)


@pytest.fixture(scope="module")
def line() -> tuple[Tensor, Tensor]:
    return keyed_normal((4, 2, 1, 4, 4), "v"), keyed_normal((4, 2, 1, 4, 4), "end")


@pytest.mark.parametrize("step", range(4))
def test_the_target_on_a_straight_path_is_its_velocity(line: tuple[Tensor, Tensor], step: int) -> None:
    batch = on_path(states(*line), step)
    torch.testing.assert_close(batch.v_BCFHW, line[0], rtol=0, atol=5e-6)
    torch.testing.assert_close(batch.x0_BCFHW, line[1], rtol=0, atol=5e-6)


def test_the_true_velocity_of_a_straight_path_has_no_trajectory_loss(line: tuple[Tensor, Tensor]) -> None:
    batch = on_path(states(*line))
    assert TrajectoryRegression().loss(Answer(line[0]), None, batch).max() < 1e-11


def test_the_target_on_a_bent_path_is_the_segment_s_own_slope() -> None:
    x_BSCFHW = STEPS_DOWN.square().view(1, -1, 1, 1, 1, 1).expand(4, -1, 1, 1, 2, 2)
    for step in range(10):
        batch = on_path(x_BSCFHW, step)
        below = {s: e for s, e in zip(STEPS_DOWN.tolist(), STEPS_DOWN[1:].tolist(), strict=False)}
        for sigma, v in zip(batch.sigma_B.tolist(), batch.v_BCFHW, strict=True):
            torch.testing.assert_close(v, torch.full_like(v, sigma + below[sigma]))  # (s^2 - e^2) / (s - e)


def test_a_sample_on_a_path_stands_at_the_start_of_its_segment(line: tuple[Tensor, Tensor]) -> None:
    x_BSCFHW = states(*line)
    batch = on_path(x_BSCFHW)
    for i, sigma in enumerate(batch.sigma_B):
        assert torch.equal(batch.x_t_BCFHW[i], x_BSCFHW[i, STEPS_DOWN.tolist().index(sigma.item())])


def test_a_path_s_segments_are_split_at_the_boundary() -> None:
    assert SCHEDULE.segments(Expert.HIGH_NOISE, STEPS_DOWN.tolist()) == [0, 1]
    assert SCHEDULE.segments(Expert.LOW_NOISE, STEPS_DOWN.tolist()) == [2, 3]
    assert replace(SCHEDULE, boundary=None).segments(Expert.HIGH_NOISE, STEPS_DOWN.tolist()) == [0, 1, 2, 3]


def test_noised_and_path_states_of_a_step_are_of_the_same_expert(line: tuple[Tensor, Tensor]) -> None:
    for step in range(50):
        noised = SCHEDULE.noised(line[1], torch.zeros(4, 1, 1), [4 * step + i for i in range(4)], step)
        batch = on_path(states(*line), step)
        assert batch.expert is noised.expert
        assert ((batch.sigma_B >= 0.875) == (batch.expert is Expert.HIGH_NOISE)).all()


def test_every_segment_is_drawn_as_often_as_its_expert_s_others(line: tuple[Tensor, Tensor]) -> None:
    one = replace(SCHEDULE, boundary=None)
    drawn = torch.cat([on_path(states(*line), step, one).sigma_B for step in range(400)])
    counts = [(drawn == sigma).sum().item() for sigma in STEPS_DOWN[:-1]]
    assert sum(counts) == 1600 and all(abs(c - 400) < 4 * math.sqrt(1600 * 0.25 * 0.75) for c in counts)


def test_a_segment_depends_on_seed_step_and_sample_index_alone(line: tuple[Tensor, Tensor]) -> None:
    whole, x_BSCFHW = on_path(states(*line), 3), states(*line)
    torch.manual_seed(5)
    for i in (3, 1, 0, 2):
        alone = SCHEDULE.on_path(STEPS_DOWN, x_BSCFHW[i : i + 1], torch.zeros(1, 1, 1), [12 + i], 3)
        assert alone.sigma_B[0] == whole.sigma_B[i] and torch.equal(alone.x_t_BCFHW[0], whole.x_t_BCFHW[i])


# feature


def test_the_feature_loss_is_the_share_of_the_teacher_s_square_mean_over_blocks() -> None:
    term = FeatureMatching(blocks=[0, 1]).for_student([2, 4])
    target = Constant(0.0).answer(BATCH, (2, 4))  # states of 2 and of 4
    student = Answer(X0, {0: torch.full((2, 3, 2), 3.0), 1: torch.zeros(2, 3, 2)})
    assert term.loss(student, target, BATCH).tolist() == pytest.approx([(1 / 4 + 16 / 16) / 2] * 2)


def test_every_block_is_matched_with_the_one_it_stands_for_by_default() -> None:
    term = FeatureMatching().for_student([1, 3, 5])
    assert (term.blocks, term.teacher_blocks) == ([0, 1, 2], [1, 3, 5])


def test_chosen_blocks_are_matched_with_those_they_stand_for_or_with_those_given() -> None:
    assert FeatureMatching(blocks=[0, 2]).for_student([1, 3, 5]).teacher_blocks == [1, 5]
    assert FeatureMatching(blocks=[0, 2], teacher_blocks=[0, 4]).for_student([1, 3, 5]).teacher_blocks == [0, 4]


def test_the_teacher_is_asked_for_the_blocks_that_are_stood_for() -> None:
    objective = read_objective(["velocity", {"name": "feature", "blocks": [0, 2]}]).for_student([1, 3, 5])
    assert sorted(objective.target(Constant(1.0), {NOISED: BATCH}).features) == [1, 5]


@pytest.mark.parametrize("layers", [1, 2, 4, 9, 40])
def test_the_blocks_of_a_random_student_stand_for_rising_ones_up_to_the_last(wan2: Path, layers: int) -> None:
    folder = wan.open_wan(str(wan2))
    student, config = read_student_config("s.json", {"init": "random", "num_layers": layers}, folder)
    blocks = lineage(student, config, folder)[Expert.HIGH_NOISE]
    assert len(blocks) == layers and blocks == sorted(blocks) and blocks[0] >= 0 and blocks[-1] == 3


def loaded(folder: Path) -> WanTransformer3DModel:
    model = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.float32)
    for p in model.parameters():
        p.data = p.data.clone()  # not the file itself, which the session's other tests read
    return model.requires_grad_(True)


def batch_for(model: WanTransformer3DModel) -> Batch:
    x_t = keyed_normal((2, model.config.in_channels, 1, 4, 4), "x")
    text = keyed_normal((2, 512, model.config.text_dim), "text")
    return Batch(x_t, x_t, x_t, torch.tensor([0.95, 0.2]), text, Expert.HIGH_NOISE)


def engine(**more: Any) -> dict[str, Any]:
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    return student_engine("x.json", {"train_batch_size": 2, "optimizer": adam, "gradient_clipping": 0.0, **more}, 1)[0]


@pytest.mark.usefixtures("one_rank")
def test_an_unpruned_copy_of_the_teacher_has_no_feature_and_no_velocity_loss(wan1: Path) -> None:
    teacher, model = LocalTeacher(dict.fromkeys(Expert, loaded(wan1 / "transformer").eval())), loaded(wan1 / "transformer")
    objective, batches = read_objective(["velocity", "feature"]).for_student([0, 1, 2, 3]), {NOISED: batch_for(model)}
    add_projections(model, range(4), wan.width(model.config))
    student = Student({Expert.HIGH_NOISE: model}, engine())
    answers = split(student.answer(join(batches)), batches)
    assert objective.losses(answers, objective.target(teacher, batches), batches).count_nonzero() == 0


def gradients(model: WanTransformer3DModel, objective: Objective, teacher: Teacher) -> dict[str, Tensor]:
    """Of the feature loss by plain autograd."""
    seen: dict[int, Tensor] = {}
    for k in objective.feature_term.blocks:
        project = model.feature_projections[str(k)]
        model.blocks[k].register_forward_hook(lambda *a, k=k, p=project: seen.update({k: p(a[-1])}))
    batches = {NOISED: batch_for(model)}
    batch = batches[NOISED]
    answer = Answer(wan.velocity(model, batch.x_t_BCFHW, batch.sigma_B, batch.text_BLD), seen)
    objective.total(objective.losses({NOISED: answer}, objective.target(teacher, batches), batches)).mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def narrow() -> WanTransformer3DModel:
    """A student half as wide as the small teacher."""
    from small_wan import transformer

    model = transformer(5, 2, num_attention_heads=1)
    add_projections(model, [0, 1], 64)
    return model


@pytest.mark.parametrize("again", [{}, {"activation_checkpointing": {"partition_activations": False}}], ids=["kept", "again"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.usefixtures("one_rank")
def test_gradients_of_projections_and_blocks_are_those_of_plain_autograd(wan1: Path, stage: int, again: dict) -> None:
    from deepspeed.utils import safe_get_full_grad

    teacher = LocalTeacher(dict.fromkeys(Expert, loaded(wan1 / "transformer").eval()))
    objective = read_objective(["velocity", {"name": "feature", "weight": 0.5}]).for_student([1, 3])
    expected = gradients(narrow(), objective, teacher)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    student = Student({Expert.HIGH_NOISE: narrow()}, engine(zero_optimization=zero, **again))
    batches = {NOISED: batch_for(narrow())}
    answers = split(student.answer(join(batches)), batches)
    loss_TB = objective.losses(answers, objective.target(teacher, batches), batches)
    student.engines[Expert.HIGH_NOISE].backward(objective.total(loss_TB).mean())
    found = {n: safe_get_full_grad(p) for n, p in student.engines[Expert.HIGH_NOISE].module.named_parameters()}
    assert found.keys() == expected.keys() and expected["feature_projections.0.weight"].abs().max() > 0
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-9


def test_projections_start_as_the_truncated_identity_and_widths_that_agree_need_none() -> None:
    assert torch.equal(narrow().feature_projections["1"].weight, torch.eye(64, 32))
    model = narrow()
    add_projections(model, [0], 32)
    assert list(model.feature_projections.parameters()) == []


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_guided_teacher_s_hidden_states_are_those_of_the_text_branch(wan1: Path, scale: float, passes: int) -> None:
    inner = LocalTeacher(dict.fromkeys(Expert, loaded(wan1 / "transformer").eval()))
    batch = batch_for(inner.experts[Expert.HIGH_NOISE])
    guided = GuidedTeacher(inner, Guidance(torch.ones(512, 32), dict.fromkeys(Expert, scale)), passes)
    found, text = guided.answer(batch, (1, 3)), inner.answer(batch, (1, 3))
    assert sorted(found.features) == [1, 3]
    for k in (1, 3):
        torch.testing.assert_close(found.features[k], text.features[k], rtol=0, atol=1e-5)


def test_hooks_of_hidden_states_are_gone_after_the_answer(wan1: Path) -> None:
    model = loaded(wan1 / "transformer").eval()
    LocalTeacher(dict.fromkeys(Expert, model)).answer(batch_for(model), (0, 3))
    assert [len(block._forward_hooks) for block in model.blocks] == [0] * 4


# sums


def test_a_sum_weighs_its_terms_and_reports_each_unweighted() -> None:
    objective = read_objective([{"name": "velocity", "weight": 2}, {"name": "trajectory", "weight": 0.5}])
    batches = {NOISED: BATCH, PATH: BATCH}
    answers = {NOISED: Answer(constant(3.0, 1.0)), PATH: Answer(constant(0.0, 2.0))}
    loss_TB = objective.losses(answers, objective.target(Constant(1.0), batches), batches)
    assert loss_TB.tolist() == [[4.0, 0.0], [4.0, 0.0]] and objective.total(loss_TB).tolist() == [10.0, 0.0]
    assert objective.named([4.0, 1.0]) == {"losses": {"velocity": 4.0, "trajectory": 1.0}}


def test_a_single_term_is_not_named_apart_from_the_sum() -> None:
    assert read_objective("velocity").named([4.0]) == {}


def test_split_undoes_join() -> None:
    batches = {NOISED: BATCH, PATH: BATCH.at(x_t_BCFHW=NOISE[:1], sigma_B=torch.ones(1))}
    batches[PATH] = replace(batches[PATH], x0_BCFHW=X0[:1], noise_BCFHW=NOISE[:1], text_BLD=BATCH.text_BLD[:1])
    both = join(batches)
    found = split(Answer(both.x_t_BCFHW, {0: both.text_BLD}), batches)
    for name, batch in batches.items():
        assert torch.equal(found[name].v_BCFHW, batch.x_t_BCFHW) and torch.equal(found[name].features[0], batch.text_BLD)


def test_the_teacher_is_needed_unless_only_data_or_paths_are_matched() -> None:
    assert read_objective("velocity").needs_teacher and read_objective(["trajectory", "feature"]).needs_teacher
    assert not read_objective("trajectory").needs_teacher
    assert not read_objective([{"name": "velocity", "data_weight": 1}, "trajectory"]).needs_teacher


@pytest.mark.parametrize(
    ("given", "shown"),
    [("velocity", "velocity"), ({"name": "velocity", "data_weight": 0.1}, "velocity(data_weight=0.1)"),
     ({"data_weight": 0.1}, "velocity(data_weight=0.1)"), (["velocity"], "velocity"),
     (["velocity", {"name": "feature", "weight": 0.1, "blocks": [1, 3]}, "trajectory"],
      "velocity + 0.1 feature(blocks=[1, 3]) + trajectory")],
)  # fmt: skip
def test_an_objective_reads_as_a_sum_of_what_differs_from_the_defaults(given: Any, shown: str) -> None:
    assert str(read_objective(given)) == shown


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_works_with_its_defaults(name: str) -> None:
    objective, batches = read_objective(name).for_student([1, 3]), {NOISED: BATCH, PATH: BATCH}
    answer = Answer(constant(3.0, 1.0), {0: torch.ones(2, 3, 2), 1: torch.ones(2, 3, 2)})
    loss_TB = objective.losses(dict.fromkeys(batches, answer), objective.target(Constant(1.0), batches), batches)
    assert loss_TB.shape == (1, 2) and torch.isfinite(loss_TB).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_setting_of_an_objective_can_be_given_by_name(name: str) -> None:
    defaults = {key: getattr(OBJECTIVES[name](), key) for key in objective_keys(name)}
    assert OBJECTIVES[name](**defaults) == OBJECTIVES[name]()


@pytest.mark.parametrize(
    ("given", "said"),
    [({"data_weight": -0.1}, "`objective.data_weight` is -0.1. Write a number from 0 to 1."),
     ({"data_weight": 1.1}, "`objective.data_weight` is 1.1. Write a number from 0 to 1."),
     ({"weight": 0}, "`objective.weight` is 0. Write a number above 0."),
     ({"weight": True}, "`objective.weight` is true. Write a number above 0."),
     ({"sigma_weight": "snr"}, '`objective.sigma_weight` is "snr". Write one of: uniform, logit_normal, cosmap, min_snr.'),
     ({"name": "feature", "blocks": 3}, "`objective.blocks` is 3. Write a list of block numbers."),
     ({"name": "feature", "blocks": []}, "`objective.blocks` is []. Write a list of block numbers."),
     ({"name": "feature", "blocks": ["1"]}, '`objective.blocks` is ["1"]. Write a list of block numbers.'),
     ({"name": "feature", "teacher_blocks": [1]}, "`objective.teacher_blocks` is [1]. Write as many as there are `blocks`."),
     (["velocity", {"name": "trajectory", "blocks": [1]}],
      "`objective[1].blocks` is [1]. There is no such key. Known keys: weight."),
     (["velocity", "trajectori"], '`objective[1]` is "trajectori". Write one of: velocity, feature, trajectory.'),
     (["velocity", "velocity"], "`objective` names velocity twice. Keep one."),
     ([], "`objective` is []. Write one of: velocity, feature, trajectory.")],
)  # fmt: skip
def test_a_wrong_objective_says_what_to_write(given: Any, said: str) -> None:
    assert problems(given) == [f"recipe: {said}"]


def test_all_problems_of_a_sum_are_said_at_once() -> None:
    assert len(problems([{"data_weight": 2}, {"name": "feature", "weight": -1, "blocks": 1}, "x"])) == 4
