"""Prompts -> UMT5 -> text cache, exactly as WanPipeline encodes them; the encoder is gone before training starts."""

import gc
import html
import json
import re
from dataclasses import dataclass
from pathlib import Path

import ftfy
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from wandistiller import distributed, shapes
from wandistiller.config import ConfigError
from wandistiller.files import atomic, digest, fingerprint, write_json
from wandistiller.metrics import Progress
from wandistiller.wan import TEXT_TOKENS

IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
VIDEOS = {".mp4", ".mov", ".webm", ".mkv", ".avi", ".gif"}
EMBEDDED = {"tiny": shapes.seen_prompts, "tiny:held_out": shapes.held_out_prompts}
PROMPTS_PER_SHARD = 64


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the data: a prompt, and an image or video where there is one."""

    prompt: str
    media: Path | None = None


def clean(prompt: str) -> str:
    """What WanPipeline does to a prompt before the tokenizer sees it."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()).strip()


def read_items(data_path: str) -> list[Item]:
    """Read the data: `tiny`, `tiny:held_out`, a .txt of prompts, a .jsonl, or a folder of media with .txt beside.

    Blank lines and lines that start with # are skipped; what is given twice is kept once, in first order.

    Raises:
        ConfigError: nothing there, not UTF-8, a bad line, a missing media file, no prompt at all.
    """
    path = Path(data_path)
    if data_path in EMBEDDED:
        items = [Item(p) for p in EMBEDDED[data_path]()]
    elif path.is_dir():
        items = _read_folder(path)
    elif not path.is_file():
        raise ConfigError(f"{data_path}: no such file or folder. Give prompts (.txt, .jsonl), a folder of media, or `tiny`.")
    else:
        items = _read_file(path)
    items = list(dict.fromkeys(items))
    if not items:
        raise ConfigError(f"{data_path}: no prompt in it. Write one prompt a line.")
    return items


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}. Save it as UTF-8.") from None


def _read_file(path: Path) -> list[Item]:
    lines = _read_text(path).split("\n")  # splitlines would also cut at U+2028, which JSON allows inside a string
    kept = [(n, line.strip()) for n, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")]
    if path.suffix != ".jsonl":
        return [Item(prompt) for _, line in kept if (prompt := clean(line))]
    items, wrong = [], []
    for n, line in kept:
        try:
            items.append(_read_object(line, path.parent))
        except ValueError as error:
            wrong.append(f"{path}, line {n}: {error}")
    if wrong:
        raise ConfigError(*wrong)
    return items


def _read_object(line: str, folder: Path) -> Item:
    """One line of a .jsonl. Raises ValueError with what is wrong."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}.") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not clean(entry["prompt"]):
        raise ValueError('no prompt. Write {"prompt": "...", "image": "file.png"}; image, video and id may be left out.')
    if unknown := sorted(set(entry) - {"prompt", "image", "video", "id"}):
        raise ValueError(f"`{unknown[0]}` is no key. Known keys: prompt, image, video, id.")
    names = [entry[k] for k in ("image", "video") if entry.get(k) is not None]
    if len(names) > 1 or any(not isinstance(n, str) for n in names):
        raise ValueError("give one file name, as image or as video.")
    media = folder / names[0] if names else None
    if media and not media.is_file():
        raise ValueError(f"no such file: {media}.")
    return Item(clean(entry["prompt"]), media)


def _read_folder(folder: Path) -> list[Item]:
    items: list[Item] = []
    wrong: list[str] = []
    for media in sorted(f for f in folder.rglob("*") if f.suffix.lower() in IMAGES | VIDEOS):
        text = media.with_suffix(".txt")
        if text.is_file() and (prompt := clean(_read_text(text))):
            items.append(Item(prompt, media))
        else:
            wrong.append(f"{media}: no prompt. Write it into {text.name} beside it.")
    if wrong:
        raise ConfigError(*wrong[:20])
    return items


class TextCache:
    """Encoded prompts on disk, in shards that are named by what they hold; looked up by prompt."""

    def __init__(self, cache: Path, folder: Path, prompts: list[str], dtype: torch.dtype):
        """Lay out the shards; nothing is read or written.

        Args:
            folder: the pipeline whose `text_encoder` and `tokenizer` are used.
            prompts: all that will ever be asked for; encoded once each.
            dtype: the encoder's precision.
        """
        self._folder, self._dtype = folder, dtype
        self.stamp = digest(fingerprint([folder / "text_encoder", folder / "tokenizer"]), TEXT_TOKENS, str(dtype))
        prompts = list(dict.fromkeys(clean(p) for p in prompts))
        chunks = [prompts[i : i + PROMPTS_PER_SHARD] for i in range(0, len(prompts), PROMPTS_PER_SHARD)]
        self._shards = {cache / "text" / f"{digest(self.stamp, c)}.safetensors": c for c in chunks}
        self._place = {p: (shard, str(i)) for shard, chunk in self._shards.items() for i, p in enumerate(chunk)}
        self._manifest = cache / "text" / f"manifest_{self.stamp}.json"

    def fill(self, device: torch.device) -> None:
        """Encode what is missing, the shards split over the ranks. Collective."""
        missing = distributed.from_rank_0([s for s in self._shards if not s.is_file()])
        mine = missing[distributed.rank() :: distributed.world_size()]
        if missing:
            distributed.log0("text: %d of %d prompts to encode", sum(len(self._shards[s]) for s in missing), len(self._place))
        if mine:
            encoder, progress = Encoder(self._folder, self._dtype, device), Progress("text", len(mine))
            for shard in mine:
                with atomic(shard) as temporary:
                    save_file({str(i): encoder.encode(p) for i, p in enumerate(self._shards[shard])}, temporary)
                progress.advance()
            del encoder
            gc.collect()
        distributed.barrier()
        if missing and distributed.rank() == 0:
            shards = {s.name: c for s, c in self._shards.items()}
            write_json(self._manifest, {"fingerprint": self.stamp, "dtype": str(self._dtype), "tokens": TEXT_TOKENS,
                                        "shards": shards})  # fmt: skip

    def __getitem__(self, prompt: str) -> Tensor:
        """text_LD of one prompt, zero-padded to 512 tokens, in the encoder's precision."""
        shard, name = self._place[clean(prompt)]
        with safe_open(shard, "pt") as opened:
            text_LD = opened.get_tensor(name)
        return torch.nn.functional.pad(text_LD, (0, 0, 0, TEXT_TOKENS - text_LD.shape[0]))


class Encoder:
    """UMT5 and its tokenizer."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device):
        self._tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self._model = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=dtype).eval().to(device)

    @torch.no_grad()
    def encode(self, prompt: str) -> Tensor:
        """text_LD of the prompt's own tokens, without padding, on the CPU."""
        tokens = self._tokenizer(
            [prompt], padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_attention_mask=True,
            return_tensors="pt",
        ).to(self._model.device)  # fmt: skip
        states_BLD = self._model(tokens.input_ids, tokens.attention_mask).last_hidden_state
        return states_BLD[0, : int(tokens.attention_mask.sum())].cpu().contiguous()
