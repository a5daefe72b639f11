"""Data that is indexed and read in place: folders, a million lines, what stands for it in a checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from wandistiller.data.dataset import MediaType, PromptDataset, PromptItem, read_dataset
from wandistiller.utils.errors import ConfigError


def items_of(file: Path, content: str) -> PromptDataset:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode())
    return read_dataset(str(file))


def image(file: Path, prompt: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), "red").save(file)
    file.with_suffix(".txt").write_text(prompt)
    return file


@pytest.mark.parametrize("start", ["", "\ufeff"], ids=["plain", "byte order mark"])
def test_lines_are_read_by_number_in_any_order(tmp_path: Path, start: str) -> None:
    prompts = ["a cat", "schön", "色", "🐈 cat", "b" * 5000, "dog"]
    items = items_of(tmp_path / "p.txt", start + "\r\n\n# no\n".join(prompts))
    assert [items[i].prompt for i in (3, 0, 5, 1, 4, 2)] == [prompts[i] for i in (3, 0, 5, 1, 4, 2)]
    assert len(items) == 6 and list(items) == [PromptItem(p) for p in prompts]


def test_a_txt_in_a_folder_that_belongs_to_no_medium_is_prompts_one_a_line(tmp_path: Path) -> None:
    picture = image(tmp_path / "a.png", "a picture\nof two lines")
    items_of(tmp_path / "b.txt", "one\ntwo\n")
    items_of(tmp_path / "more" / "a.txt", "three\n")
    whole = [PromptItem("a picture of two lines", picture), *map(PromptItem, ("one", "two", "three"))]
    assert list(read_dataset(str(tmp_path))) == whole
    assert read_dataset(str(tmp_path)).samples(per_prompt=3) == 1 + 3 * 3  # media once


def test_the_kind_of_each_item_is_known_without_reading_it(tmp_path: Path) -> None:
    lines = [{"prompt": "p"}] + [
        {"prompt": n, "image" if n[0] == "i" else "video": n} for n in ("i.PNG", "v.mp4", "v.gif")
    ]
    for line in lines[1:]:
        (tmp_path / line["prompt"]).touch()
    items = items_of(tmp_path / "p.jsonl", "\n".join(map(json.dumps, lines)))
    assert items.kinds.tolist() == [MediaType.PROMPT, MediaType.IMAGE, MediaType.VIDEO, MediaType.GIF]
    assert (
        items.first(MediaType.VIDEO, MediaType.GIF) == items[2]
        and read_dataset("tiny").first(MediaType.IMAGE) is None
    )


def test_of_many_wrong_lines_20_are_told_and_the_others_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        items_of(tmp_path / "p.jsonl", '{"prompt": "a"}\n' * 5 + "{\n" * 2000)
    assert len(caught.value.problems) == 21
    assert caught.value.problems[0].startswith(f"{tmp_path}/p.jsonl, line 6: not valid JSON")
    assert caught.value.problems[-1] == f"{tmp_path}/p.jsonl: 1980 more are wrong."


def test_a_line_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"a cat\nsch\xf6n\n")
    with pytest.raises(ConfigError, match="p.txt, line 2: not UTF-8"):
        read_dataset(str(tmp_path / "p.txt"))


def test_the_digest_is_of_what_is_said_and_not_of_how(tmp_path: Path) -> None:
    plain = items_of(tmp_path / "a.txt", "one\ntwo\n")
    assert items_of(tmp_path / "b.txt", "# list\r\none\r\n\r\n two\none").digest == plain.digest
    assert (
        items_of(tmp_path / "b.jsonl", '{"prompt": "one", "id": 1}\n{"prompt": "two"}').digest == plain.digest
    )
    others = {items_of(tmp_path / "c.txt", content).digest for content in ("one", "two\none", "one\ntwo!")}
    assert len(others | {plain.digest}) == 4


def test_the_digest_names_media_where_they_lie_in_the_data_and_not_what_is_in_them(tmp_path: Path) -> None:
    digests = []
    for folder, colour in (("here", "red"), ("there", "blue")):
        picture = image(tmp_path / folder / "in" / "a.png", "a")
        Image.new("RGB", (8, 8), colour).save(picture)  # a mended file does not keep a run from going on
        digests.append(read_dataset(str(tmp_path / folder)).digest)
    image(tmp_path / "there" / "in" / "b.png", "a")
    assert digests[0] == digests[1] != read_dataset(str(tmp_path / "there")).digest


MEASURE = """
import resource, sys
from wandistiller.data.dataset import read_dataset
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
items = read_dataset(sys.argv[1])
print(len(items), items[len(items) - 1].prompt, peak() - before, sep="|")
"""


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_200000_prompts_take_20_mib_at_most(tmp_path: Path, name: str) -> None:
    prompts = (
        f"A cinematic drone shot of a red fox running through deep snow at sunrise, take {i}"
        for i in range(200_000)
    )
    line = '{{"prompt": "{}"}}\n' if name == "p.jsonl" else "{}\n"
    (tmp_path / name).write_text("".join(line.format(p) for p in prompts))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / name)], capture_output=True, text=True
    )
    number, last, mib = done.stdout.split("|")
    assert number == "200000" and last.endswith("take 199999") and float(mib) < 20, done.stderr
