"""Cases of wrong input: prompt files and paths."""

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from wrong_input.cases import Case, table

NO_OBJECT = ", line 1: not valid JSON: ...Write one object a line."
PROMPTS: list[tuple[str, str | bytes, str]] = [  # file, its content, its message
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
    ("p.csv", "a red circle\n", ", line 1: no column prompt, caption, text or description. Begin with"),
    ("p.CSV", 'id,prompt\n1,"a\n', ", line 2: not valid CSV: "),
    ("p.csv", 'prompt\na\n"' + "b\n" * 40_000, ", line 3: over 65536 bytes. Write one prompt a record"),
    ("p.csv", "caption,id\na,1\n,2\n", ", line 3: no prompt. Fill its column, or take the line out."),
    ("p.tsv", "file\tprompt\nnone.png\ta\n", ", line 2: no such file: "),
    ("p.csv", "", ", line 1: no column prompt"),
    ("p.csv", b"prompt\na\n\xff\n", ", line 3: not UTF-8: "),
    ("p.csv", "prompt\na red, round ball\n", ", line 2: 2 fields, but the header has 1. Put a text"),
    ("p.csv", "prompt,image,video\na,a,a\n", ", line 2: two media: `image` is a, `video` is a. Keep one"),
    ("p.csv", "prompt,image\na,https://e.org/a.png\n", ", line 2: https://e.org/a.png is an address. Fetch"),
    (
        "p.txt",
        "a ball\nin/a.mp4\nin/b.mp4",
        ", line 2: in/a.mp4 is the name of a file, where a prompt should be.",
    ),
    ("p.tsv", "prompt\tsrc\na\tclip.mp4\n", ", line 2: `src` names clip.mp4, which is there, but"),
    ("p.txt", "\u200b\n\u2060\u00ad\ufeff \n", ": no prompt in it."),
    ("p.jsonl", '{"prompt": "\u200b"}\n', ", line 1: no prompt."),
    ("p.pt", b"", ": not a .txt, .jsonl, .csv, .tsv or folder. Give a .txt with one prompt a line, a folder"),
    ("p.jsonl", "", ": no prompt in it. Write one prompt a line."),
    ("p.jsonl", '{"prompt": "a"}\n[]\n', ', line 2: no prompt. Write {"prompt": "...'),
    ("p.jsonl", '{"prompt": "a", "id": ' + "9" * 5000 + "}\n", NO_OBJECT),
    ("p.jsonl", '{"prompt": ' + "[" * 50_000 + "\n", NO_OBJECT),
    ("p.jsonl", b'{"prompt": "\xe9"}\n', ", line 1: not UTF-8: ...Save it as UTF-8."),
    ("p.jsonl", "{\n" * 30, ": 10 more are wrong."),
    *(("p.jsonl", f"{line}\n", f", line 1: {message}") for line, message in table("jsonl", str)),
]
TABLE = "file_name,text\na.png,a prompt\n"
FOLDERS: list[tuple[dict[str, Any], str]] = [
    ({"d/readme.md": "x"}, "{here}/d: no prompt in it. Write one prompt a line."),
    ({"d/a.png": b""}, "{here}/d/a.png: no prompt. Write it into a.txt beside it."),
    ({"d/a.png": b"", "d/a.txt": "\n"}, "{here}/d/a.png: no prompt. Write it into a.txt beside it."),
    ({"d/a.png": b"", "d/a.txt": b"\xff"}, "{here}/d/a.txt: not UTF-8: ...Save it as UTF-8."),
    ({"d/a.png": b"", "d/a.txt": "x" * 70_000}, "{here}/d/a.txt: over 65536 bytes. Write one prompt."),
    ({"d/a.png": b"", "d/a.txt": "\u200b"}, "{here}/d/a.png: no prompt. Write it into a.txt beside it."),
    ({"d/a.psd": b"", "d/a.txt": "red"}, "{here}/d/a.psd: has a prompt, but an ending that is not known"),
    ({"d/.hidden.txt": "red", "d/@eaDir/a.txt": "red"}, "{here}/d: no prompt in it. Write one prompt"),
    ({"d/a.png": b"", "d/metadata.csv": TABLE}, "no prompt...or give --data_path {here}/d/metadata.csv"),
    ({"d/metadata.csv": TABLE}, "no prompt in it...or give --data_path {here}/d/metadata.csv"),
    ({"d/b.txt": b"\xff"}, "{here}/d/b.txt, line 1: not UTF-8: ...Save it as UTF-8."),
]


def pipe(file: Path, wan: Path) -> None:
    os.mkfifo(file)


NO_WAN = "...Give a complete diffusers Wan folder, a JSON of ComfyUI files, a hub id, or `tiny`."
NO_DATA = "...no such file or folder. Give a .txt with one prompt a line, a folder of media, a .jsonl"
PATHS: dict[tuple[str, ...], list[tuple[str, str]]] = {  # keys of the recipe -> values and their messages
    ("student_config", "deepspeed_config", "teacher_deepspeed_config"): [
        ("{here}", "cannot be read: Is a directory."),
        ("{here}/no", "no such file. Fix the path."),
        ("{here}/prompts.txt/x", "cannot be read: Not a directory."),
        ("{here}/prompts.txt", "not valid JSON: ...Fix that place"),
        ("{here}/pipe.txt", "is not a regular file, which every rank can read. Name one."),
    ],
    ("output_dir", "cache_dir", "sample_dir"): [
        ("{here}/prompts.txt", "{here}/prompts.txt is a file. Name a folder."),
        ("{here}/prompts.txt/a/b", "{here}/prompts.txt is a file. Name a folder."),
    ],
    ("data_path",): [
        ("{here}/no", NO_DATA),
        ("{here}/prompts.txt/x", NO_DATA),
        ("{here}/pipe.txt", "...not a "),
    ],
    ("teacher_path",): [
        ("{here}", NO_WAN),
        ("{here}/prompts.txt", "is one file of a pipeline. Write a JSON that names all its files"),
        ("{here}/a/b", NO_WAN),
    ],
}


def of_paths() -> Iterator[Case]:
    for keys, rows in PATHS.items():
        for key, (path, message) in product(keys, rows):
            place = f"`{key}` is {path}..." if key.endswith("_dir") else f"{path}: "
            yield Case(f"{key}: {path}", (place + message,), {"pipe.txt": pipe}, {key: path})
    for path in ("{here}/no", "{here}", "{here}/prompts.txt"):
        message = f"--resume {path}: no checkpoint there. Name a folder checkpoints/step_..., auto or never."
        yield Case(f"resume: {path}", (message,), recipe={"resume": path})


def of_data() -> Iterator[Case]:
    for name, content, message in PROMPTS:
        here, title = f"{{here}}/{name}", f"prompts: {name} {content[:30]!r}"
        yield Case(title, (here + message,), {name: content, "clip.mp4": b""}, {"data_path": here})
    for files, message in FOLDERS:
        title = f"data folder: {sorted(files)} {message[-25:]}"
        yield Case(title, (message,), files, {"data_path": "{here}/d"})
    media = {"d/a.png": b"", "d/a.txt": "a red circle"}
    for more, message in (
        ({"num_frames": 5}, "a.png is an image. Write 1, or give videos."),
        ({"objective": "trajectory"}, "a.png has none. Take the media out of the data, or trajectory"),
    ):
        yield Case(f"media and {more}", (message,), media, {"data_path": "{here}/d"} | more)
