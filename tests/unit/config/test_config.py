"""Recipes and flags: what is merged and what is refused, with all problems at once."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ranks import write_json
from reading import read_run

from wandistiller.config.run_config import JSON_FILES, RunConfig
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json, shipped

PATHS = {"teacher_path": "t", "data_path": "d", "output_dir": "o"}


def recipe(folder: Path, **values: Any) -> str:
    return str(write_json(folder / "recipe.json", PATHS | values))


def problems(folder: Path, flags: dict[str, Any] | None = None, **values: Any) -> list[str]:
    """Problems of a recipe and flags; fails if there are none."""
    with pytest.raises(ConfigError) as caught:
        read_run(recipe(folder, **values), flags or {})
    return caught.value.problems


@pytest.mark.parametrize(
    ("values", "flags", "expected"),
    [
        ({"seed": 1, "height": 64}, {"seed": 2}, {"seed": 2, "height": 64}),
        ({"seed": 1}, {"seed": 0}, {"seed": 0}),  # a flag that equals the default wins too
        ({}, {}, {}),
        ({"num_epochs": 2}, {"max_steps": 5}, {"max_steps": 5, "num_epochs": None}),
        ({"max_steps": 5}, {"num_epochs": 2}, {"max_steps": None, "num_epochs": 2}),
    ],
)
def test_a_flag_wins_over_the_recipe_and_the_recipe_over_the_default(
    tmp_path: Path, values: dict[str, Any], flags: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert read_run(recipe(tmp_path, **values), flags) == RunConfig(**PATHS, **expected)


def test_flags_alone_make_a_run() -> None:
    assert read_run(None, dict(PATHS)) == RunConfig(**PATHS)


@pytest.mark.parametrize("key", PATHS)
def test_a_missing_path_names_its_flag(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(None, {k: v for k, v in PATHS.items() if k != key})
    assert caught.value.problems == [f"command line: `{key}` is missing. Give --{key} or the recipe key."]


def test_unknown_keys_wrong_types_and_wrong_values_are_reported_at_once(tmp_path: Path) -> None:
    texts = problems(tmp_path, heigth=1, seed="0", save_every=0, log_level="loud", max_steps=1, num_epochs=1)
    assert [text.split("`")[1] for text in texts] == "heigth seed save_every log_level max_steps".split()


def test_a_wrong_flag_is_not_blamed_on_the_recipe(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, {"height": -1})
    assert "recipe.json" not in problem


def test_a_config_of_the_current_folder_wins_over_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = Path("ds_configs/student/zero2_offload.json")
    assert shipped(str(own)).is_file() and not own.exists()
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    assert read_json(str(own)) == {}


@pytest.mark.parametrize("name", [key for key in JSON_FILES if getattr(RunConfig(), key)])
def test_a_default_file_is_shipped(name: str) -> None:
    assert shipped(getattr(RunConfig(), name)).is_file()


def test_a_config_written_out_and_read_again_is_equal(tmp_path: Path) -> None:
    objects = {"student_config": {"init": "random"}, "objective": {"name": "velocity"}}
    config = RunConfig(**PATHS, **objects, seed=3, guidance_scale=4, shift=2.5, sample_prompts=["a", "色"])
    assert read_run(recipe(tmp_path, **asdict(config)), {}) == config
