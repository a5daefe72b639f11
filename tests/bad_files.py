# ruff: noqa: E501 (a case a line)
"""Wrong inputs of `bad_inputs`: prompt files, paths, safetensors and the other files of a pipeline."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bad_inputs import Case
from safetensors.torch import load_file, save_file

LONG = "x" * 300
NO_PROMPT = 'no prompt. Write {"prompt": "...'
PROMPTS: list[tuple[str, str | bytes, str]] = [
    ("p.txt", "", ": no prompt in it. Write one prompt a line."), ("p.txt", "# none\n\n", ": no prompt in it. Write one prompt"),
    ("p.txt", " \n\t\n", ": no prompt in it. Write one prompt a line."), ("p.txt", "&nbsp;\n", ": no prompt in it. Write one prompt"),
    ("p.txt", bytes(100), ": no prompt in it. Write one prompt a line."),
    ("p.txt", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), ", line 1: not UTF-8: ...Save it as UTF-8."),
    ("p.txt", "café\n".encode("latin-1"), ", line 1: not UTF-8: ...Save it as UTF-8."),
    ("p.txt", "a red circle\n".encode("utf-16"), ", line 1: not UTF-8: ...Save it as UTF-8."),
    ("p.txt", b"a\nb\n\xff\n", ", line 3: not UTF-8: ...Save it as UTF-8."),
    ("p.txt", "red " * 2_500_000, ", line 1: over 65536 bytes. Write one prompt a line."),
    ("p.csv", "a red circle\n", ": is no .txt, .jsonl or folder. Write prompts into a .txt"),
    ("p.png", b"", ": is no .txt, .jsonl or folder. Write prompts into a .txt"),
    ("p.jsonl", "", ": no prompt in it. Write one prompt a line."),
    ("p.jsonl", "{\n", ", line 1: not valid JSON: ...Write one object a line."),
    ("p.jsonl", '{"prompt": "a"}\n[]\n', f", line 2: {NO_PROMPT}"), ("p.jsonl", "3\n", f", line 1: {NO_PROMPT}"),
    ("p.jsonl", '"a"\n', f", line 1: {NO_PROMPT}"), ("p.jsonl", '{"prompt": 5}\n', f", line 1: {NO_PROMPT}"),
    ("p.jsonl", '{"prompt": " "}\n', f", line 1: {NO_PROMPT}"), ("p.jsonl", '{"prompt": NaN}\n', f", line 1: {NO_PROMPT}"),
    ("p.jsonl", '{"image": "a.png"}\n', f", line 1: {NO_PROMPT}"),
    ("p.jsonl", '{"prompt": "a", "prompt": "b"}\n', ", line 1: not valid JSON: a key is given twice. Write one object a line."),
    ("p.jsonl", '{"prompt": "a", "id": ' + "9" * 5000 + "}\n", ", line 1: not valid JSON: ...Write one object a line."),
    ("p.jsonl", '{"prompt": ' + "[" * 50_000 + "\n", ", line 1: not valid JSON: ...Write one object a line."),
    ("p.jsonl", '{"prompt": "a", "imag": "x"}\n', ", line 1: `imag` is no key. Known keys: prompt, image, video, id."),
    ("p.jsonl", '{"prompt": "a", "image": "a", "video": "b"}\n', ", line 1: give one file name, as image or as video."),
    ("p.jsonl", '{"prompt": "a", "image": ["a"]}\n', ", line 1: give one file name, as image or as video."),
    ("p.jsonl", '{"prompt": "a", "image": "no.png"}\n', ", line 1: no such file: {here}/no.png. Mend the name."),
    ("p.jsonl", '{"prompt": "a", "image": "."}\n', ", line 1: no such file: {here}. Mend the name."),
    ("p.jsonl", '{"prompt": "a", "image": "a\\u0000b"}\n', ", line 1: no such file: ...Mend the name."),
    ("p.jsonl", '{"prompt": "a", "image": "circle.png"}\n', ", line 1: no such file: {here}/circle.png. Mend the name."),
    ("p.jsonl", b'{"prompt": "\xe9"}\n', ", line 1: not UTF-8: ...Save it as UTF-8."),
    ("p.jsonl", "{\n" * 30, ": 10 more are wrong."),
]  # fmt: skip
FOLDERS: list[tuple[dict[str, Any], str]] = [
    ({"d/readme.md": "x"}, "{here}/d: no prompt in it. Write one prompt a line."),
    ({"d/a.png": b""}, "{here}/d/a.png: no prompt. Write it into a.txt beside it."),
    ({"d/a.png": b"", "d/a.txt": "\n"}, "{here}/d/a.png: no prompt. Write it into a.txt beside it."),
    ({"d/a.png": b"", "d/a.txt": b"\xff"}, "{here}/d/a.txt: not UTF-8: ...Save it as UTF-8."),
    ({"d/a.png": b"", "d/a.txt": "x" * 70_000}, "{here}/d/a.txt: over 65536 bytes. Write one prompt."),
    ({"d/b.txt": b"\xff"}, "{here}/d/b.txt, line 1: not UTF-8: ...Save it as UTF-8."),
]  # fmt: skip


def circle(file: Path, wan: Path) -> None:
    """A symbolic link to itself."""
    file.symlink_to(file)


def pipe(file: Path, wan: Path) -> None:
    os.mkfifo(file)


READ = {"student_config": "student.json", "deepspeed_config": "engine.json", "teacher_deepspeed_config": "placement.json"}
NO_WAN = "Give a complete diffusers Wan pipeline folder, a hub id, or `tiny`."
NO_DATA = "no such file or folder. Give prompts (.txt, .jsonl), a folder of media, or `tiny`."


def of_paths() -> Iterator[Case]:
    for key in READ:
        for what, path, said, files in [
            ("circle", "{here}/loop", "its symbolic links lead in a circle. Name the file itself.", {"loop": circle}),
            ("long name", "{here}/" + LONG, "is too long a name. Give a shorter path.", {}),
            ("long path", "{here}/" + "x/" * 3000, "is too long a name. Give a shorter path.", {}),
            ("folder", "{here}", "is a folder. Name a file.", {}), ("nothing", "{here}/no", "no such file. Mend the path.", {}),
            ("below a file", "{here}/prompts.txt/x", "no such file: a part of its path is no folder. Mend the path.", {}),
            ("no JSON", "{here}/prompts.txt", "not valid JSON: ...Mend that place", {}),
            ("a pipe", "{here}/pipe", "is no plain file, which every rank could read. Name one.", {"pipe": pipe}),
        ]:  # fmt: skip
            yield Case(f"{key}: {what}", (f"{path}: {said}",), files, {key: path})
    for key in ("output_dir", "cache_dir", "sample_dir"):
        for what, path, said, files in [
            ("circle", "{here}/loop", "{here}/loop is a file. Name a folder.", {"loop": circle}),
            ("long name", "{here}/" + LONG, "is too long a name. Give a shorter path.", {}),
            ("file", "{here}/prompts.txt", "{here}/prompts.txt is a file. Name a folder.", {}),
            ("below a file", "{here}/prompts.txt/a/b", "{here}/prompts.txt is a file. Name a folder.", {}),
        ]:  # fmt: skip
            yield Case(f"{key}: {what}", (f"`{key}` is {path}...{said}",), files, {key: path})
    for key, what, path, said, files in [
        ("data_path", "circle", "{here}/loop", NO_DATA, {"loop": circle}), ("data_path", "nothing", "{here}/no", NO_DATA, {}),
        ("data_path", "below a file", "{here}/prompts.txt/x", NO_DATA, {}), ("data_path", "a pipe", "{here}/p.txt", "is no ", {"p.txt": pipe}),
        ("data_path", "long name", "{here}/" + LONG, "is too long a name. Give a shorter path.", {}),
        ("teacher_path", "circle", "{here}/loop", NO_WAN, {"loop": circle}), ("teacher_path", "folder", "{here}", NO_WAN, {}),
        ("teacher_path", "file", "{here}/prompts.txt", NO_WAN, {}), ("teacher_path", "nothing", "{here}/a/b", NO_WAN, {}),
        ("teacher_path", "long name", "{here}/" + LONG, "is too long a name. Give a shorter path.", {}),
    ]:  # fmt: skip
        yield Case(f"{key}: {what}", (f"{path}: ...{said}",), files, {key: path})
    for what, path in (("nothing", "{here}/no"), ("folder", "{here}"), ("file", "{here}/prompts.txt")):
        said = f"--resume {path}: no checkpoint there. Name a folder checkpoints/step_..., auto or never."
        yield Case(f"resume: {what}", (said,), recipe={"resume": path})


def of_data() -> Iterator[Case]:
    for name, content, said in PROMPTS:
        yield Case(f"prompts: {name} {content[:30]!r}", (f"{{here}}/{name}{said}",), {name: content}, {"data_path": f"{{here}}/{name}"})
    for files, said in FOLDERS:
        yield Case(f"data folder: {sorted(files)} {said[-25:]}", (said,), files, {"data_path": "{here}/d"})
    media = {"d/a.png": b"", "d/a.txt": "a red circle"}
    yield Case("an image for a video run", ("a.png is an image. Write 1, or give videos.",), media,
               {"data_path": "{here}/d", "num_frames": 5})  # fmt: skip
    yield Case("media for trajectory", ("a.png has none. Take the media out of the data, or trajectory",), media,
               {"data_path": "{here}/d", "objective": "trajectory"})  # fmt: skip


Header = dict[str, Any]


def header_of(raw: bytes) -> tuple[Header, bytes]:
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def packed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def entry(**changes: Any) -> Callable[[bytes], bytes]:
    """A file whose header says something else of its first tensor; None: nothing of that."""

    def change(raw: bytes) -> bytes:
        header, data = header_of(raw)
        name = min(header.keys() - {"__metadata__"})
        header[name] = {key: value for key, value in (header[name] | changes).items() if value is not None}
        return packed(json.dumps(header).encode(), data)

    return change


def tensors(change: Callable[[dict[str, torch.Tensor], str], Any]) -> Callable[[Path], None]:
    """A file with other tensors: what `change` makes of them, given the first one's name."""

    def rewrite(file: Path) -> None:
        state = load_file(file)
        change(state, min(state))
        save_file(state, file)

    return rewrite


