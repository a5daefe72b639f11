"""The style of the quick start: its pictures, and the count of pictures in it; no network is opened here."""

from pathlib import Path

import pytest

from wandistiller.data.dataset import read_dataset
from wandistiller.tiny.making.style import at_night, judge, scores, write
from wandistiller.tiny.shapes import HELD_OUT, SPECS, render
from wandistiller.utils.files import write_json
from wandistiller.utils.images import to_pil

FIRST, SECOND = [prompt for prompt in HELD_OUT if at_night(prompt) != prompt][:2]


def test_the_style_changes_all_scenes_but_those_on_black() -> None:
    assert {SPECS[p].background for p in SPECS if at_night(p) == p} == {"black"}
    assert {SPECS[at_night(p)].background for p in SPECS} == {"black"}


def test_a_picture_is_in_the_style_right_both_or_neither() -> None:
    prompt = "a black circle on a blue background, left"
    drawn = {
        (0, 1): prompt,
        (1, 1): "a white circle on a black background, left",
        (1, 0): "a white circle on a black background, top",
        (0, 0): "a red circle on a black background, left",
    }
    for counts, name in drawn.items():
        assert scores(render(name, seed=3)[None], [prompt])[:2] == counts


def test_pictures_in_the_style_have_the_teachers_prompts_and_none_that_is_held_out(tmp_path: Path) -> None:
    write(tmp_path)
    data = read_dataset(str(tmp_path / "rows.jsonl"))
    assert len(data) == 504 and not {item.prompt for item in data} & {*HELD_OUT}


def test_the_table_has_a_row_for_each_folder_of_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name, drawn in (("teacher_in_40_steps", str), ("ours", at_night)):
        (folder := tmp_path / name).mkdir()
        for file, prompt in (files := {"0000.png": FIRST, "0001.png": SECOND}).items():
            to_pil(render(drawn(prompt))).save(folder / file)
        write_json(folder / "wandistiller_samples.json", files)
    judge([tmp_path / "teacher_in_40_steps", tmp_path / "ours"], tmp_path / "style.png", tmp_path / "ours")
    printed = capsys.readouterr().out
    assert "| teacher in 40 steps | 0 of 2 | 2 |" in printed
    assert "| ours | 2 of 2 | 2 | 0.0000 | 0.0000 |" in printed
    assert (tmp_path / "style.png").is_file()
