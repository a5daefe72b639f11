"""Tables and folders as users have them: which files are media, which are none, and none lost in silence."""

import csv
import json
import os
import unicodedata
from pathlib import Path

import pytest

from wandistiller.data.dataset import PromptItem, read_dataset
from wandistiller.evaluation.candidates import read_items
from wandistiller.utils.errors import ConfigError


def table(file: Path, rows: list[dict[str, str]]) -> Path:
    """Write rows, whose keys are the columns, as the file's ending says."""
    if file.suffix == ".jsonl":
        file.write_text("\n".join(json.dumps(row) for row in rows))
        return file
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, dialect="excel" if file.suffix == ".csv" else "excel-tab")
        writer.writeheader()
        writer.writerows(rows)
    return file


def touched(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return [folder / name for name in names]


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl"])
@pytest.mark.parametrize("column", ["Video_Path", "file_name", "media_path", "path"])
def test_media_are_found_under_their_usual_names(tmp_path: Path, ending: str, column: str) -> None:
    (file,) = touched(tmp_path, "in/a.mp4")
    rows = [{"caption": "a", column: "in/a.mp4", "width": "8"}, {"caption": "b", column: "", "width": ""}]
    assert list(read_dataset(str(table(tmp_path / f"t{ending}", rows)))) == [
        PromptItem("a", file),
        PromptItem("b"),
    ]


def test_images_of_rows_and_of_a_flag_are_not_mixed(tmp_path: Path) -> None:
    first, other = touched(tmp_path, "a.png", "b.png")
    file = table(tmp_path / "t.jsonl", [{"prompt": "a", "image": "a.png"}])
    with pytest.raises(ConfigError, match=f"`image` is .*{file} has images of its own, such as {first}"):
        read_items([str(file)], [str(other)])


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl"])
def test_a_row_may_have_the_images_that_its_clip_begins_and_ends_with(tmp_path: Path, ending: str) -> None:
    first, last, *_ = touched(tmp_path, "a.png", "b.png", "c.mp4")
    rows = [{"prompt": "a", "image": "a.png", "last_image": name} for name in ("b.png", "a.png", "")]
    rows.append({"prompt": "a", "image": "c.mp4", "last_image": ""})
    data = read_dataset(str(table(tmp_path / f"t{ending}", rows)), first_frames=True)
    assert [item.images for item in data] == [[first, last], [first, first], [first], []]
    assert data.made.tolist() == [True, True, True, False]


def test_a_last_image_that_is_not_there_is_named(tmp_path: Path) -> None:
    touched(tmp_path, "a.png")
    file = table(tmp_path / "t.jsonl", [{"prompt": "a", "image": "a.png", "last_image": "d.png"}])
    with pytest.raises(ConfigError, match=f"line 1: no such file: {tmp_path}/d.png. Fix the name."):
        read_dataset(str(file), first_frames=True)


def test_a_video_beside_a_last_image_has_its_own_last_frame(tmp_path: Path) -> None:
    video, _ = touched(tmp_path, "c.mp4", "b.png")
    file = table(tmp_path / "t.jsonl", [{"prompt": "a", "image": "c.mp4", "last_image": "b.png"}])
    assert list(read_dataset(str(file), first_frames=True)) == [PromptItem("a", video)]


def test_images_of_the_ends_of_clips_may_be_given_with_prompts(tmp_path: Path) -> None:
    first, last, other = map(str, touched(tmp_path, "a.png", "b.png", "c.png"))
    items = read_items(["one", "two"], [first], [last, other])
    assert [list(map(str, item.images)) for item in items] == [[first, last], [first, other]]


def test_hidden_files_and_what_systems_leave_behind_are_no_data(tmp_path: Path) -> None:
    touched(tmp_path, "a.png", "._a.png", ".DS_Store", "THUMBS.DB", "Desktop.ini", "~$a.txt")
    left = [
        ".ipynb_checkpoints/a-checkpoint.txt",
        "@eaDir/a.png/b.jpg",
        "__MACOSX/c.txt",
        "._b.txt",
        ".trash/d.txt",
    ]
    for file in touched(tmp_path, *left):
        file.write_text("old")
    (tmp_path / "a.txt").write_text("new")
    assert list(read_dataset(str(tmp_path))) == [PromptItem("new", tmp_path / "a.png")]


def test_addresses_and_long_texts_that_end_like_files_are_texts(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "note": "y" * 5000 + ".mp4", "src": "https://example.org/b.mp4"}]
    assert len(read_dataset(str(table(tmp_path / "t.csv", rows)))) == 1


