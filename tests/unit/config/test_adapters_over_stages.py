"""Adapters over the stages of a recipe: trained further where both have the same settings."""

from pathlib import Path
from typing import Any

import pytest
from recipes import recipe

from wandistiller.config.stages import read_jobs, runs_of
from wandistiller.utils.errors import ConfigError


def bases(folder: Path, wan: Path, *settings: dict[str, Any]) -> list[int]:
    """The number of networks in each stage that are the teacher's but for their adapters."""
    given = recipe(folder, wan, output_dir=str(folder / "out"), student_config={"experts": "two"})
    given["stages"] = [{"name": f"s{number}", "lora": lora} for number, lora in enumerate(settings)]
    return [len(job.bases) for job in read_jobs(runs_of(given, {}, "r.json", 1), 1, here=False)]


@pytest.mark.parametrize(
    "second",
    [
        {"rank": 8, "alpha": 8},
        {"rank": 8, "ranks": {}},
        {"rank": 8, "targets": ["to_q", "to_k", "to_v", "to_out"]},
    ],
    ids=["alpha", "no ranks", "targets"],
)
def test_settings_that_say_the_defaults_are_those_of_the_stage_before(
    second: dict[str, Any], tmp_path: Path, wan2: Path
) -> None:
    assert bases(tmp_path, wan2, {"rank": 8}, second) == [2, 2]


def test_adapters_of_another_rank_are_refused_with_what_they_would_cost(tmp_path: Path, wan2: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        bases(tmp_path, wan2, {"rank": 8}, {"rank": 4})
    assert raised.value.problems == [
        f"stage s1: recipe: `lora` has another rank than the run {tmp_path / 'out' / '1_s0'}, whose "
        "adapters it begins with: they would be merged, and each role need a copy of the whole network. "
        'Write that run\'s {"rank": 8}, or begin anew with its exported file as `lora.start`.'
    ]


def test_a_misspelt_key_in_a_later_stage_is_named(tmp_path: Path, wan2: Path) -> None:
    with pytest.raises(ConfigError, match="stage s1: recipe: `lora.rnk` is 4. Unknown key"):
        bases(tmp_path, wan2, {"rank": 8}, {"rnk": 4})
