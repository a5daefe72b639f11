"""Prompts of a data set of the hub, which the library also reads from a folder OWNER/NAME here."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from reading import run_of

from wandistiller.config.validate import read_job
from wandistiller.data.dataset import read_dataset
from wandistiller.data.hub_prompts import fetch_prompts, prompts_file
from wandistiller.utils.errors import ConfigError

HUB_ID = "hub:own/set"
TEXTS = [f"a cat by lake {number}\nin two lines" for number in range(40)]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in the current folder: each text twice, a blank one, and another column."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "own" / "set"
    folder.mkdir(parents=True)
    entries = [{"id": number, "Caption": text} for number, text in enumerate([*TEXTS, " ", *TEXTS])]
    (folder / "train.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def prompts(file: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_the_seed_draws_different_prompts_and_a_resumed_run_finds_them_without_the_hub(
    rows: Path, tmp_path: Path
) -> None:
    ten = fetch_prompts(HUB_ID, None, 10, 0, tmp_path / "a")
    again, other = (fetch_prompts(HUB_ID, None, 10, seed, tmp_path / "b") for seed in (0, 1))
    assert len({*prompts(ten)} & {*TEXTS}) == len(prompts(ten)) == 10
    assert prompts(again) == prompts(ten) != prompts(other)
    assert sorted(prompts(fetch_prompts(HUB_ID, "Caption", 1000, 0, tmp_path))) == sorted(TEXTS)
    shutil.rmtree(rows)
    assert fetch_prompts(HUB_ID, None, 10, 0, tmp_path / "a") == ten
    assert len(read_dataset(str(ten))) == 10


@pytest.mark.slow
@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("source", "column", "message"),
    [
        (HUB_ID, "prompt", "hub:own/set: `hub_column` is prompt. Write one of: id, Caption."),
        (f"{HUB_ID}:large", None, "hub:own/set:large: BuilderConfig 'large' not found"),
    ],
)
def test_what_the_data_set_lacks_is_named(
    source: str, column: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch_prompts(source, column, 10, 0, tmp_path / "cache")
    assert message in str(caught.value) and not list((tmp_path / "cache").glob("*.jsonl"))


@pytest.mark.slow
def test_a_data_set_with_code_is_refused_and_its_code_is_not_run(rows: Path, tmp_path: Path) -> None:
    (rows / "set.py").write_text("raise SystemExit('run')")
    with pytest.raises(ConfigError, match="hub:own/set: Dataset scripts are no longer supported"):
        fetch_prompts(HUB_ID, None, 10, 0, tmp_path / "cache")


def test_the_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="hub:own/set: data sets of the hub need: pip install datasets"):
        fetch_prompts(HUB_ID, None, 10, 0, tmp_path)


def test_a_run_reads_the_prompts_that_are_in_its_cache(tmp_path: Path) -> None:
    file = prompts_file(HUB_ID, None, 3, 7, tmp_path / "cache")
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS[:3]))
    given = {"teacher_path": "tiny", "data_path": HUB_ID, "hub_count": 3, "seed": 7}
    job = read_job(run_of(given, {"output_dir": str(tmp_path)}), 1)
    assert [item.prompt for item in job.items] == [" ".join(text.split()) for text in TEXTS[:3]]