NO_KIND = "its header does not say where and of what kind `...` is. Fetch this file again."
BYTES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("empty", lambda raw: b"", "its header should end at byte 8, but the file has 0. Fetch this file again."),
    ("header cut off", lambda raw: raw[:50], "but the file has 50. Fetch this file again."),
    ("cut off", lambda raw: raw[:-100], "it is cut off: its tensors end at byte ...Fetch this file again."),
    ("too long", lambda raw: raw + b"x", "it is too long: its tensors end at byte ...Fetch this file again."),
    ("absurd header length", lambda raw: b"\xff" * 8 + raw[8:], "its header should end at byte 18446744073709551623"),
    ("header of no bytes", lambda raw: bytes(8) + raw[8:], "it is no safetensors file. Fetch this file again."),
    ("header a list", lambda raw: packed(b"[]"), "it is no safetensors file. Fetch this file again."),
    ("header of brackets", lambda raw: packed(b"[" * 100_000), "it is no safetensors file. Fetch this file again."),
    ("a web page", lambda raw: b"<!DOCTYPE html>" + raw, "its header should end at byte ...Fetch this file again."),
    ("integers", entry(dtype="I64"), "it holds numbers of the kind I64; known are F64"),
    ("unknown kind", entry(dtype="F7"), "it holds numbers of the kind F7; known are F64"),
    ("no kind", entry(dtype=None), NO_KIND), ("shape below zero", entry(shape=[-1]), NO_KIND), ("shape text", entry(shape="64"), NO_KIND),
    ("no place", entry(data_offsets=None), NO_KIND), ("one offset", entry(data_offsets=[0]), NO_KIND),
    ("huge shape", entry(shape=[10**18]), "which its shape [1000000000000000000] and kind F32 do not need. Fetch this file again."),
    ("half precision said", entry(dtype="F16"), "and kind F16 do not need. Fetch this file again."),
    ("overlapping", lambda raw: overlapping(raw), "its tensors overlap or leave a gap at byte ...Fetch this file again."),
]  # fmt: skip
TENSORS: list[tuple[str, Callable[[Path], None], str]] = [
    ("a tensor missing", tensors(lambda state, first: state.pop(first)), "1 tensor(s) missing: `...`...Fetch the folder again."),
    ("a tensor more", tensors(lambda state, first: state.update(more=torch.zeros(2))), "not known to this model: `more`...Fetch the"),
    ("another shape", tensors(lambda state, first: state.update({first: torch.zeros(3)})), "has the shape [3]; config.json asks for"),
]  # fmt: skip


