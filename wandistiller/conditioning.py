"""Prompts -> UMT5 -> text cache, exactly as WanPipeline encodes them; the encoder is gone before training starts."""

import gc
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from wandistiller import distributed
from wandistiller.config import read_json
from wandistiller.files import digest, fingerprint, scratch
from wandistiller.items import clean
from wandistiller.machine import GIB, host_free, room_of_a_rank
from wandistiller.metrics import Progress
from wandistiller.phase import doing
from wandistiller.pipeline_parts import text_encoder_of
from wandistiller.problems import ConfigError
from wandistiller.shards import Shards
from wandistiller.stopping import stopping
from wandistiller.wan import TEXT_TOKENS

PROMPTS_PER_SHARD = 64
log = logging.getLogger("wandistiller")


def text_stamp(folder: Path, dtype: torch.dtype) -> str:
    """Stands for all but the prompt that an encoded text depends on."""
    return digest(fingerprint([folder / "text_encoder", folder / "tokenizer"]), TEXT_TOKENS, str(dtype))


class TextCache:
    """Encoded prompts on disk, looked up by prompt."""

    def __init__(self, cache: Path, folder: Path, prompts: list[str], dtype: torch.dtype):
        """Nothing is read or written yet.

        Args:
            folder: the pipeline whose `text_encoder` and `tokenizer` are used.
            prompts: all that will ever be asked for; encoded once each.
            dtype: the encoder's precision.
        """
        self._cache, self._folder, self._dtype = cache, folder, dtype
        self._shards = Shards(cache / "text" / text_stamp(folder, dtype))
        self._prompts = {self.key(p): p for p in prompts}

    def key(self, prompt: str) -> str:
        """What the prompt's text is stored under."""
        return digest(clean(prompt))

    def fill(self, device: torch.device) -> None:
        """Encode what is missing, the files split over the ranks. Collective."""
        missing = self._shards.find(self._prompts)
        files = [missing[i : i + PROMPTS_PER_SHARD] for i in range(0, len(missing), PROMPTS_PER_SHARD)]
        mine = files[distributed.rank() :: distributed.world_size()]
        if missing:
            doing(f"encoding {len(missing)} prompts")
            distributed.log0("text: %d of %d prompts to encode", len(missing), len(self._prompts))
        room = room_of_a_rank(host_free(), len(distributed.node_peers())) if device.type == "cpu" else None
        with distributed.same_problems():
            if mine:
                self._encode(mine, device, room)
        distributed.stop_if_asked("while encoding prompts; those that are done are kept")
        self._shards.find(missing)

    def _encode(self, files: list[list[str]], device: torch.device, room: int | None) -> None:
        """Write files of the texts of these keys; the encoder may take `room` bytes of CPU memory."""
        with scratch(self._cache) as swap:
            told = {} if room is None else homes(self._folder / "text_encoder", self._dtype, room, swap)
            encoder, progress = Encoder(self._folder, self._dtype, device, **told), Progress("text", len(files))
            for keys in files:
                if stopping.reason:
                    break
                prompts = {k: clean(self._prompts[k]) for k in keys}
                self._shards.write({k: {"text": encoder.encode(p)} for k, p in prompts.items()}, prompts)
                progress.advance()
        del encoder
        gc.collect()

    def __getitem__(self, prompt: str) -> Tensor:
        """text_LD of one prompt, zero-padded to 512 tokens, in the encoder's precision."""
        return self.read(self.key(prompt))

    def read(self, key: str) -> Tensor:
        """The same, by key."""
        (text_LD,) = self._shards.read(key, "text")
        return torch.nn.functional.pad(text_LD, (0, 0, 0, TEXT_TOKENS - text_LD.shape[0]))


def homes(folder: Path, dtype: torch.dtype, room: int, swap: Path) -> dict[str, Any]:
    """What `from_pretrained` is to be told of an encoder that takes more CPU memory than `room` bytes; else nothing.

    What is over is read from disk for each prompt, a layer at a time, by accelerate's hooks; a layer more is left to work in.

    Args:
        swap: a folder for copies of files that are in another precision than `dtype`.
    Raises:
        ConfigError: where accelerate is not installed.
    """
    with torch.device("meta"):
        model = text_encoder_of(read_json(folder / "config.json"), dtype)
    whole, block = (sum(p.nbytes for p in part.parameters()) for part in (model, model.encoder.block[0]))
    if whole <= room:
        return {}
    if not find_spec("accelerate"):
        raise ConfigError(f"{folder}: it takes {whole / GIB:.1f} GiB and each rank may take {room / GIB:.1f} of CPU memory. Run: "
                          "pip install accelerate, and what has no room is read from disk; or run `wandistiller prepare` on "
                          "another machine and copy the cache.")  # fmt: skip
    log.info("the text encoder takes %.1f GiB, of which %.1f have room; the rest is read from disk for each prompt", whole / GIB,
             room / GIB)  # fmt: skip
    return {"device_map": "auto", "max_memory": {"cpu": max(room - 2 * block, 0)}, "offload_folder": str(swap)}


class Encoder:
    """UMT5 and its tokenizer."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, **homes: Any):
        """Load them.

        Args:
            homes: of the function of that name.
        """
        self._device = device
        self._folder = folder
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        except Exception as error:  # tokenizers raises it bare
            raise ConfigError(f"{folder / 'tokenizer'}: it cannot be read: {error}. Fetch the folder again.") from None
        self._model = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=dtype, **homes).eval()
        if not homes:
            self._model.to(device)

    @torch.no_grad()
    def encode(self, prompt: str) -> Tensor:
        """text_LD of the prompt's own tokens, without padding, on the CPU."""
        tokens = self._tokenizer(
            [prompt], padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_attention_mask=True,
            return_tensors="pt",
        ).to(self._device)  # fmt: skip
        states_BLD = states(self._model, tokens.input_ids, tokens.attention_mask)
        text_LD = states_BLD[0, : int(tokens.attention_mask.sum())].cpu().contiguous()
        if not text_LD.isfinite().all():
            raise ConfigError(f"{self._folder / 'text_encoder'}: its answers are not finite. Fetch its weights again.")
        return text_LD


def states(encoder: UMT5EncoderModel, token_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """text_BLD of numbered tokens, of which `mask_BL` says which are not padding."""
    return encoder(token_BL, mask_BL).last_hidden_state
