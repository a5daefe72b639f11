"""Schedulers of a pipeline: diffusers' own noise levels, and none that is not a flow's."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import diffusers
import pytest
from recipes import recipe
from trainers import job_of

from wandistiller.network.sampling import few_step_config, path_sigmas
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json, write_json
from wandistiller.wan.components import flow_problem
from wandistiller.wan.pipeline import open_wan

EULER, UNIPC = "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"
DPM = "DPMSolverMultistepScheduler"


@pytest.fixture
def with_scheduler(wan1: Path, copy_of: Callable[..., Path]) -> Callable[[dict[str, Any]], Path]:
    """Make a pipeline folder with this scheduler_config.json."""

    def make(config: dict[str, Any]) -> Path:
        folder = copy_of(wan1)
        index = read_json(folder / "model_index.json")
        write_json(folder / "model_index.json", index | {"scheduler": ["diffusers", config["_class_name"]]})
        write_json(folder / "scheduler" / "scheduler_config.json", config)
        return folder

    return make


def flow(kind: str, **changes: Any) -> dict[str, Any]:
    """Return the config of a flow's scheduler that was made of another's: it has the keys of both."""
    both = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0, "shift": 7.0}
    return {"_class_name": kind} | both | changes


@pytest.mark.parametrize(("kind", "shift"), [(UNIPC, 3.0), (EULER, 7.0), (DPM, 3.0)])
def test_of_two_shifts_the_one_that_diffusers_reads_counts(
    with_scheduler: Callable[..., Path], kind: str, shift: float
) -> None:
    folder = with_scheduler(flow(kind))
    scheduler = getattr(diffusers, kind).from_pretrained(folder, subfolder="scheduler")
    scheduler.set_timesteps(4)
    wan = open_wan(str(folder))
    assert wan.shift == shift
    assert path_sigmas(wan, wan.shift, 4) == scheduler.sigmas.tolist()


@pytest.mark.parametrize("kind", [UNIPC, EULER, DPM])
def test_another_shift_is_set_under_the_key_that_diffusers_reads(
    with_scheduler: Callable[..., Path], kind: str
) -> None:
    scheduler = getattr(diffusers, kind).from_config(flow(kind, flow_shift=12.0, shift=12.0))
    scheduler.set_timesteps(4)
    assert path_sigmas(open_wan(str(with_scheduler(flow(kind)))), 12.0, 4) == scheduler.sigmas.tolist()


def test_a_shift_that_is_left_out_is_that_of_diffusers_class(with_scheduler: Callable[..., Path]) -> None:
    config = flow(UNIPC)
    del config["flow_shift"]
    assert open_wan(str(with_scheduler(config))).shift == 1.0


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (flow(UNIPC, use_flow_sigmas=False), "use_flow_sigmas"),
        (flow(UNIPC, prediction_type="epsilon"), "prediction_type"),
        (flow("DEISMultistepScheduler"), "_class_name"),  # diffusers 0.42.1: its last level is not 0
        ({"_class_name": "EulerDiscreteScheduler"}, "_class_name"),
        ({"_class_name": "LTXEulerAncestralRFScheduler"}, "_class_name"),
        (flow(EULER, use_dynamic_shifting=True), "use_dynamic_shifting"),
    ],
)
def test_a_scheduler_of_another_kind_of_diffusion_is_refused(
    with_scheduler: Callable[..., Path], config: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"scheduler_config.json: `{key}` is"):
        open_wan(str(with_scheduler(config)))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("sampler", ["euler", "renoise"])
def test_every_few_step_student_s_scheduler_is_a_flow_s_whatever_its_shift(sampler: str, steps: int) -> None:
    shifts = [0.5 + n / 20 for n in range(60)]
    assert [s for s in shifts if flow_problem(few_step_config(s, steps, sampler))] == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("config", "draws"),
    [
        (few_step_config(3.0, 4), False),
        (few_step_config(3.0, 4, "renoise"), True),
        (flow(UNIPC), False),
        (flow(DPM, algorithm_type="sde-dpmsolver++"), True),
    ],
)
def test_a_scheduler_with_noise_of_its_own_is_none_for_a_teacher(
    with_scheduler: Callable[..., Path], config: dict[str, Any], draws: bool, tmp_path: Path
) -> None:
    wan = with_scheduler(config)
    assert bool(open_wan(str(wan)).noise_problems()) is draws
    given = recipe(tmp_path, wan, output_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="adds noise of its own in each step") if draws else nullcontext():
        job_of(given)