def overlapping(raw: bytes) -> bytes:
    """Two tensors of one size at one place."""
    header, data = header_of(raw)
    named = sorted((t["data_offsets"], name) for name, t in header.items() if name != "__metadata__")
    sizes = {(end - begin): name for (begin, end), name in named}
    (begin, end), name = next(n for n in named if sizes[n[0][1] - n[0][0]] != n[1])
    header[sizes[end - begin]]["data_offsets"] = [begin, end]
    return packed(json.dumps(header).encode(), data)


TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
WEIGHTS = {"transformer": TRANSFORMER, "vae": "vae/diffusion_pytorch_model.safetensors", "text encoder": "text_encoder/model.safetensors"}
ALTERED: list[tuple[str, dict[str, Any], str]] = [  # file of the pipeline, keys that are changed (None: left out), what is said
    ("model_index.json", {"_class_name": "FluxPipeline"}, '`_class_name` is "FluxPipeline". Give a diffusers Wan text-to-video'),
    ("model_index.json", {"boundary_ratio": "0.9"}, '`boundary_ratio` is "0.9". It has two experts; write where they meet'),
    ("model_index.json", {"boundary_ratio": 1.5}, "`boundary_ratio` is 1.5. It has two experts; write where they meet"),
    ("transformer/config.json", {"num_layers": None}, "`num_layers` is missing. Fetch this file again."),
    ("transformer/config.json", {"num_layers": 10**12}, "`num_layers` is 1000000000000. Write an integer from 1 to 1024."),
    ("transformer/config.json", {"num_attention_heads": "2"}, '`num_attention_heads` is "2". Write an integer from 1 to 1024.'),
    ("transformer/config.json", {"patch_size": [1, 2]}, "`patch_size` is [1, 2]. Write three positive integers."),
    ("transformer/config.json", {"patch_size": [1, 0, 2]}, "`patch_size` is [1, 0, 2]. Write three positive integers."),
    ("transformer/config.json", {"image_dim": 1280}, "`image_dim` is 1280. Write null."),
    ("transformer/config.json", {"_class_name": "WanVACETransformer3DModel"}, "...Give a text-to-video Wan, whose class is"),
    ("transformer_2/config.json", {"ffn_dim": 64}, "`ffn_dim` is 64. The other expert has 96; give two of one shape."),
    ("vae/config.json", {"latents_mean": [0.0]}, "`latents_mean` is for 1 channels, the transformer for 16."),
    ("vae/config.json", {"latents_std": [0] * 16}, "`latents_std` is [0, ...Write a list of positive numbers."),
    ("vae/config.json", {"z_dim": None}, "`z_dim` is missing. Fetch this file again."),
    ("vae/config.json", {"dim_mult": "x"}, "it cannot be built from this"),
    ("scheduler/scheduler_config.json", {"_class_name": "Euler"}, '`_class_name` is "Euler". Name a scheduler of diffusers'),
    ("scheduler/scheduler_config.json", {"flow_shift": "3"}, '`flow_shift` is "3". Write a positive number up to 1000.'),
    ("scheduler/scheduler_config.json", {"solver_type": "x"}, "it cannot be built from this"),
    ("text_encoder/config.json", {"d_model": 64}, "`d_model` is 64. The transformer takes text of width 32"),
]  # fmt: skip


