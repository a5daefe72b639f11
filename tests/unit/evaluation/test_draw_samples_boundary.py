"""The noise level at which a few-step student's experts change in another number of steps than its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import write_json
from styles import style

from wandistiller.evaluation.candidates import Candidate, read_candidate
from wandistiller.evaluation.draw_samples import set_steps
from wandistiller.network.sampling import few_steps

OWN = few_steps(3.0, 4, 0.875)
FACTS: dict[str, Any] = {
    "shift": 3.0,
    "steps": 4,
    "few_steps": list(OWN.sigmas),
    "sampler": "renoise",
    "experts": ["transformer", "transformer_2"],
    "boundary": OWN.boundary,
}


@pytest.fixture(scope="module", params=["pipeline", "LoRA"])
def student(
    request: pytest.FixtureRequest, wan2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Candidate:
    """The teacher's networks, or the teacher with a LoRA on both, as a student of 4 steps."""
    folder = tmp_path_factory.mktemp("student")
    if request.param == "LoRA":
        for name in ("pytorch_lora_weights", "pytorch_lora_weights_2"):
            style(wan2, folder / f"{name}.safetensors", "to_q")
        write_json(folder / "wandistiller.json", FACTS)
        return read_candidate(str(wan2), [str(folder)])
    for part in wan2.iterdir():
        (folder / part.name).symlink_to(part)
    write_json(folder / "wandistiller.json", FACTS)
    return read_candidate(str(folder))


def test_the_experts_change_between_the_same_levels_in_any_number_of_steps(
    student: Candidate,
) -> None:
    pipe = student.folder.load_pipeline(torch.float32)
    assert OWN.boundary == pytest.approx((0.9 + 0.75) / 2, abs=0.002)  # the teacher's 0.875 lies there too
    boundaries = {}
    for steps in (1, 2, 3):
        set_steps(pipe, student.trained, steps, student.folder)
        boundaries[steps] = pipe.config.boundary_ratio
    assert boundaries[3] == pytest.approx((0.857 + 0.6) / 2, abs=0.002)  # of levels 1, 6/7 and 3/5
