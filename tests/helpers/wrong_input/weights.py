"""Cases of wrong input: safetensors and the other files of a pipeline."""

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from wrong_input.cases import Case, table

Header, State = dict[str, Any], dict[str, torch.Tensor]


def header_of(raw: bytes) -> tuple[Header, bytes]:
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def packed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def entry(**changes: Any) -> Callable[[bytes], bytes]:
    """A file whose header says something else of its first tensor."""

    def change(raw: bytes) -> bytes:
        header, data = header_of(raw)
        name = min(header.keys() - {"__metadata__"})
        header[name] |= changes
        return packed(json.dumps(header).encode(), data)

    return change


def on_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    """Rewrite a file with what `change` makes of its bytes."""
    return lambda file: file.write_bytes(change(file.read_bytes()))


def on_tensors(change: Callable[[State, str], Any]) -> Callable[[Path], Any]:
    """Rewrite a file with its tensors after `change`, given them and the first one's name."""

    def rewrite(file: Path) -> None:
        state = load_file(file)
        change(state, min(state))
        save_file(state, file)

    return rewrite


NOT_WHOLE = "it is no whole safetensors file: ...Fetch this file again"
BYTES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("empty", lambda raw: b"", "header too small. Fetch this file again"),
    ("header cut off", lambda raw: raw[:50], NOT_WHOLE),
    ("cut off", lambda raw: raw[:-100], NOT_WHOLE),
    ("too long", lambda raw: raw + b"x", NOT_WHOLE),
    ("header of brackets", lambda raw: packed(b"[" * 100_000), NOT_WHOLE),
    ("a web page", lambda raw: b"<!DOCTYPE html>" + raw, "it is a web page...Fetch this file again"),
    ("integers", entry(dtype="I32"), "it holds numbers of type I32; known are F64"),
    ("unknown kind", entry(dtype="F7"), "unknown variant `F7`...Fetch this file again"),
    ("huge shape", entry(shape=[10**18]), NOT_WHOLE),
    ("overlapping", lambda raw: overlapping(raw), NOT_WHOLE),
]
TENSORS: list[tuple[str, Callable[[State, str], Any], str]] = [
    ("a tensor missing", dict.pop, "1 tensor(s) missing: `...`...Fetch the folder again."),
    ("a tensor more", lambda s, _: s.update(more=torch.zeros(2)), "not known to this model: `more`...Fetch"),
    ("another shape", lambda s, name: s.update({name: torch.zeros(3)}), "has the shape [3]; config.json"),
]


def overlapping(raw: bytes) -> bytes:
    """Two tensors of one size at one place."""
    header, data = header_of(raw)
    named = sorted((t["data_offsets"], name) for name, t in header.items() if name != "__metadata__")
    sizes = {(end - begin): name for (begin, end), name in named}
    (begin, end), name = next(n for n in named if sizes[n[0][1] - n[0][0]] != n[1])
    header[sizes[end - begin]]["data_offsets"] = [begin, end]
    return packed(json.dumps(header).encode(), data)


TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
WEIGHTS = {
    "transformer": TRANSFORMER,
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "text encoder": "text_encoder/model.safetensors",
}


def linked(wan: Path, target: Path, *, without: str) -> Path:
    """Link the pipeline to `target`, with one file as a copy that may be changed; return that file."""
    for source in wan.rglob("*"):
        if source.is_file():
            file = target / source.relative_to(wan)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.symlink_to(source)
    (target / without).unlink()
    return Path(shutil.copyfile(wan / without, target / without))


def of_weights() -> Iterator[Case]:
    """Spoilt files of the teacher, and of a student that starts from a folder."""
    changes = {name: (on_bytes(change), message) for name, change, message in BYTES}
    changes |= {name: (on_tensors(change), message) for name, change, message in TENSORS}
    as_teacher = {"teacher_path": "{here}/t"}

    def spoilt(where: str, change: Callable[[Path], Any]) -> dict[str, Callable[[Path, Path], None]]:
        return {"t": lambda folder, wan: change(linked(wan, folder, without=where))}

    for part, where in WEIGHTS.items():
        place = f"{{here}}/t/{where.partition('/')[0]}..."
        for what, (change, message) in changes.items():
            if part == "transformer" or what in ("cut off", "a tensor missing", "another shape", "integers"):
                yield Case(f"{part}: {what}", (place + message,), spoilt(where, change), as_teacher)
    for what in ("cut off", "integers", "overlapping", "a tensor missing", "a tensor more", "another shape"):
        change, message = changes[what]
        files = spoilt(TRANSFORMER, change) | {"student.json": {"init": "{here}/t/transformer"}}
        yield Case(f"student's folder: {what}", (f"{{here}}/t/transformer...{message}",), files)
    for values, message in table("pipeline"):
        ((where, altered),) = values.items()
        files = spoilt(where, lambda file, altered=altered: alter(file, altered))
        yield Case(f"{where}: {altered}", (f"{{here}}/t/{where}: {message}",), files, as_teacher)


def alter(file: Path, changes: dict[str, Any]) -> None:
    """Change keys of a JSON file; None takes one away."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if not (k in changes and v is None)}))