def linked(wan: Path, target: Path, *, without: str) -> Path:
    """The pipeline at `target`, by symbolic links, with one file as a copy that may be changed; returns that file."""
    for source in wan.rglob("*"):
        if source.is_file():
            file = target / source.relative_to(wan)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.symlink_to(source)
    copy = target / without
    raw = copy.read_bytes()
    copy.unlink()
    copy.write_bytes(raw)
    return copy


def of_weights() -> Iterator[Case]:
    """Spoilt files of the teacher, and of a student that starts from a folder."""
    changes = {name: (lambda file, change=change: file.write_bytes(change(file.read_bytes())) and None, said)
               for name, change, said in BYTES} | {name: (change, said) for name, change, said in TENSORS}  # fmt: skip

    def spoilt(where: str, change: Callable[[Path], None]) -> Callable[[Path, Path], None]:
        return lambda folder, wan: change(linked(wan, folder, without=where))

    for part, where in WEIGHTS.items():
        for what, (change, said) in changes.items():
            if part == "transformer" or what in ("cut off", "a tensor missing", "another shape", "integers"):
                yield Case(f"{part}: {what}", (f"{{here}}/t/{where.partition('/')[0]}...{said}",), {"t": spoilt(where, change)},
                           {"teacher_path": "{here}/t"})  # fmt: skip
    for what in ("cut off", "integers", "overlapping", "a tensor missing", "a tensor more", "another shape"):
        change, said = changes[what]
        files = {"t": spoilt(TRANSFORMER, change), "student.json": {"init": "{here}/t"}}
        yield Case(f"student's folder: {what}", (f"{{here}}/t/transformer...{said}",), files)
    for where, altered, said in ALTERED:
        files = {"t": spoilt(where, lambda file, altered=altered: alter(file, altered))}
        yield Case(f"{where}: {altered}", (f"{{here}}/t/{where}: {said}",), files, {"teacher_path": "{here}/t"})


def alter(file: Path, changes: dict[str, Any]) -> None:
    """Change keys of a JSON file; None takes one away."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if not (k in changes and v is None)}))
