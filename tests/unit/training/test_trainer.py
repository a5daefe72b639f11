"""A request to stop is found between two calls of a network, and what was finished is kept."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from recipes import recipe, student_engine
from torch import Tensor
from trainers import trainer_of

from wandistiller.batch import Batch, Conditioning
from wandistiller.distributed.shutdown import Stopped, stopping
from wandistiller.engine.ds_config import load
from wandistiller.experts import Expert
from wandistiller.flow import with_noise
from wandistiller.network.sampling import denoise
from wandistiller.network.weight_reader import WeightReader
from wandistiller.student.calibration import importance, measure, velocity_error
from wandistiller.teacher.base import LocalTeacher
from wandistiller.teacher.build import build_teacher
from wandistiller.teacher.teacher_json import read_placement
from wandistiller.utils.logging import current
from wandistiller.wan import pipeline

pytestmark = pytest.mark.usefixtures("one_rank")
X0 = torch.zeros(1, 4, 1, 4, 4)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    stopping.release()
    current.phase = "start"


class Calls:
    """A network that receives the request in a call, counted from 1, and counts its calls."""

    def __init__(self, at: int):
        self.at, self.made = at, 0

    def __call__(self, batch: Batch | None = None) -> Tensor:
        self.made += 1
        if self.made == self.at:
            stopping.request_stop("SIGTERM")
        return X0


def batches(number: int) -> list[Batch]:
    return [
        with_noise(X0, Conditioning(X0[0, 0]), Expert.HIGH_NOISE, [0.5], [("probe", i)])
        for i in range(number)
    ]


def test_a_rollout_ends_after_the_call_in_which_it_was_asked_to(wan1: Path) -> None:
    calls = Calls(at=2)
    with pytest.raises(Stopped):
        denoise(calls, pipeline.open_wan(str(wan1)), 3.0, X0, Conditioning(X0[0, 0]), 40)
    assert calls.made == 2


def test_a_measured_error_ends_after_the_call_in_which_it_was_asked_to() -> None:
    calls = Calls(at=3)
    with pytest.raises(Stopped):
        velocity_error(batches(8), [X0] * 8, calls)
    assert calls.made == 3


def test_importance_ends_after_the_call_in_which_it_was_asked_to() -> None:
    class Asked(LocalTeacher):
        calls = Calls(at=3)

        def velocity(self, batch: Batch) -> Tensor:
            return self.calls(batch)

    with pytest.raises(Stopped):
        importance(Asked({}, torch.device("cpu")), batches(8), layers=4, keep=2)
    assert Asked.calls.made == 3


def test_the_measurement_of_activations_ends_after_the_call_in_which_it_was_asked_to() -> None:
    calls = Calls(at=2)
    with pytest.raises(Stopped):
        measure([torch.nn.Linear(1, 1)], [calls] * 8)
    assert calls.made == 2


@pytest.mark.parametrize("placement", ["engine", "owner", "host_cpu"])
def test_loading_the_teacher_ends_soon_after_the_request(
    placement: str, wan1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, names = WeightReader.read, []

    def asked(reader: WeightReader, name: str, *more: object) -> object:
        names.append(name)
        stopping.request_stop("SIGTERM")
        return read(reader, name, *more)

    monkeypatch.setattr(WeightReader, "read", asked)
    placed = read_placement(load({"wandistiller": {"placement": placement}}))
    with pytest.raises(Stopped, match="while the teacher was loaded"):
        build_teacher(pipeline.open_wan(str(wan1)), placed)
    assert 1 <= len(names) <= 8


def test_a_request_while_pictures_are_drawn_saves_the_step_before_them(tmp_path: Path, wan1: Path) -> None:
    more = {"max_steps": 6, "sample_every": 4, "save_every": 100, "sample_steps": 2}
    more |= {"deepspeed_config": student_engine(2), "output_dir": str(tmp_path / "run")}
    one, drawn = trainer_of(recipe(tmp_path, wan1, **more)), []

    def asked(*_: object) -> None:
        if current.activity.startswith("pictures of"):
            drawn.append(current.activity)
            stopping.request_stop("SIGTERM")

    one.student.engine(Expert.HIGH_NOISE).module.register_forward_hook(asked)
    with pytest.raises(Stopped, match="after step 4 of 6"):
        one.train()
    assert drawn == ["pictures of the student"]
    assert (one.job.output / "checkpoints" / "latest").read_text() == "step_00000004\n"
    assert not one.job.picture(4).exists()
