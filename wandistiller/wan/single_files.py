"""A teacher in the files of ComfyUI or the original Wan: a JSON names them, a folder of links shows them.

The folder has diffusers' form. Its JSON files are those of the known Wan whose tensors the files have, and an
index beside the links says what each tensor is called there. Nothing is copied but the tokenizer.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import transformers  # whose class takes a second to import: where it is used
from safetensors import safe_open

from wandistiller.experts import Expert
from wandistiller.network import weight_reader
from wandistiller.network.weight_reader import DIFFUSERS_STEM, RENAMED, TOKENIZER, WeightReader
from wandistiller.utils.errors import ConfigError, collecting, problem
from wandistiller.utils.files import digest, file_fingerprint, read_json, scratch, write_json
from wandistiller.utils.validation import Text, check
from wandistiller.wan.checks import TIED, UNSUPPORTED
from wandistiller.wan.components import text_encoder_of, vae_of
from wandistiller.wan.lora_experts import expert_of
from wandistiller.wan.original_names import names_in, original_name, original_vae_name
from wandistiller.wan.published import KnownWan, known_wans

HIGH, LOW = EXPERTS = tuple(expert.value for expert in Expert)
TEXT, VAE = "text_encoder", "vae"
EXAMPLE = {
    HIGH: "diffusion_models/wan2.2_t2v_high_noise_14B_fp16.safetensors",
    LOW: "diffusion_models/wan2.2_t2v_low_noise_14B_fp16.safetensors",
    TEXT: "text_encoders/umt5_xxl_fp16.safetensors",
    VAE: "vae/wan_2.1_vae.safetensors",
}
"""A JSON for files of ComfyUI, in its folder models/."""
EIGHT_BITS = "its weights have 8 bits or less, whose rounding a student would learn"


@dataclass(frozen=True)
class _Part:
    """One file that the JSON names, or a folder of them with their index, as the original Wan's."""

    key: str
    path: Path
    reader: WeightReader

    @classmethod
    def read(cls, key: str, path: Path) -> Self:
        """Read the headers; raise ConfigError if these are no weights in 16 or 32 bits."""
        give = f"Give a .safetensors file in 16 or 32 bits, such as ComfyUI's {Path(EXAMPLE[key]).name}."
        if path.is_file():
            with path.open("rb") as opened:
                is_gguf = opened.read(4) == b"GGUF"
            damage = f"it is a GGUF file: {EIGHT_BITS}." if is_gguf else weight_reader.damage_in(path)
            if damage or path.suffix != ".safetensors":
                raise ConfigError(f"{path}: {damage or 'it is no .safetensors file.'} {give}")
        reader = WeightReader(path.parent, path.stem) if path.is_file() else WeightReader(path)
        if any(tensor.dtype.itemsize == 1 for tensor in reader.stored.values()):
            raise ConfigError(f"{path}: {EIGHT_BITS}. {give}")
        reader.folder = path  # which messages name
        return cls(key, path, reader)

    def names(self, wan: KnownWan) -> dict[str, tuple[str, list[int]]]:
        """Return the name in the file and the shape of each of diffusers' parameters."""
        if self.key in EXPERTS:
            shapes, spellings = wan.transformer.shapes, (original_name, str)
        else:
            config = wan.files[f"{self.key}/config.json"]
            with torch.device("meta"):
                model = vae_of(config) if self.key == VAE else text_encoder_of(config)
            shapes = {name: list(p.shape) for name, p in model.named_parameters()}
            spellings = (str,) if self.key == TEXT else (partial(original_vae_name, config=config), str)
        file = {} if self.key == TEXT else self.reader.stored  # transformers reads it by its own names
        return {n: (name, shapes[n]) for n, name in names_in(file, shapes, spellings).items()}

    def problems(self, wan: KnownWan) -> list[str]:
        """List what differs from the tensors of a known Wan."""
        expected = {name: torch.Size(shape) for name, shape in self.names(wan).values()}
        return self.reader.problems(expected, (TIED,), wan.name)

    def shown(self, wan: KnownWan) -> tuple[dict[str, Any], dict[str, Path]]:
        """Return a JSON file and the links of its folder, by their names in diffusers' pipeline."""
        stored = self.reader.stored
        if self.key == TEXT:
            config, dtype = f"{TEXT}/config.json", str(stored["shared.weight"].dtype).removeprefix("torch.")
            return {config: wan.files[config] | {"dtype": dtype}}, {f"{TEXT}/model.safetensors": self.path}
        renamed = {name: in_file for name, (in_file, _) in self.names(wan).items()}
        index = {"metadata": {RENAMED: renamed}, "weight_map": {n: t.file.name for n, t in stored.items()}}
        links = {f"{self.key}/{t.file.name}": t.file for t in stored.values()}
        return {f"{self.key}/{DIFFUSERS_STEM}.safetensors.index.json": index}, links


