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


@pytest.mark.usefixtures("one_rank")
def test_the_layout_of_vbench_has_five_clips_a_prompt_from_one_seed_after_the_other_and_no_other_file(
    wan1: Path, tmp_path: Path
) -> None:
    items, sampling = [PromptItem("a cat"), PromptItem("a dog")], Sampling(**SIZE, num_frames=5, steps=1)
    candidate, folder = read_candidate(str(wan1)), tmp_path / "five" / "vbench"
    assert sample(candidate, items, folder.parent, sampling, 3, GPU, layout="vbench") == [folder]
    names = [f"{item.prompt}-{number}.mp4" for item in items for number in range(5)]
    assert sorted(file.name for file in folder.iterdir()) == names
    sample(candidate, [items[1]], tmp_path / "one", sampling, 3 + 7, GPU)
    assert (tmp_path / "one" / "0000.mp4").read_bytes() == (folder / "a dog-2.mp4").read_bytes()
    assert len({(folder / name).read_bytes() for name in names}) == 10


@pytest.mark.parametrize(
    ("learnt", "scale", "lines"), [(5.0, 5.0, 1), (5.0, 1.0, 0), (1.0, 5.0, 0), (None, 5.0, 0)]
)
def test_guidance_on_top_of_guidance_that_is_folded_in_is_told(
    learnt: float | None, scale: float, lines: int
) -> None:
    told = guidance_lines(Facts(guidance_scale=learnt), Sampling(**SIZE, guidance_scale=scale))
    assert len(told) == lines
