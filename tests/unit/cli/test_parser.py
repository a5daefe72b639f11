"""The command line."""

import dataclasses
import re

import pytest

from wandistiller.cli.flags import RunFlags
from wandistiller.cli.parser import COMMANDS, UNLISTED, parser, read
from wandistiller.config.run_config import RunConfig


@pytest.mark.parametrize("words", ["--local_rank=1 train", "train --local_rank 1", "train --local-rank=1"])
def test_a_launcher_s_local_rank_is_accepted_before_and_after_the_command(words: str) -> None:
    assert read(words.split()) == ("train", RunFlags())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"file": "style.safetensors", "strength": 0.8}', {"file": "style.safetensors", "strength": 0.8}),
        ('["a.safetensors", {"file": "b.safetensors"}]', ["a.safetensors", {"file": "b.safetensors"}]),
        ("style.safetensors", "style.safetensors"),
    ],
)
def test_a_setting_with_several_forms_has_the_recipe_s_forms_as_a_flag(text: str, value: object) -> None:
    _, given = read(["train", "--teacher_lora", text, "--student_config", '{"num_layers": 2}'])
    assert given.settings == {"teacher_lora": value, "student_config": {"num_layers": 2}}


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        parser().parse_args([command, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_has_a_word_for_each_value_and_a_text_for_each_flag(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command, capsys)
    flags = re.findall(r"^  (--.*?)(?:  +|\n +)(\S.*)$", text, re.MULTILINE)
    assert not re.search(r"(?m)^  --\S+ [A-Z](?: |$)", text)
    assert all(re.match(r"[^-]", explanation) for _, explanation in flags)


def test_the_help_of_train_names_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_of("train", capsys).split())
    for f in dataclasses.fields(RunConfig):
        if f.default not in (None, "", False) or f.default is not False and f.default == 0:
            own = text.split(f"--{f.name} ")[1].split(" --")[0]
            known = "default" if f.name == "negative_prompt" else f"default {f.default}".removesuffix(".0")
            assert f.name in UNLISTED or known in own


def test_the_teacher_s_placement_takes_every_name_that_a_dry_run_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("replicated", "owner", "sharded", "host_cpu", "zero_inference_cpu", "zero_inference_nvme", "cpu")
    text = help_of("train", capsys)
    for name in names:
        _, given = read(["train", "--teacher_device_strategy", name])
        assert given.settings == {"teacher_deepspeed_config": name}
        assert re.search(rf" {name}[,;\n]", text)
