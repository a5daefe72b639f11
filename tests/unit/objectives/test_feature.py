"""Feature matching against sums done by hand, an equal copy and plain autograd."""

from pathlib import Path

import pytest
import torch
from constant_teacher import BATCH, X0, Constant, losses
from deepspeed.utils import safe_get_full_grad
from diffusers import WanTransformer3DModel
from engines import batch_for, engine, learner_of, loaded, teacher_of
from small_wan import small_transformer
from torch import Tensor

from wandistiller.batch import NOISED, STUDENT, Prediction
from wandistiller.experts import Expert
from wandistiller.flow import FlowSchedule
from wandistiller.network.heads import add_projections
from wandistiller.objectives.feature import FeatureMatching
from wandistiller.objectives.objective import Objective, read_objective
from wandistiller.objectives.script import TEACHER
from wandistiller.student.config import lineage, read_student_config
from wandistiller.teacher.base import Guidance, GuidedTeacher, Teacher
from wandistiller.wan import pipeline, transformer
from wandistiller.wan.transformer_config import TransformerConfig

SCHEDULE = FlowSchedule(shift=3, boundary=None, seed=0)


def test_the_feature_loss_is_the_share_of_the_teacher_s_square_mean_over_blocks() -> None:
    term = FeatureMatching(blocks=[0, 1]).for_student([2, 4])
    target = Constant(0.0).predict(BATCH, (2, 4))  # states of 2 and of 4
    student = Prediction(X0, {0: torch.full((2, 3, 2), 3.0), 1: torch.zeros(2, 3, 2)})
    assert term.loss(student, target, BATCH).tolist() == pytest.approx([(1 / 4 + 16 / 16) / 2] * 2)


@pytest.mark.parametrize(
    ("settings", "pairs"),
    [
        ({}, [(0, 1), (1, 3), (2, 5)]),
        ({"blocks": [0, 2]}, [(0, 1), (2, 5)]),
        ({"blocks": [0, 2], "teacher_blocks": [0, 4]}, [(0, 0), (2, 4)]),
    ],
)
def test_blocks_are_matched_by_lineage_unless_the_teacher_s_are_given(settings: dict, pairs: list) -> None:
    assert FeatureMatching(**settings).for_student([1, 3, 5]).matched_blocks == pairs


def test_the_teacher_is_asked_once_with_the_matched_blocks_for_both_terms_of_a_sum() -> None:
    objective = read_objective(["velocity", {"name": "feature", "blocks": [0, 2]}]).for_student([1, 3, 5])
    (ask,) = next(objective.script(STUDENT, {NOISED: BATCH}, SCHEDULE))
    assert (ask.role, ask.state, ask.blocks) == (TEACHER, BATCH, (1, 5))


@pytest.mark.parametrize("layers", [1, 2, 4, 9, 40])
def test_the_blocks_of_a_random_student_stand_for_rising_ones_up_to_the_last(wan2: Path, layers: int) -> None:
    folder = pipeline.open_wan(str(wan2))
    student, config = read_student_config("s.json", {"init": "random", "num_layers": layers}, folder)
    blocks = lineage(student, config, folder)
    assert len(blocks) == layers and blocks == sorted(blocks) and blocks[0] >= 0 and blocks[-1] == 3


@pytest.mark.usefixtures("one_rank")
def test_an_unpruned_copy_of_the_teacher_has_no_feature_and_no_velocity_loss(wan1: Path) -> None:
    teacher, model = teacher_of(wan1), loaded(wan1 / "transformer")
    objective = read_objective(["velocity", "feature"]).for_student([0, 1, 2, 3])
    batches = {NOISED: batch_for(model)}
    add_projections(model, range(4), TransformerConfig.of(model.config).width)
    student = learner_of(model, engine())
    loss_TB = losses(objective, teacher, lambda _: student.predict(batches)[NOISED], batches)
    assert loss_TB.count_nonzero() == 0


def gradients(model: WanTransformer3DModel, objective: Objective, teacher: Teacher) -> dict[str, Tensor]:
    """Of the feature loss by plain autograd."""
    seen: dict[int, Tensor] = {}
    for k in objective.student_blocks:
        project = model.feature_projections[str(k)]
        model.blocks[k].register_forward_hook(lambda *a, k=k, p=project: seen.update({k: p(a[-1])}))
    batch = batch_for(model)
    prediction = Prediction(transformer.velocity(model, batch), seen)
    loss_TB = losses(objective, teacher, lambda _: prediction, {NOISED: batch})
    objective.total(loss_TB).mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def narrow() -> WanTransformer3DModel:
    """A student half as wide as the small teacher."""
    model = small_transformer(5, 2, num_attention_heads=1)
    add_projections(model, [0, 1], 64)
    return model


@pytest.mark.parametrize(
    "section",
    [{}, {"activation_checkpointing": {"partition_activations": False}}],
    ids=["kept", "recomputed"],
)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.usefixtures("one_rank")
def test_gradients_of_projections_and_blocks_are_those_of_plain_autograd(
    wan1: Path, stage: int, section: dict
) -> None:
    teacher = teacher_of(wan1)
    objective = read_objective(["velocity", {"name": "feature", "weight": 0.5}]).for_student([1, 3])
    expected = gradients(narrow(), objective, teacher)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    student = learner_of(narrow(), engine(zero_optimization=zero, **section))
    batches = {NOISED: batch_for(narrow())}
    loss_TB = losses(objective, teacher, lambda _: student.predict(batches)[NOISED], batches)
    student.backward(Expert.HIGH_NOISE, objective.total(loss_TB).mean())
    weights = student.engine(Expert.HIGH_NOISE).module.named_parameters()
    actual = {name: safe_get_full_grad(p) for name, p in weights}
    assert actual.keys() == expected.keys() and expected["feature_projections.0.weight"].abs().max() > 0
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-9


def test_projections_start_as_the_truncated_identity_and_widths_that_agree_need_none() -> None:
    assert torch.equal(narrow().feature_projections["1"].weight, torch.eye(64, 32))
    model = narrow()
    add_projections(model, [0], 32)
    assert list(model.feature_projections.parameters()) == []


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_guided_teacher_s_hidden_states_are_those_of_the_text_branch(
    wan1: Path, scale: float, passes: int
) -> None:
    inner = teacher_of(wan1)
    model = inner.experts[Expert.HIGH_NOISE].module
    guided = GuidedTeacher(inner, Guidance(torch.ones(512, 32), dict.fromkeys(Expert, scale)), passes)
    guided_features, features = (t.predict(batch_for(model), (1, 3)).features for t in (guided, inner))
    torch.testing.assert_close(guided_features, features, rtol=0, atol=1e-5)
    assert sorted(features) == [1, 3]
    assert not any(block._forward_hooks for block in model.blocks)
