"""Nothing unneeded is resident: the tensors of two ranks in a step of a real run, compared with the plan."""

from pathlib import Path
from typing import Any

import pytest
from on_ranks.census import census
from ranks import call
from tensor_owners import ACTIVATIONS, BUFFERS, GRADIENTS, OPTIMIZER, OTHERS, STUDENT, TEACHER

from wandistiller.planner.student_memory import BUCKETS, GATHERED, HELD, MASTERS, WEIGHTS
from wandistiller.planner.student_memory import GRADIENTS as PLANNED_GRADIENTS

pytestmark = pytest.mark.slow

PAIRS = [("zero2_offload", "zero_inference_cpu"), ("zero1", "replicated"), ("zero3_offload", "host_cpu")]
TURNS = [
    "reading the data",
    "the teacher's forward pass",
    "the student's forward pass",
    "the student's backward pass",
    "the optimizer's step",
]
KEPT = "all the time"
TEXT, LATENTS = 2 * 10 * 32 * 4, 2 * 16 * 4 * 4 * 4
"""Bytes of a micro-step's two texts of ten tokens, and of its latents, or noise, or velocities."""
AHEAD = TEXT + 3 * LATENTS
"""Of the next micro-step, which is read ahead: x0, noise, x_t and the text."""
TABLES = 2 * 2 * 64 * 32 * 4 + 32 * 4
"""Of the rope tables of teacher and student, and of the negative prompt, which is empty."""


@pytest.fixture(scope="module", params=PAIRS, ids="+".join)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, wan1: Path
) -> list[dict[str, Any]]:
    """The planned and the resident bytes of both ranks."""
    return call(census, tmp_path_factory.mktemp("census"), wan1, *request.param, ranks=2)


def moments(ranks: list[dict[str, Any]], owner: str) -> list[tuple[dict[str, Any], int]]:
    """Of each rank and moment what was planned, and the owner's bytes."""
    return [(rank["planned"], moment["owners"][owner]) for rank in ranks for moment in rank["seen"]]


def kept(planned: dict[str, Any], part: str) -> int:
    """Bytes of the student's part that the plan has there all the time."""
    return planned[KEPT].get(f"student's {part}", 0)


def in_a_step(planned: dict[str, Any], part: str) -> int:
    """Those on top while the student learns."""
    return planned["student"].get(f"student's {part}, in a step", 0)


def test_every_turn_of_every_micro_step_is_seen(ranks: list[dict[str, Any]]) -> None:
    assert [[moment["what"] for moment in rank["seen"]] for rank in ranks] == [TURNS * 2] * 2


def test_the_plan_of_training_has_each_part_once(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        owned = {
            "libraries",
            "teacher's weights",
            *(f"student's {p}" for p in (WEIGHTS, MASTERS, PLANNED_GRADIENTS)),
        }
        more = {f"student's {p}" for p in (BUCKETS, GATHERED, HELD)}
        assert owned <= rank["planned"][KEPT].keys() <= owned | more
        assert rank["planned"].keys() == {KEPT, "teacher", "student", "optimizer"}


def test_the_teacher_s_weights_have_exactly_the_planned_bytes(ranks: list[dict[str, Any]]) -> None:
    assert all(found == planned[KEPT]["teacher's weights"] for planned, found in moments(ranks, TEACHER))


def test_the_student_s_weights_and_optimizer_have_exactly_the_planned_bytes(
    ranks: list[dict[str, Any]],
) -> None:
    assert all(found == kept(planned, WEIGHTS) for planned, found in moments(ranks, STUDENT))
    assert all(found == kept(planned, MASTERS) for planned, found in moments(ranks, OPTIMIZER))


def test_gradients_are_there_as_long_as_planned(ranks: list[dict[str, Any]]) -> None:
    for planned, found in moments(ranks, GRADIENTS):  # whole parameters, cut by the ranks
        always = kept(planned, PLANNED_GRADIENTS)
        assert always <= found <= 1.02 * (always + in_a_step(planned, PLANNED_GRADIENTS))
    for rank in ranks:
        first = rank["seen"][0]["owners"][GRADIENTS]
        assert first == pytest.approx(kept(rank["planned"], PLANNED_GRADIENTS), rel=0.02)


def test_activations_have_the_planned_bytes_where_backward_begins(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:  # with the answer, and under ZeRO-3 weights that it will go back through
        planned, found = rank["planned"], max(moment["owners"][ACTIVATIONS] for moment in rank["seen"])
        assert found == pytest.approx(
            planned["student"]["student's activations"] + in_a_step(planned, HELD), rel=0.05
        )


def test_buffers_are_the_planned_ones_and_the_rope_tables(ranks: list[dict[str, Any]]) -> None:
    for planned, found in moments(ranks, BUFFERS):
        buckets = kept(planned, BUCKETS) + TABLES
        assert buckets <= found <= buckets + max(2 * 1000, in_a_step(planned, BUCKETS)) + 2000


def test_nothing_else_is_there_but_the_batch_and_the_next_one(ranks: list[dict[str, Any]]) -> None:
    """x0, noise, x_t, the teacher's velocity and the text, once each; some numbers such as learning rates."""
    assert all(found <= TEXT + 4 * LATENTS + AHEAD + 1000 for _, found in moments(ranks, OTHERS))
    assert max(moment["largest other"] for rank in ranks for moment in rank["seen"]) == TEXT


def test_between_batches_there_is_only_the_next_one(ranks: list[dict[str, Any]]) -> None:
    found = [m["owners"][OTHERS] for rank in ranks for m in rank["seen"] if m["what"] == TURNS[0]]
    assert all(nbytes < AHEAD + 1000 for nbytes in found)


def test_no_vae_no_text_encoder_and_no_second_network(ranks: list[dict[str, Any]]) -> None:
    wanted = {"AutoencoderKLWan": 0, "UMT5EncoderModel": 0, "WanTransformer3DModel": 2}
    assert all(moment["networks"] == wanted for rank in ranks for moment in rank["seen"])


def test_no_network_is_left_for_the_export(ranks: list[dict[str, Any]]) -> None:
    assert [rank["left"] for rank in ranks] == [[], []]
