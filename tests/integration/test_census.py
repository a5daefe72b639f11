"""Nothing unneeded is resident: the tensors of two ranks in a step of a real run, compared with the plan."""

from pathlib import Path
from typing import Any

import pytest
from on_ranks.census import BUCKET, census
from ranks import call

from wandistiller.planner.student_memory import BUCKETS, GRADIENTS, MASTERS, WEIGHTS

pytestmark = pytest.mark.slow

PAIRS = [("zero2_offload", "zero_inference_cpu"), ("zero1", "replicated"), ("zero3_offload", "host_cpu")]
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


def test_between_micro_steps_there_is_what_is_planned_and_the_next_batch_alone(
    ranks: list[dict[str, Any]],
) -> None:
    """In a step gradients are on top of it, and what they are reduced in."""
    for rank in ranks:
        kept, in_a_step = rank["planned"]["all the time"], rank["planned"]["student"]
        parts = (
            "teacher's weights",
            *(f"student's {part}" for part in (WEIGHTS, MASTERS, GRADIENTS, BUCKETS)),
        )
        least = sum(kept.get(part, 0) for part in parts) + TABLES
        more = sum(in_a_step.get(f"student's {part}, in a step", 0) for part in (GRADIENTS, BUCKETS))
        assert len(rank["seen"]) == 2
        for moment in rank["seen"]:
            assert least <= moment["bytes"] <= 1.02 * least + more + AHEAD + 5 * BUCKET


def test_no_vae_no_text_encoder_and_no_second_network(ranks: list[dict[str, Any]]) -> None:
    wanted = {"AutoencoderKLWan": 0, "UMT5EncoderModel": 0, "WanTransformer3DModel": 2}
    assert all(moment["networks"] == wanted for rank in ranks for moment in rank["seen"])


def test_no_network_is_left_for_the_export(ranks: list[dict[str, Any]]) -> None:
    assert [rank["left"] for rank in ranks] == [[], []]