def test_a_thumbnail_beside_a_clip_is_left_out_of_a_run_of_videos_alone(tmp_path: Path) -> None:
    touched(tmp_path, "clip.mp4", "clip.jpg", "other.png")
    for name in ("clip.txt", "other.txt"):
        (tmp_path / name).write_text("a prompt")
    videos = read_dataset(str(tmp_path), thumbnails=False)
    assert [item.media.name for item in videos] == ["clip.mp4", "other.png"] and videos.thumbnails == 1
    assert len(read_dataset(str(tmp_path))) == 3


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_names_of_pairs_may_be_written_by_different_systems(tmp_path: Path, forms: tuple[str, str]) -> None:
    medium, other = (unicodedata.normalize(form, "é") for form in forms)
    (file,) = touched(tmp_path, f"{medium}.png")
    (tmp_path / f"{other}.txt").write_text("a prompt")
    assert list(read_dataset(str(tmp_path))) == [PromptItem("a prompt", file)]
    rows = table(tmp_path / "t.csv", [{"prompt": "a row", "image": f"{other}.png"}])
    assert list(read_dataset(str(rows))) == [PromptItem("a row", file)]


def made(kind: str, path: Path) -> None:
    """Make something that is no file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.parent / "nothing")


@pytest.mark.parametrize("kind", ["pipe", "device", "link to nothing", "folder"])
@pytest.mark.parametrize("name", ["b.txt", "b.mp4", "b.csv", "b.psd", "a.txt"])
def test_what_is_no_file_is_named_or_passed_over_and_never_waited_for(
    tmp_path: Path, kind: str, name: str
) -> None:
    touched(tmp_path / "d", "a.png")
    (tmp_path / "d" / "a.txt").write_text("a prompt")
    (tmp_path / "d" / name).unlink(missing_ok=True)
    made(kind, tmp_path / "d" / name)
    try:
        assert [item.media.name for item in read_dataset(str(tmp_path / "d"))] == ["a.png"]
    except ConfigError as error:
        assert f"{tmp_path}/d/{name.replace('a.txt', 'a.png')}: " in str(error)


def prompts_of(*words: str) -> list[str]:
    return [item.prompt for item in read_items([*words])]


def test_prompts_may_be_given_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    assert prompts_of(str(tmp_path)) == ["one", "two"]
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert prompts_of(f"~/{tmp_path.name}") == ["one", "two"]


def test_a_text_of_any_length_is_a_prompt_and_a_path_is_none() -> None:
    long = "a red circle, " * 400
    assert prompts_of(long) == [long]
    assert prompts_of("a dog and/or a cat") == ["a dog and/or a cat"]
    for path in ("nowhere/prompts", "prompts.txt", "/dev/zero"):
        with pytest.raises(ConfigError, match=path):
            read_items([path])


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    touched(tmp_path, "real/a.png", "data/x")
    (tmp_path / "real/a.txt").write_text("a prompt")
    for link in ("one", "two"):
        (tmp_path / "data" / link).symlink_to(tmp_path / "real")
    (tmp_path / "real/back").symlink_to(tmp_path / "data")
    (item,) = read_dataset(str(tmp_path / "data"))
    assert item == PromptItem("a prompt", tmp_path / "data/one/a.png")
