"""A student and a teacher that do not go together, or no longer, are told before weights are read."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from wandistiller.checkpoint.facts import Facts
from wandistiller.cli.evaluate import read_evaluation
from wandistiller.cli.parser import read
from wandistiller.utils.errors import ConfigError
from wandistiller.wan.pipeline import open_wan


@pytest.mark.parametrize(("student", "teacher"), [("tiny-i2v", "tiny-video"), ("tiny-video", "tiny-i2v")])
def test_a_student_that_takes_other_inputs_than_its_teacher_is_refused(student: str, teacher: str) -> None:
    words = [
        "evaluate",
        "--student_path",
        student,
        "--teacher_path",
        teacher,
        "--prompts",
        "tiny-i2v:held_out",
    ]
    with pytest.raises(ConfigError, match=f"^{student}: takes other inputs than {teacher}: `takes_image` is"):
        read_evaluation(read(words)[1], 1)


def test_a_teacher_whose_weights_have_changed_since_training_is_told(
    wan1: Path, copy_of: Callable[..., Path]
) -> None:
    wan = open_wan(str(copy_of(wan1, weights=True)))
    facts = Facts(teacher_path=wan.name, teacher_identity=wan.weights_identity)
    assert facts.changed_teacher(wan) == []
    file = wan.path / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)
    assert len(facts.changed_teacher(wan)) == 1 and Facts().changed_teacher(wan) == []
