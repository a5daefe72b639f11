"""Data that is indexed and read in place: folders, a million lines, what stands for it in a checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from slow_cases import slow_but

from wandistiller.data.dataset import MediaType, PromptDataset, PromptItem, read_dataset


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
def test_lines_are_read_by_number_in_any_order_each_prompt_once(tmp_path: Path, start: str) -> None:
    prompts = ["a cat", "schön", "色", "🐈 cat", "b" * 5000, "dog # 1"]
    items = items_of(tmp_path / "p.txt", start + "\r\n\n   \n  # no\n&nbsp;\n a cat \n".join(prompts))
    assert [items[i].prompt for i in (3, 0, 5, 1, 4, 2)] == [prompts[i] for i in (3, 0, 5, 1, 4, 2)]
    assert len(items) == 6 and list(items) == [PromptItem(p) for p in prompts]


def test_a_folder_has_media_with_the_text_beside_them_and_other_txt_files_of_one_prompt_a_line(
    tmp_path: Path,
) -> None:
    picture = image(tmp_path / "a.png", "a picture\nof two lines")
    items_of(tmp_path / "b.txt", "one\ntwo\n")
    items_of(tmp_path / "more" / "a.txt", "three\n")
    photo = image(tmp_path / "more" / "b.JPG", "a photo\n")
    (tmp_path / "notes.md").write_text("no medium")
    items = read_dataset(str(tmp_path))
    prompts = [PromptItem(p) for p in ("one", "two", "three")]
    assert list(items) == [
        PromptItem("a picture of two lines", picture),
        *prompts,
        PromptItem("a photo", photo),
    ]
    assert items.samples(per_prompt=3) == 2 + 3 * 3  # media once


def test_json_lines_have_prompts_and_media_relative_to_the_file_of_types_known_without_reading_them(
    tmp_path: Path,
) -> None:
    names = ("in/i.PNG", "v.mp4", "v.gif")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    lines = [{"prompt": " a\u2028cat ", "id": 7}]  # within JSON, U+2028 ends no line
    lines += [{"prompt": n, "image" if n.endswith("PNG") else "video": n} for n in names]
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    items = items_of(tmp_path / "p.jsonl", text)
    assert list(items) == [PromptItem("a cat"), *(PromptItem(n, tmp_path / n) for n in names)]
    assert items.kinds.tolist() == [MediaType.PROMPT, MediaType.IMAGE, *[MediaType.VIDEO] * 2]
    assert items.first(MediaType.VIDEO) == items[2]
    assert read_dataset("tiny").first(MediaType.IMAGE) is None


def test_the_digest_depends_on_the_prompts_and_not_on_their_format(tmp_path: Path) -> None:
    plain = items_of(tmp_path / "a.txt", "one\ntwo\n")
    assert items_of(tmp_path / "b.txt", "# list\r\none\r\n\r\n two\none").digest == plain.digest
    assert (
        items_of(tmp_path / "b.jsonl", '{"prompt": "one", "id": 1}\n{"prompt": "two"}').digest == plain.digest
    )
    others = {items_of(tmp_path / "c.txt", content).digest for content in ("one", "two\none", "one\ntwo!")}
    assert len(others | {plain.digest}) == 4


def test_the_digest_depends_on_the_paths_of_media_in_the_data_and_not_on_their_content(
    tmp_path: Path,
) -> None:
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


@pytest.mark.parametrize("name", slow_but([], ["p.txt", "p.jsonl"]))
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


@pytest.mark.parametrize("name", ["p.csv", "p.TSV"])
@pytest.mark.parametrize("mark", [",", ";", "\t", "\ufeff,"])
def test_a_table_with_a_header_gives_prompts_of_several_lines_and_media_by_number(
    tmp_path: Path, name: str, mark: str
) -> None:
    picture = image(tmp_path / "a b.png", "not this one")
    rows = ["id|Caption|file", '1|"a ""red"" cat, 色\r\nand a dog"|a b.png', "", "2|two|", "3|three"]
    items = items_of(tmp_path / name, mark[:-1] + "\r\n".join(rows).replace("|", mark[-1]))
    first = PromptItem('a "red" cat, 色 and a dog', picture)
    assert [items[i] for i in (2, 1, 0)] == [PromptItem("three"), PromptItem("two"), first]


def test_duplicates_are_counted(tmp_path: Path) -> None:
    assert items_of(tmp_path / "p.txt", "a\nb\na\na\n").duplicates == 2


def test_the_caption_of_a_file_whose_ending_is_not_known_is_no_list_of_prompts(tmp_path: Path) -> None:
    for name in ("a.psd", "b.svg", "c.md", "d.CR2"):
        (tmp_path / name).touch()
        (tmp_path / name).with_suffix(".txt").write_text(f"one {name}\ntwo {name}")
    items = read_dataset(str(tmp_path))
    assert [item.prompt for item in items] == ["one c.md", "two c.md"]
    assert [path.name for path in items.unknown] == ["a.psd", "b.svg", "d.CR2"]