def folder_of(json: Path) -> Path:
    """Return the folder that shows the files that a JSON names; it is in the user's cache, made if need be.

    Only headers are read, and the tokenizer. Where a file has changed, it is another folder.

    Raises:
        ConfigError: with all problems of the JSON, or else of the files.
    """
    parts, problems = [], []
    for key, path in _named(json).items():
        with collecting(problems):
            parts.append(_Part.read(key, path))
    if problems:
        raise ConfigError(*problems)
    wan = _recognised(json, parts)
    if problems := [p for part in parts for p in part.problems(wan)]:
        raise ConfigError(*problems)
    contents, links = dict(wan.files), {}
    for json_file, linked in (part.shown(wan) for part in parts):
        contents |= json_file
        links |= linked
    cache = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "wandistiller"
    folder = cache / digest(contents, {name: file_fingerprint(file) for name, file in links.items()})
    if not folder.is_dir():
        with scratch(cache) as temporary:
            made = temporary / folder.name
            for name, content in contents.items():
                write_json(made / name, content)
            for name, file in links.items():
                (made / name).symlink_to(file)
            write_tokenizer(links[f"{TEXT}/model.safetensors"], made / "tokenizer")
            with suppress(OSError):  # another rank was first
                made.rename(folder)
    return folder


def _named(json: Path) -> dict[str, Path]:
    """Read the JSON: key -> file, whose place is relative to the JSON's own."""
    values = read_json(json)
    problems, names = check(str(json), values, dict.fromkeys(EXAMPLE, Text))
    problems += [
        f"{json}: `{key}` is missing. Name the file, such as {EXAMPLE[key]}."
        for key in (HIGH, TEXT, VAE)
        if key not in values
    ]
    files = {key: json.absolute().parent / os.path.expanduser(name) for key, name in names.items()}
    for key, file in files.items():
        if not file.exists():
            absent = problem(json, key, names[key], f"There is no file {file}. Fix the name.")
            problems += weight_reader.unfinished(file.parent, [file.name]) or [absent]
    if problems:
        raise ConfigError(*problems)
    return {key: files[key] for key in EXAMPLE if key in files}


def _recognised(json: Path, parts: list[_Part]) -> KnownWan:
    """Return the known Wan that has most tensors of the first transformer, under their names and shapes.

    Raises:
        ConfigError: there is none, or it has other networks than the JSON.
    """
    experts = [part for part in parts if part.key in EXPERTS]
    first, number = experts[0], len(experts)
    stored = {name: [*t.shape] for name, t in first.reader.stored.items()}

    def equal(wan: KnownWan) -> tuple[int, bool]:
        same = sum(stored.get(name) == shape for name, shape in first.names(wan).values())
        return same, wan.networks == number

    wan = max(known_wans(), key=equal)
    if 2 * equal(wan)[0] < len(stored):
        text = f"its tensors are those of none of these: {', '.join(wan.name for wan in known_wans())}"
        raise ConfigError(f"{first.path}: {text}. {UNSUPPORTED} Give diffusers' folder of any other.")
    sides, text = [expert_of(part.path) for part in experts], ""
    if wan.networks < number:
        text = f"{wan.name} has one network, and here are two"
    elif number == 1 and (wan.networks > 1 or sides[0]):
        text = f"{first.path} is one of two networks that share the noise levels"
    elif number == 2 and (sides[0] is Expert.LOW_NOISE or sides[1] is Expert.HIGH_NOISE):
        text = "by their names its networks are in each other's place"
    if text:
        remedy = f"`{HIGH}` names an only network, or the high-noise one, `{LOW}` the low-noise one."
        raise ConfigError(f"{json}: {text}. {remedy}")
    return wan


def write_tokenizer(file: Path, folder: Path) -> None:
    """Write the tokenizer of a text encoder's file, sentencepiece's model in a tensor, as transformers' own.

    Raises:
        ConfigError: it is none.
    """
    from transformers.convert_slow_tokenizer import import_protobuf

    try:
        with safe_open(file, "np") as opened:
            raw = opened.get_tensor(TOKENIZER).tobytes()
        model = import_protobuf().ModelProto.FromString(raw)
        pieces = [(piece.piece, piece.score) for piece in model.pieces]
        characters = model.normalizer_spec.precompiled_charsmap or None
        how = {"vocab": pieces, "_spm_precompiled_charsmap": characters, "extra_ids": 0}
        transformers.T5TokenizerFast(**how).save_pretrained(folder)
    except Exception as error:  # tokenizers raises it bare
        text = f"its tokenizer, the tensor `{TOKENIZER}`, cannot be read: {error!r}"
        raise ConfigError(f"{file}: {text}. Give ComfyUI's file in 16 bits, or fetch it again.") from None
