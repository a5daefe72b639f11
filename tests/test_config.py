"""Recipes and flags: what is merged, what is refused, and that everything wrong is said at once."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from wandistiller.config import RunConfig, as_dict, read_json, shipped
from wandistiller.problems import ConfigError, unknown_keys
from wandistiller.shorthands import read_run

PATHS = {"teacher_path": "t", "data_path": "d", "output_dir": "o"}


def recipe(folder: Path, **values: Any) -> str:
    file = folder / "recipe.json"
    file.write_text(json.dumps(PATHS | values), encoding="utf-8")
    return str(file)


def problems(folder: Path, flags: dict[str, Any] | None = None, **values: Any) -> list[str]:
    """What is wrong with a recipe and flags; fails if nothing is."""
    with pytest.raises(ConfigError) as caught:
        read_run(recipe(folder, **values), flags or {})
    return caught.value.problems


def test_a_flag_wins_over_the_recipe(tmp_path: Path) -> None:
    config = read_run(recipe(tmp_path, seed=1, height=64), {"seed": 2})
    assert (config.seed, config.height) == (2, 64)


def test_a_flag_that_equals_the_default_wins_too(tmp_path: Path) -> None:
    assert read_run(recipe(tmp_path, seed=1), {"seed": 0}).seed == 0


def test_flags_alone_make_a_run() -> None:
    assert read_run(None, dict(PATHS)).teacher_path == "t"


def test_what_is_given_nowhere_has_its_default(tmp_path: Path) -> None:
    assert read_run(recipe(tmp_path), {}) == RunConfig(**PATHS)


def test_an_unknown_recipe_key_names_the_nearest_right_one(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, max_step=5)
    assert problem == f"{tmp_path}/recipe.json: `max_step` is 5. There is no such key. Did you mean `max_steps`?"


def test_a_key_like_no_other_gets_the_list_of_keys() -> None:
    (problem,) = unknown_keys("x.json", {"qqqqqq": 1}, ["lr", "betas"])
    assert problem == "x.json: `qqqqqq` is 1. There is no such key. Known keys: betas, lr."


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", "0"), ("seed", 1.5), ("seed", True), ("seed", None), ("height", "480"), ("shift", "3"), ("dry_run", 1),
     ("rollout_path", "yes"), ("teacher_path", 5), ("sample_prompts", "a"), ("sample_prompts", ["a", 1]),
     ("student_config", ["a"]), ("max_steps", 10.0)],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    (problem,) = problems(tmp_path, **{key: value})
    assert problem.startswith(f"{tmp_path}/recipe.json: `{key}` is {json.dumps(value)}. Write a value of type ")


@pytest.mark.parametrize(
    ("key", "value"),
    [("guidance_scale", 4), ("shift", 5.0), ("height", None), ("student_config", {"init": "random"}),
     ("objective", {"name": "velocity"}), ("sample_prompts", ["a"]), ("sample_prompts", None)],
)  # fmt: skip
def test_a_value_of_the_right_type_is_kept(tmp_path: Path, key: str, value: Any) -> None:
    assert getattr(read_run(recipe(tmp_path, **{key: value}), {}), key) == value


@pytest.mark.parametrize("key", ["max_steps", "height", "num_frames", "shift", "save_every", "expert_blocks"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_number_that_must_be_positive_is_refused(tmp_path: Path, key: str, value: int) -> None:
    (problem,) = problems(tmp_path, **{key: value})
    assert f"`{key}` is {value}. Write a positive number." in problem


@pytest.mark.parametrize("key", PATHS)
def test_a_missing_path_names_its_flag(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(None, {k: v for k, v in PATHS.items() if k != key})
    assert caught.value.problems == [f"command line: `{key}` is missing. Give --{key} or the recipe key."]


def test_max_steps_and_num_epochs_exclude_each_other(tmp_path: Path) -> None:
    assert "are both given" in problems(tmp_path, max_steps=1, num_epochs=1)[0]
    assert "are both given" in problems(tmp_path, {"max_steps": 1, "num_epochs": 1})[0]


def test_the_flag_max_steps_replaces_the_recipe_s_num_epochs(tmp_path: Path) -> None:
    config = read_run(recipe(tmp_path, num_epochs=2), {"max_steps": 5})
    assert (config.max_steps, config.num_epochs) == (5, None)


def test_the_flag_num_epochs_replaces_the_recipe_s_max_steps(tmp_path: Path) -> None:
    config = read_run(recipe(tmp_path, max_steps=5), {"num_epochs": 2})
    assert (config.max_steps, config.num_epochs) == (None, 2)


def test_all_wrong_values_are_reported_at_once(tmp_path: Path) -> None:
    assert len(problems(tmp_path, height=-1, width=0, log_level="loud")) == 3


def test_all_unknown_keys_and_wrong_types_are_reported_at_once(tmp_path: Path) -> None:
    assert len(problems(tmp_path, heigth=1, wdith=1, seed="0", shift="3")) == 4


def test_unknown_keys_wrong_types_and_wrong_values_are_reported_at_once(tmp_path: Path) -> None:
    found = "\n".join(problems(tmp_path, heigth=1, seed="0", save_every=0))
    assert "`heigth`" in found and "`seed`" in found and "`save_every`" in found


def test_a_wrong_flag_is_not_blamed_on_the_recipe(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, {"height": -1})
    assert "recipe.json" not in problem


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not valid JSON"), ("", "not valid JSON"), ("{'a': 1}", "not valid JSON"), ("[1]", "holds a list"),
     ('{"seed": 1, "seed": 2}', "`seed` is given twice"), ('{"a": {"b": 1, "b": 1}}', "`b` is given twice")],
)  # fmt: skip
def test_broken_json_names_the_file_and_the_fault(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_json(file)
    assert str(caught.value).startswith(f"{file}: ")


def test_json_that_is_no_utf_8_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_json(tmp_path / "a.json")


def test_json_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_json(tmp_path / "a.json") == {"a": 1}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.json: no such file"):
        read_json(tmp_path / "none.json")


def test_a_shipped_config_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped("ds_configs/student/zero2_offload.json").is_file()


def test_a_config_of_the_current_folder_wins_over_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = Path("ds_configs/student/zero2_offload.json")
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    assert read_json(str(own)) == {}


@pytest.mark.parametrize("name", [f.name for f in fields(RunConfig) if str(f.default).startswith("ds_configs/")])
def test_a_default_file_is_shipped(name: str) -> None:
    default = next(f.default for f in fields(RunConfig) if f.name == name)
    assert shipped(str(default)).is_file()


def test_a_config_written_out_and_read_again_is_equal(tmp_path: Path) -> None:
    config = RunConfig(
        **PATHS, seed=3, guidance_scale=2.5, sample_prompts=["a", "色"], student_config={"init": "random"}
    )
    assert read_run(recipe(tmp_path, **as_dict(config)), {}) == config
