"""Wrong input of every kind: exit code 2, place and remedy named, nothing written; on 1 and 2 ranks."""

from pathlib import Path

import pytest
from ranks import call
from wrong_input.cases import (
    Case,
    faults,
    of_recipe_settings,
    of_recipes,
    of_texts,
    outcome,
    outcomes,
    silent_faults,
)
from wrong_input.files import of_data, of_paths
from wrong_input.jsons import of_commands, of_engines, of_settings
from wrong_input.weights import TRANSFORMER, linked, of_weights

SETTINGS = [*of_recipe_settings(), *of_settings()]
FILES = [*of_texts(), *of_recipes(), *of_engines(), *of_commands(), *of_data(), *of_paths(), *of_weights()]
CASES = [*SETTINGS, *FILES]
SAMPLE = [*SETTINGS[::4], *FILES[::16]]
"""The cases that the default suite takes, which are some of each table."""


def only_on_rank_1(file: Path, wan: Path) -> None:
    """Two teachers, `0` and `1`; the weights of the second are cut off."""
    linked(wan, file / "0", without=TRANSFORMER)
    cut = linked(wan, file / "1", without=TRANSFORMER)
    cut.write_bytes(cut.read_bytes()[:-8])


SEEN_BY_RANK_1 = [
    Case(
        "its student",
        ("{here}/1.json: `num_layers` is 9...Write at most that",),
        {"0.json": {}, "1.json": {"num_layers": 9}},
        flags=("--student_config", "{here}/{rank}.json"),
    ),
    Case(
        "its prompts",
        ("{here}/1.txt: no prompt in it. Write one prompt a line.",),
        {"0.txt": "a red circle", "1.txt": "#"},
        flags=("--data_path", "{here}/{rank}.txt"),
    ),
    Case(
        "its weights",
        ("{here}/t/1/transformer/...it is no whole safetensors file...Fetch this file again",),
        {"t": only_on_rank_1},
        flags=("--teacher_path", "{here}/t/{rank}"),
    ),
]


def parameter(case: Case) -> object:
    name = case.name[:60].encode("ascii", "backslashreplace").decode()
    return pytest.param(case, id=name, marks=() if case in SAMPLE else pytest.mark.slow)


@pytest.mark.usefixtures("one_rank", "quiet_logging")
@pytest.mark.parametrize("case", [parameter(case) for case in CASES])
def test_wrong_input_is_refused_with_its_place_and_remedy(case: Case, tmp_path: Path, wan2: Path) -> None:
    words = case.write(tmp_path / "case", wan2)
    result = outcome(words, tmp_path / "case")
    assert faults(case, result, tmp_path / "case", wan2) == [], result.printed


@pytest.mark.parametrize("every", [200, pytest.param(1, marks=pytest.mark.slow)])
def test_two_ranks_stop_together_and_only_rank_0_speaks(every: int, tmp_path: Path, wan2: Path) -> None:
    cases = [*CASES[::every], *SEEN_BY_RANK_1]
    folders = [tmp_path / str(i) for i in range(len(cases))]
    lines = [(here, case.write(here, wan2)) for case, here in zip(cases, folders, strict=True)]
    speaks, silent = call(outcomes, lines, ranks=2)
    wrong = {}
    for case, here, first, second in zip(cases, folders, speaks, silent, strict=True):
        printed = [f"rank 1 printed {second.printed}"] if second.errors else []
        wrong[case.name] = faults(case, first, here, wan2) + silent_faults(second) + printed
    assert {name: messages for name, messages in wrong.items() if messages} == {}
