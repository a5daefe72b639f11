"""Where exports and runs write their students, and what is there before and after."""

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from ranks import write_json
from recipes import recipe
from safetensors.torch import load_file

from wandistiller.checkpoint.facts import Facts
from wandistiller.cli.main import main
from wandistiller.export.output import check_folder, replaced, write_file
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import digest

THIS_MACHINE = digest(os.uname().nodename)[:8]


def export(folder: Path, text: str) -> None:
    with replaced(check_folder(folder)) as new:
        (new / "wandistiller.json").write_text(text)


def test_an_export_to_a_symbolic_link_replaces_the_folder_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "large_disk").mkdir()
    (link := tmp_path / "student").symlink_to("large_disk")
    for text in ("1", "2"):
        export(link, text)
    assert link.is_symlink() and (tmp_path / "large_disk" / "wandistiller.json").read_text() == "2"
    assert sorted(os.listdir(tmp_path)) == ["large_disk", "student"]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()], ids=["full", "stopped"])
def test_an_export_that_fails_leaves_the_earlier_one_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    export(tmp_path / "student", "1")
    with pytest.raises(type(error)), replaced(tmp_path / "student") as new:
        (new / "half").write_text("half")
        raise error
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()] == [
        "student/wandistiller.json"
    ]


@pytest.mark.parametrize("name", [".", "../here"])
def test_the_current_folder_is_not_replaced(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="is the current folder"):
        check_folder(Path(name))


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system there")
def test_a_disk_is_not_replaced() -> None:
    with pytest.raises(ConfigError, match="Name a folder in it"):
        check_folder(Path("/dev/shm"))


@pytest.mark.parametrize("adapter", [[], ["--adapter"]], ids=["pipeline", "lora"])
def test_a_folder_gets_no_name_of_a_file_of_weights(
    finished: Path, tmp_path: Path, adapter: list[str], capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "mine.safetensors"
    assert main(["export", "--checkpoint", str(finished), "--output", str(file), *adapter]) == 2
    assert "give --format original" in capsys.readouterr().err and not file.exists()


def files_of(folder: Path, number: float, error: Exception | None = None) -> None:
    """Write the files of two experts, of which an error may be raised before the second."""
    with ExitStack() as together:
        for expert in ("high", "low"):
            if error and expert == "low":
                raise error
            tensors = {"w": torch.tensor([number])}
            write_file(folder / f"{expert}.safetensors", tensors, "Wan", "a student", Facts(), together)


def test_files_of_two_experts_are_of_one_export_whenever_it_fails(tmp_path: Path) -> None:
    files_of(tmp_path, 1.0)
    with pytest.raises(OSError, match="full"):
        files_of(tmp_path, 2.0, OSError("full"))
    found = {file.name: load_file(file)["w"].item() for file in tmp_path.iterdir()}
    assert found == {"high.safetensors": 1.0, "low.safetensors": 1.0}


def test_what_a_killed_export_left_of_a_file_goes_when_it_is_written_again(tmp_path: Path) -> None:
    (ended := subprocess.Popen(["true"])).wait()
    halves = {
        name: tmp_path / f".{name}.safetensors.{THIS_MACHINE}.{ended.pid}.tmp" for name in ("high", "other")
    }
    for half in halves.values():
        half.write_text("half")
    files_of(tmp_path, 1.0)
    assert not halves["high"].exists() and halves["other"].exists()


@pytest.mark.parametrize(
    ("place", "more"),
    [
        ("student/notes.txt", {}),
        ("lora.safetensors", {"student_config": {}, "lora": {"rank": 2}}),
        ("lora.card/notes.txt", {"student_config": {}, "lora": {"rank": 2}}),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["", "dry"])
def test_what_lies_where_a_run_would_end_is_named_before_it_begins(
    wan1: Path,
    tmp_path: Path,
    place: str,
    more: dict[str, object],
    dry: list[str],
    capsys: pytest.CaptureFixture,
) -> None:
    output = tmp_path / "run"
    (output / place).parent.mkdir(parents=True)
    (output / place).write_text("mine")
    file = write_json(tmp_path / "recipe.json", recipe(tmp_path, wan1, output_dir=str(output)) | more)
    assert main(["train", "--recipe", str(file), *dry]) == 2
    text = capsys.readouterr().err
    assert f"the output {output / place.split('/')[0]}: is " in text and "Move" in text
    assert [path.name for path in output.iterdir()] == [place.split("/")[0]]
