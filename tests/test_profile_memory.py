"""`--profile_memory`: its picture and numbers, that nothing learned changes, and an accelerator's own record read."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from ranks import losses, wandistiller, write_json
from recipes import recipe

from wandistiller import phase
from wandistiller.census import ACTIVATIONS, BUFFERS, OPTIMIZER, OTHERS, OWNERS, STUDENT, TEACHER, Storage
from wandistiller.check import read_job
from wandistiller.config import RunConfig
from wandistiller.memory_picture import amount, draw
from wandistiller.problems import ConfigError
from wandistiller.timeline import BACKWARD, CALL, MOST_POINTS, Clock, Span, allocated, owner_of, thinned, told

MIB = 2**20


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, wan1: Path) -> dict[str, Any]:
    """Four steps on two ranks: plain, and with the second to the fourth recorded."""
    folder = tmp_path_factory.mktemp("profile")
    found: dict[str, Any] = {}
    for name, more in (("plain", {}), ("recorded", {"profile_memory": 2})):
        given = recipe(folder, wan1, output_dir=str(folder / name), max_steps=4, sample_prompts=["a circle"], **more)
        done = wandistiller("train", "--recipe", write_json(folder / f"{name}.json", given), ranks=2)
        found[name] = folder / name, done.stderr
    return found


@pytest.fixture(scope="module", params=[0, 1])
def record(request: pytest.FixtureRequest, runs: dict[str, Any]) -> dict[str, Any]:
    """What each rank wrote."""
    return json.loads((runs["recorded"][0] / "profile_memory" / f"rank_{request.param}.json").read_text())


def test_recording_changes_no_loss(runs: dict[str, Any]) -> None:
    assert losses(runs["plain"][0]) == losses(runs["recorded"][0])


def test_recording_changes_no_weight(runs: dict[str, Any]) -> None:
    plain, recorded = (sorted((runs[name][0] / "student").rglob("*.safetensors")) for name in ("plain", "recorded"))
    assert plain and [file.read_bytes() for file in plain] == [file.read_bytes() for file in recorded]


def test_nothing_is_recorded_unless_asked_for(runs: dict[str, Any]) -> None:
    assert not (runs["plain"][0] / "profile_memory").exists() and phase.now.changed is None


def test_three_steps_are_recorded_turn_by_turn(record: dict[str, Any]) -> None:
    turns = [p["what"] for p in record["phases"] if p["step"] == 3]
    assert record["steps"] == [2, 3, 4]
    assert [turn.partition(", ")[2] for turn in turns[:5]] == [
        "reading the data", "the teacher's forward pass", "the student's forward pass", "the student's backward pass",
        "the optimizer's step"]  # fmt: skip


def test_seconds_go_on_without_a_gap(record: dict[str, Any]) -> None:
    phases = record["phases"]
    assert phases[0]["begin"] == 0
    assert all(a["end"] == pytest.approx(b["begin"]) for a, b in zip(phases, phases[1:], strict=False))
    seconds = [s["second"] for s in record["cpu"]["resident"]]
    assert seconds == sorted(seconds) and seconds[-1] <= phases[-1]["end"]


def test_weights_are_there_all_the_time_and_activations_when_backward_begins(record: dict[str, Any]) -> None:
    counts = record["cpu"]["owners"]
    assert len({(c[TEACHER], c[STUDENT], c[OPTIMIZER]) for c in counts}) == 1 and counts[0][TEACHER] > 0
    begins = {p["begin"] for p in record["phases"] if p["what"].endswith("the student's backward pass")}
    assert {c["second"] for c in counts if c[ACTIVATIONS] > 100_000} == begins


def test_what_is_resident_is_more_than_the_tensors(record: dict[str, Any]) -> None:
    tensors = max(sum(c[owner] for owner in OWNERS) for c in record["cpu"]["owners"])
    assert min(s["bytes"] for s in record["cpu"]["resident"]) > tensors > MIB


def test_the_picture_is_there_and_named_where_it_is_written_and_at_the_end(runs: dict[str, Any]) -> None:
    output, said = runs["recorded"]
    file = output / "profile_memory" / "rank_0.png"
    assert Image.open(file).size == (1500, 520)
    assert f"memory    of steps 2 to 4 is drawn in {file}" in said and said.rstrip().endswith(f"memory    {file}")
    assert sorted(f.name for f in file.parent.iterdir()) == ["rank_0.json", "rank_0.png", "rank_1.json", "rank_1.png"]


def test_a_run_that_goes_on_past_the_steps_says_so(runs: dict[str, Any], tmp_path: Path) -> None:
    given = json.loads((runs["plain"][0].parent / "plain.json").read_text()) | {"max_steps": 5, "profile_memory": 1}
    said = wandistiller("train", "--recipe", write_json(tmp_path / "more.json", given)).stderr
    assert "`profile_memory` is 1, but 4 steps are done already: no memory is recorded" in said


@pytest.mark.parametrize("step", [0, -1])
def test_a_step_below_1_is_refused(tmp_path: Path, step: int) -> None:
    found = RunConfig(teacher_path="t", data_path="d", output_dir="o", profile_memory=step).problems()
    assert found == [("profile_memory", f"`profile_memory` is {step}. Write a positive number.")]


def test_a_step_beyond_the_last_is_told_with_all_others(tmp_path: Path, wan1: Path) -> None:
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), max_steps=4, profile_memory=5, height=33)
    with pytest.raises(ConfigError) as caught:
        read_job(RunConfig(**given), 1)
    assert "`profile_memory` is 5, but the run ends with step 4. Write a step of it." in caught.value.problems
    assert any("height" in problem for problem in caught.value.problems)


# The clock


SPANS = [Span(5, "step 5, a", {"cpu": {}}, 10.0, 12.0), Span(5, "step 5, b", {"cpu": {}}, 15.0, 16.0),
         Span(5, "", {"cpu": {}}, 20.0, 20.0)]  # fmt: skip


@pytest.mark.parametrize(("wall", "second"), [(9, 0), (10, 0), (11.5, 1.5), (13, 2), (15.5, 2.5), (19, 3), (30, 3)])
def test_the_clock_stands_still_between_spans(wall: float, second: float) -> None:
    assert Clock(SPANS).at(wall) == second


def test_samples_taken_while_tensors_are_counted_are_left_out() -> None:
    found = told(SPANS, [(11.0, 7, 0), (13.0, 8, 0), (15.0, 9, 0)])
    assert found["cpu"]["resident"] == [{"second": 1.0, "bytes": 7}, {"second": 2.0, "bytes": 9}]
    assert [p["what"] for p in found["phases"]] == ["step 5, a", "step 5, b"]


# An accelerator's own record, as torch.cuda.memory._snapshot gives it


def frames(*files: str) -> list[dict[str, Any]]:
    return [{"filename": f"/lib/python/{file}", "line": 1, "name": "f"} for file in files]


@pytest.mark.parametrize(
    ("files", "doing", "owner"),
    [(("torch/nn/modules/linear.py", "wandistiller/wan.py", "wandistiller/teacher.py", "wandistiller/trainer.py"), "", CALL),
     (("torch/nn/modules/linear.py", "deepspeed/utils/nvtx.py", "deepspeed/runtime/engine.py", "wandistiller/student.py"), "",
      ACTIVATIONS),
     (("deepspeed/runtime/zero/partition_parameters.py", "deepspeed/utils/nvtx.py", "wandistiller/teacher.py"), "", BUFFERS),
     (("deepspeed/ops/adam/fused_adam.py", "deepspeed/runtime/zero/stage3.py"), "", OPTIMIZER),
     ((), "step 3, the student's backward pass", BACKWARD), ((), "finishing step 3", OTHERS)],
)  # fmt: skip
def test_the_innermost_known_frame_owns_an_allocation_or_else_the_phase(files: tuple[str, ...], doing: str, owner: str) -> None:
    assert owner_of(frames(*files), doing) == owner


def test_what_is_allocated_and_freed_is_its_owner_s() -> None:
    def event(action: str, address: int, size: int, *files: str) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size, "time_us": 10 * address, "frames": frames(*files)}

    before = {1: Storage(STUDENT, "cuda", 100), 2: Storage(TEACHER, "cuda", 50)}
    events = [event("alloc", 3, 7, "wandistiller/teacher.py"), event("free_requested", 3, 7), event("free_completed", 3, 7),
              event("free_completed", 2, 50), event("free_completed", 9, 5)]  # fmt: skip
    found = [owners for _, owners in allocated(events, before, 160, lambda _: "")]
    assert [f[CALL] for f in found] == [7, 0, 0, 0] and [f[TEACHER] for f in found] == [50, 50, 0, 0]
    assert [f[OTHERS] for f in found] == [10, 10, 10, 5] and all(f[STUDENT] == 100 for f in found)


def test_a_long_record_is_thinned_to_its_heights() -> None:
    points = [(float(i), {OTHERS: i % 10}) for i in range(10 * MOST_POINTS)]
    assert len(thinned(points)) == MOST_POINTS and {p[1][OTHERS] for p in thinned(points)} == {9}


def test_an_accelerator_s_memory_has_a_panel_of_its_own(record: dict[str, Any], tmp_path: Path) -> None:
    draw(tmp_path / "two.png", record | {"cuda": record["cpu"]})
    assert Image.open(tmp_path / "two.png").size == (1500, 1040)


def test_amounts_have_three_digits_or_so() -> None:
    assert [amount(n * MIB) for n in (0.5, 45, 1536)] == ["0.50 MiB", "45 MiB", "1.50 GiB"]
