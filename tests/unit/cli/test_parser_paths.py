"""Odd text for every flag that names files or folders: one message and exit code 2."""

from pathlib import Path

import pytest

from wandistiller.cli import parser
from wandistiller.cli.main import main

ODD = ["", " ", "\n", "\t \n", "\udcff"]
NAMES = ["~nobody_here/x", "x" * 5000, "no/such.safetensors"]
"""For flags that read."""
NEEDED = {"export": "--checkpoint a --output b", "sample": "--prompts a --output b", "report": ""}
SAMPLE = {"--model": "tiny", "--prompts": "a", "--output": "made"}


def test_odd_text_for_any_flag_that_names_files_is_one_message(capsys: pytest.CaptureFixture) -> None:
    top = parser.parser()
    (commands,) = top._subparsers._group_actions
    tried, wrong = 0, {}
    for command, its in commands.choices.items():
        for action in its._actions:
            names_files = action.dest.endswith(parser.PATH_ENDS) or action.dest in parser.NAMES_FILES
            if not names_files or action.nargs == 0 or action.type is parser._json:  # --lora has settings
                continue
            for text in ODD:
                words = [*NEEDED.get(command, "").split(), *action.option_strings[:1], text]
                with pytest.raises(SystemExit) as end:
                    top.parse_args([command, *words])
                error, tried = capsys.readouterr().err, tried + 1
                if end.value.code != 2 or error.count("error: argument") != 1:
                    wrong[command, action.dest, text] = error
    assert tried > 200 and wrong == {}


@pytest.mark.usefixtures("one_rank", "quiet_logging")
@pytest.mark.parametrize("flag", ["--model", "--lora", "--image", "report"])
def test_a_name_of_nothing_is_one_message(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        words = [word for pair in (SAMPLE | {flag: name}).items() for word in pair]
        assert main(["report", name] if flag == "report" else ["sample", *words]) == 2
        error = capsys.readouterr().err
        assert error.count("error: ") == 1 and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
