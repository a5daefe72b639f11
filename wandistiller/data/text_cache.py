"""Text cache: prompts encoded by UMT5 as in WanPipeline. The encoder is freed before training starts."""

import gc
import logging
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wandistiller.batch import Conditioning
from wandistiller.data.lines import clean
from wandistiller.data.tensor_cache import TensorCache
from wandistiller.distributed import collectives
from wandistiller.distributed.device import memory_size
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.round_robin import batched, own_batches, until_stopped
from wandistiller.utils.files import digest, fingerprint, scratch
from wandistiller.utils.logging import set_activity
from wandistiller.utils.system_memory import PIECES, host_free, reserve, room_of_a_rank
from wandistiller.wan.loaded_components import Encoder, offload_kwargs
from wandistiller.wan.text_padding import TEXT_TOKENS

PROMPTS_PER_FILE = 64
CUT = "text: %d prompt(s) have over %d tokens, and what follows these is not read; the first: %s..."


def text_fingerprint(folder: Path, dtype: torch.dtype) -> str:
    """Fingerprint everything that an encoded text depends on, except its prompt."""
    return digest(fingerprint([folder / "text_encoder", folder / "tokenizer"]), TEXT_TOKENS, str(dtype))


class TextCache:
    """Encoded prompts on disk, looked up by prompt."""

    def __init__(self, cache: Path, folder: Path, device: torch.device):
        """Name the cache's folder; nothing is read or written yet.

        Args:
            folder: the pipeline whose `text_encoder` and `tokenizer` are used.
            device: where they compute: in float32 on the CPU, in bfloat16 on an accelerator.
        """
        self._cache, self._folder, self._device = cache, folder, device
        self._dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.fingerprint = text_fingerprint(folder, self._dtype)
        self._tensors = TensorCache(cache / "text" / self.fingerprint)

    def key(self, prompt: str) -> str:
        return digest(clean(prompt))

    def fill(self, prompts: list[str]) -> None:
        """Encode the missing ones of all prompts that will be read, divided among the ranks. Collective."""
        by_key = {self.key(p): p for p in prompts}
        missing = self._tensors.missing_keys(by_key)
        files = own_batches(batched(missing, PROMPTS_PER_FILE))
        if missing:
            set_activity(f"encoding {len(missing)} prompts")
            here = sum(map(len, files))
            share = f", {here} of them by this rank" if here < len(missing) else ""
            collectives.log0("text: %d of %d prompts to encode%s", len(missing), len(by_key), share)
        room = room_of_a_rank(host_free(), len(collectives.node_peers()))
        if self._device.type != "cpu":
            free, _ = memory_size()
            room = int(free - reserve(free, PIECES))
        cut: list[str] = []
        with collectives.raise_on_all_ranks():
            if files:
                cut = self._encode([{k: clean(by_key[k]) for k in keys} for keys in files], room)
        if all_cut := [prompt for of_rank in collectives.gather_objects(cut) for prompt in of_rank]:
            collectives.log0(CUT, len(all_cut), TEXT_TOKENS, all_cut[0][:60], level=logging.WARNING)
        collectives.raise_if_stop_requested("while encoding prompts; finished ones are kept")
        self._tensors.find_written(missing)

    def _encode(self, files: list[dict[str, str]], room: int) -> list[str]:
        """Write files of the texts of prompts by key; return those that are too long to be read whole.

        Args:
            room: bytes that the encoder may take where it computes.
        """
        with scratch(self._cache) as swap:
            model = self._folder / "text_encoder"
            kwargs = offload_kwargs(model, self._dtype, room, swap, self._device)
            encoder = Encoder(self._folder, self._dtype, self._device, **kwargs)
            encode = Progress("text", sum(map(len, files)), "prompt").counting(encoder.encode)
            for prompts in until_stopped(files):
                texts = {k: {"text": encode(prompts[k])} for k in until_stopped(prompts)}
                if texts:
                    self._tensors.write(texts, {k: prompts[k] for k in texts})
            cut = encoder.cut
        del encoder, encode
        gc.collect()
        return cut

    def __getitem__(self, prompt: str) -> Tensor:
        """Return text_LD of one prompt, without padding, in the encoder's precision."""
        return self._tensors.read(self.key(prompt), "text")[0]

    def of(self, prompts: list[str]) -> Conditioning:
        """Return the conditioning of prompts, text zero-padded to the longest, on the CPU."""
        return self.batch([self.key(prompt) for prompt in prompts])

    def batch(self, key_B: list[str]) -> Conditioning:
        texts = [self._tensors.read(key, "text")[0] for key in key_B]
        return Conditioning(pad_sequence(texts, batch_first=True))
