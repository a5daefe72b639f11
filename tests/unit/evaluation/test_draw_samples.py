"""The files that `sample` leaves in its output folder, and what it says of guidance."""

from pathlib import Path

import pytest
from drawing import GPU

from wandistiller.checkpoint.facts import Facts
from wandistiller.data.dataset import PromptItem
from wandistiller.evaluation.candidates import read_candidate
from wandistiller.evaluation.draw_samples import sample
from wandistiller.evaluation.sampling import Sampling, guidance_lines

SIZE = {"height": 16, "width": 16}


@pytest.mark.usefixtures("one_rank")
def test_pictures_of_an_earlier_longer_call_go_and_other_files_stay(wan1: Path, tmp_path: Path) -> None:
    (tmp_path / "0007.png").write_text("someone's own")
    for prompts in ("abc", "d"):
        items = [PromptItem(prompt) for prompt in prompts]
        candidate = read_candidate(str(wan1))
        sample(candidate, items, tmp_path, Sampling(**SIZE, steps=1), 0, GPU)
    found = sorted(file.name for file in tmp_path.iterdir())
    assert found == ["0000.png", "0007.png", "cache", "grid.png", "wandistiller_samples.json"]


@pytest.mark.parametrize(
    ("learnt", "scale", "lines"), [(5.0, 5.0, 1), (5.0, 1.0, 0), (1.0, 5.0, 0), (None, 5.0, 0)]
)
def test_guidance_on_top_of_guidance_that_is_folded_in_is_told(
    learnt: float | None, scale: float, lines: int
) -> None:
    told = guidance_lines(Facts(guidance_scale=learnt), Sampling(**SIZE, guidance_scale=scale))
    assert len(told) == lines
