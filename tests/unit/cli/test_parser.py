"""The command line."""

import pytest

from wandistiller.cli.parser import parser


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "train --teacher_pat x",
            "unrecognized arguments: --teacher_pat x. Did you mean `--teacher_path`? See",
        ),
        ("plan --heigth 64", "unrecognized arguments: --heigth 64. Did you mean `--height`? See"),
        ("sample --model m --prompts a --output o --step 3", "--step 3. Did you mean `--steps`? See"),
    ],
)
def test_an_unknown_or_shortened_flag_is_refused_and_the_nearest_named(
    words: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(words.split())
    assert caught.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--local_rank=1 train", "train --local_rank 1", "train --local-rank=1"])
def test_a_launcher_s_local_rank_is_accepted_before_and_after_the_command(words: str) -> None:
    flags = vars(parser().parse_args(words.split()))
    assert flags.keys() == {"command", "ignored", "recipe"}
