"""Wrong inputs of `bad_inputs`: prompt files and paths."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bad_inputs import Case

LONG = "x" * 300
NO_PROMPT = 'no prompt. Write {"prompt": "...'
PROMPTS: list[tuple[str, str | bytes, str]] = [
    ("p.txt", "", ": no prompt in it. Write one prompt a line."),
    ("p.txt", "# none\n\n", ": no prompt in it. Write one prompt"),
    ("p.txt", " \n\t\n", ": no prompt in it. Write one prompt a line."),
    ("p.txt", "&nbsp;\n", ": no prompt in it. Write one prompt"),
    ("p.txt", bytes(100), ": no prompt in it. Write one prompt a line."),
    ("p.txt", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), ", line 1: not UTF-8: ...Save it as UTF-8."),
    ("p.txt", "café\n".encode("latin-1"), ", line 1: not UTF-8: ...Save it as UTF-8."),
    ("p.txt", "a red circle\n".encode("utf-16"), ", line 1: not UTF-8: ...Save it as UTF-8."),
    ("p.txt", b"a\nb\n\xff\n", ", line 3: not UTF-8: ...Save it as UTF-8."),
    ("p.txt", "red " * 2_500_000, ", line 1: over 65536 bytes. Write one prompt a line."),
    ("p.csv", "a red circle\n", ": not a .txt, .jsonl or folder. Write prompts into a .txt"),
    ("p.png", b"", ": not a .txt, .jsonl or folder. Write prompts into a .txt"),
    ("p.jsonl", "", ": no prompt in it. Write one prompt a line."),
    ("p.jsonl", "{\n", ", line 1: not valid JSON: ...Write one object a line."),
    ("p.jsonl", '{"prompt": "a"}\n[]\n', f", line 2: {NO_PROMPT}"),
    ("p.jsonl", "3\n", f", line 1: {NO_PROMPT}"),
    ("p.jsonl", '"a"\n', f", line 1: {NO_PROMPT}"),
    ("p.jsonl", '{"prompt": 5}\n', f", line 1: {NO_PROMPT}"),
    ("p.jsonl", '{"prompt": " "}\n', f", line 1: {NO_PROMPT}"),
    ("p.jsonl", '{"prompt": NaN}\n', f", line 1: {NO_PROMPT}"),
    ("p.jsonl", '{"image": "a.png"}\n', f", line 1: {NO_PROMPT}"),
    (
        "p.jsonl",
        '{"prompt": "a", "prompt": "b"}\n',
        ", line 1: not valid JSON: a key is given twice. Write one object a line.",
    ),
    (
        "p.jsonl",
        '{"prompt": "a", "id": ' + "9" * 5000 + "}\n",
        ", line 1: not valid JSON: ...Write one object a line.",
    ),
    ("p.jsonl", '{"prompt": ' + "[" * 50_000 + "\n", ", line 1: not valid JSON: ...Write one object a line."),
    (
        "p.jsonl",
        '{"prompt": "a", "imag": "x"}\n',
        ", line 1: unknown key `imag`. Known keys: prompt, image, video, id.",
    ),
    (
        "p.jsonl",
        '{"prompt": "a", "image": "a", "video": "b"}\n',
        ", line 1: give one file name, as image or as video.",
    ),
    ("p.jsonl", '{"prompt": "a", "image": ["a"]}\n', ", line 1: give one file name, as image or as video."),
    (
        "p.jsonl",
        '{"prompt": "a", "image": "no.png"}\n',
        ", line 1: no such file: {here}/no.png. Fix the name.",
    ),
    ("p.jsonl", '{"prompt": "a", "image": "."}\n', ", line 1: no such file: {here}. Fix the name."),
    ("p.jsonl", '{"prompt": "a", "image": "a\\u0000b"}\n', ", line 1: no such file: ...Fix the name."),
    (
        "p.jsonl",
        '{"prompt": "a", "image": "circle.png"}\n',
        ", line 1: no such file: {here}/circle.png. Fix the name.",
    ),
    ("p.jsonl", b'{"prompt": "\xe9"}\n', ", line 1: not UTF-8: ...Save it as UTF-8."),
    ("p.jsonl", "{\n" * 30, ": 10 more are wrong."),
]
FOLDERS: list[tuple[dict[str, Any], str]] = [
    ({"d/readme.md": "x"}, "{here}/d: no prompt in it. Write one prompt a line."),
    ({"d/a.png": b""}, "{here}/d/a.png: no prompt. Write it into a.txt beside it."),
    ({"d/a.png": b"", "d/a.txt": "\n"}, "{here}/d/a.png: no prompt. Write it into a.txt beside it."),
    ({"d/a.png": b"", "d/a.txt": b"\xff"}, "{here}/d/a.txt: not UTF-8: ...Save it as UTF-8."),
    ({"d/a.png": b"", "d/a.txt": "x" * 70_000}, "{here}/d/a.txt: over 65536 bytes. Write one prompt."),
    ({"d/b.txt": b"\xff"}, "{here}/d/b.txt, line 1: not UTF-8: ...Save it as UTF-8."),
]


def circle(file: Path, wan: Path) -> None:
    """A symbolic link to itself."""
    file.symlink_to(file)


def pipe(file: Path, wan: Path) -> None:
    os.mkfifo(file)


READ = {
    "student_config": "student.json",
    "deepspeed_config": "engine.json",
    "teacher_deepspeed_config": "placement.json",
}
NO_WAN = "Give a complete diffusers Wan pipeline folder, a hub id, or `tiny`."
NO_DATA = "no such file or folder. Give prompts (.txt, .jsonl), a folder of media, or `tiny`."


def of_paths() -> Iterator[Case]:
    for key in READ:
        for what, path, said, files in [
            (
                "circle",
                "{here}/loop",
                "its symbolic links lead in a circle. Name the file itself.",
                {"loop": circle},
            ),
            ("long name", "{here}/" + LONG, "is too long a name. Give a shorter path.", {}),
            ("long path", "{here}/" + "x/" * 3000, "is too long a name. Give a shorter path.", {}),
            ("folder", "{here}", "is a folder. Name a file.", {}),
            ("nothing", "{here}/no", "no such file. Fix the path.", {}),
            (
                "below a file",
                "{here}/prompts.txt/x",
                "no such file: a part of its path is not a folder. Fix the path.",
                {},
            ),
            ("no JSON", "{here}/prompts.txt", "not valid JSON: ...Fix that place", {}),
            (
                "a pipe",
                "{here}/pipe",
                "is not a regular file, which every rank can read. Name one.",
                {"pipe": pipe},
            ),
        ]:
            yield Case(f"{key}: {what}", (f"{path}: {said}",), files, {key: path})
    for key in ("output_dir", "cache_dir", "sample_dir"):
        for what, path, said, files in [
            ("circle", "{here}/loop", "{here}/loop is a file. Name a folder.", {"loop": circle}),
            ("long name", "{here}/" + LONG, "is too long a name. Give a shorter path.", {}),
            ("file", "{here}/prompts.txt", "{here}/prompts.txt is a file. Name a folder.", {}),
            ("below a file", "{here}/prompts.txt/a/b", "{here}/prompts.txt is a file. Name a folder.", {}),
        ]:
            yield Case(f"{key}: {what}", (f"`{key}` is {path}...{said}",), files, {key: path})
    for key, what, path, said, files in [
        ("data_path", "circle", "{here}/loop", NO_DATA, {"loop": circle}),
        ("data_path", "nothing", "{here}/no", NO_DATA, {}),
        ("data_path", "below a file", "{here}/prompts.txt/x", NO_DATA, {}),
        ("data_path", "a pipe", "{here}/p.txt", "not a ", {"p.txt": pipe}),
        ("data_path", "long name", "{here}/" + LONG, "is too long a name. Give a shorter path.", {}),
        ("teacher_path", "circle", "{here}/loop", NO_WAN, {"loop": circle}),
        ("teacher_path", "folder", "{here}", NO_WAN, {}),
        ("teacher_path", "file", "{here}/prompts.txt", NO_WAN, {}),
        ("teacher_path", "nothing", "{here}/a/b", NO_WAN, {}),
        ("teacher_path", "long name", "{here}/" + LONG, "is too long a name. Give a shorter path.", {}),
    ]:
        yield Case(f"{key}: {what}", (f"{path}: ...{said}",), files, {key: path})
    for what, path in (("nothing", "{here}/no"), ("folder", "{here}"), ("file", "{here}/prompts.txt")):
        said = f"--resume {path}: no checkpoint there. Name a folder checkpoints/step_..., auto or never."
        yield Case(f"resume: {what}", (said,), recipe={"resume": path})


def of_data() -> Iterator[Case]:
    for name, content, said in PROMPTS:
        yield Case(
            f"prompts: {name} {content[:30]!r}",
            (f"{{here}}/{name}{said}",),
            {name: content},
            {"data_path": f"{{here}}/{name}"},
        )
    for files, said in FOLDERS:
        yield Case(f"data folder: {sorted(files)} {said[-25:]}", (said,), files, {"data_path": "{here}/d"})
    media = {"d/a.png": b"", "d/a.txt": "a red circle"}
    yield Case(
        "an image for a video run",
        ("a.png is an image. Write 1, or give videos.",),
        media,
        {"data_path": "{here}/d", "num_frames": 5},
    )
    yield Case(
        "media for trajectory",
        ("a.png has none. Take the media out of the data, or trajectory",),
        media,
        {"data_path": "{here}/d", "objective": "trajectory"},
    )
