"""The settings of `wandistiller sample` where the command line leaves them out."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import write_json
from styles import style

from wandistiller.cli.parser import read
from wandistiller.cli.sample import read_sampling

MADE_FOR = {"height": 32, "width": 64, "num_frames": 5}


@pytest.mark.parametrize(
    ("facts", "words", "size"),
    [
        (MADE_FOR, "", (32, 64, 5)),
        (MADE_FOR, "--height 64 --width 32 --num_frames 1", (64, 32, 1)),
        ({}, "", None),
    ],
)
def test_a_student_is_drawn_in_the_size_of_its_training_and_another_pipeline_in_its_usual_one(
    wan1: Path,
    copy_of: Callable[..., Path],
    tmp_path: Path,
    facts: dict[str, int],
    words: str,
    size: tuple[int, int, int] | None,
) -> None:
    student = copy_of(wan1)
    write_json(student / "wandistiller.json", facts)
    given = ["sample", "--model", str(student), "--prompts", "a", "--output", str(tmp_path / "out")]
    model, _, settings, _ = read_sampling(read([*given, *words.split()])[1])
    usual = model.folder.usual
    found = settings.height, settings.width, settings.num_frames
    assert found == (size or (usual.height, usual.width, 1))


def test_clips_of_a_first_frame_have_the_least_number_of_frames_where_no_training_says_another(
    tmp_path: Path,
) -> None:
    given = "sample --model tiny-i2v --prompts tiny-i2v:held_out --output".split()
    assert read_sampling(read([*given, str(tmp_path / "o")])[1])[2].num_frames == 5


def test_a_lora_is_drawn_with_weights_in_the_format_of_its_run_where_they_can_have_it(
    wan1: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    facts = {"teacher_path": str(wan1), "bases": ["transformer"], "teacher_weights": "int8"}
    file = style(wan1, tmp_path / "lora.safetensors", "to_q", metadata={"wandistiller": json.dumps(facts)})
    given = ["sample", "--lora", str(file), "--prompts", "a", "--output", str(tmp_path / "out")]
    for words, weights in {
        "": "int8",
        "--teacher_deepspeed_config gpu": None,
        "--dtype float16": None,
    }.items():
        assert read_sampling(read([*given, *words.split()])[1])[3].weights == weights
