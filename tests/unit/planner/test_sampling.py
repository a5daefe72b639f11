"""Where `sample` and `evaluate` place networks by themselves: the simplest place that has room for them."""

from pathlib import Path

import pytest
from planned import gpus
from shipped import placement

from wandistiller.evaluation.sampling import Sampling
from wandistiller.planner import sampling
from wandistiller.planner.sampling import Drawing, choose
from wandistiller.teacher.placements.base import Placement
from wandistiller.teacher.teacher_json import quantized_facts, with_keys
from wandistiller.wan.pipeline import open_wan

IMAGE = Sampling(height=480, width=832, steps=4)
CLIP = Sampling(height=480, width=832, num_frames=81, steps=4, guidance_scale=5.0)
AUTO = placement("auto")
INT8 = with_keys(AUTO, weights="int8")
"""As `sample` reads `auto` for a LoRA of a run with `stream8`."""


def chosen(
    published: Path, wan: str, machine: tuple[int, int], how: Sampling, batch: int, auto: Placement = AUTO
) -> tuple[str, int]:
    """Return the placement and the samples at once, on a GPU of so many GiB beside so much memory."""
    folder = open_wan(str(published / "Wan-AI" / f"{wan}-Diffusers"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "this_machine", lambda _: gpus(1, *machine))
        placed, at_once = choose(auto, Drawing([folder], how, batch, 1))
    return " in ".join([placed.describe(), *quantized_facts(placed).values()]), at_once


@pytest.mark.parametrize(
    ("wan", "machine", "how", "name"),
    [
        ("Wan2.1-T2V-14B", (80, 200), IMAGE, "replicated"),
        ("Wan2.1-T2V-14B", (24, 64), IMAGE, "streamed"),
        ("Wan2.1-T2V-14B", (24, 24), IMAGE, "files"),
    ],
)
def test_a_published_wan_is_drawn_in_the_simplest_place_that_has_room(
    wan: str, machine: tuple[int, int], how: Sampling, name: str, published: Path
) -> None:
    assert chosen(published, wan, machine, how, 1) == (name, 1)


def test_weights_in_the_format_of_a_run_come_before_unquantised_ones(published: Path) -> None:
    pytest.importorskip("torchao")
    names = {(40, 64): "replicated in int8", (24, 64): "streamed in int8", (24, 24): "files"}
    for machine, name in names.items():
        assert chosen(published, "Wan2.2-T2V-A14B", machine, IMAGE, 1, INT8) == (name, 1)


def test_fewer_clips_are_drawn_at_once_where_eight_have_no_room(published: Path) -> None:
    assert chosen(published, "Wan2.1-T2V-14B", (80, 200), IMAGE, 8) == ("replicated", 8)
    name, at_once = chosen(published, "Wan2.1-T2V-14B", (48, 200), CLIP, 8)
    assert name == "replicated" and at_once < 8


def test_where_nothing_has_room_what_lacks_least_is_taken_and_a_warning_says_so(
    published: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, at_once = chosen(published, "Wan2.1-T2V-14B", (4, 8), CLIP, 2)
    assert at_once == 1
    (warning,) = (line for line in caplog.messages if line.startswith("warning"))
    assert "memory may be short; available: 4.0 GiB on each" in warning and "--context_parallel" in warning


def test_what_is_named_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    named, folder = placement("streamed"), open_wan("tiny")
    monkeypatch.setattr(sampling, "this_machine", None)  # a call would raise
    assert choose(named, Drawing([folder], IMAGE, 1, 1)) == (named, 1)
