"""Cached inputs of the networks beside latents: text, and of image-to-video Wans the given frames."""

import gc
import json
import logging
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wandistiller.batch import Conditioning
from wandistiller.data.dataset import PromptItem
from wandistiller.data.lines import clean
from wandistiller.data.media import MediaError, MediaReader
from wandistiller.data.tensor_cache import Encode, MediaCache, Sample, TensorCache
from wandistiller.distributed import collectives
from wandistiller.distributed.device import memory_size
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.round_robin import batched, own_batches, until_stopped
from wandistiller.network.folder import Folder
from wandistiller.utils.errors import Problem
from wandistiller.utils.files import digest, fingerprint, scratch
from wandistiller.utils.logging import set_activity
from wandistiller.utils.system_memory import PIECES, host_free, reserve, room_of_a_rank

PROMPTS_PER_FILE = 64
CUT = "text: %d prompt(s) have over %d tokens, and what follows these is not read; the first: %s..."


def text_fingerprint(folder: Folder, dtype: torch.dtype) -> str:
    """Fingerprint everything that an encoded text depends on, except its prompt."""
    return digest(fingerprint(folder.parts["text_encoder"]), folder.config.text_tokens, str(dtype))


class TextCache:
    """Encoded prompts on disk, looked up by prompt."""

    def __init__(self, cache: Path, folder: Folder, device: torch.device, dtype: torch.dtype | None = None):
        """Name the cache's folder; nothing is read or written yet.

        Args:
            folder: the pipeline whose `text_encoder` and `tokenizer` are used.
            device: where they compute: in float32 on the CPU, in bfloat16 on an accelerator.
            dtype: of the networks that are given the texts; float32 is the text encoder's too then.
        """
        self._cache, self._folder, self._device = cache, folder, device
        is_exact = device.type == "cpu" or dtype is torch.float32
        self._dtype = torch.float32 if is_exact else torch.bfloat16
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
            collectives.log0("text: %d of %d prompts to encode", len(missing), len(by_key))
        room = room_of_a_rank(host_free(), len(collectives.node_peers()))
        if self._device.type != "cpu":
            free, _ = memory_size()
            room = int(free - reserve(free, PIECES))
        cut: list[str] = []
        with collectives.raise_on_all_ranks():
            if files:
                cut = self._encode([{k: clean(by_key[k]) for k in keys} for keys in files], room)
        if all_cut := [prompt for of_rank in collectives.gather_objects(cut) for prompt in of_rank]:
            rows, first = self._folder.config.text_tokens, all_cut[0][:60]
            collectives.log0(CUT, len(all_cut), rows, first, level=logging.WARNING)
        collectives.raise_if_stop_requested("while encoding prompts; finished ones are kept")
        self._tensors.find_written(missing)

    def _encode(self, files: list[dict[str, str]], room: int) -> list[str]:
        """Write files of the texts of prompts by key; return those that are too long to be read whole.

        Args:
            room: bytes that the encoder may take where it computes.
        """
        with scratch(self._cache) as swap:
            encoder = self._folder.load_text_encoder(self._dtype, self._device, room, swap)
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

    def batch(self, key_B: list[str]) -> Conditioning:
        """Return the conditioning of prompts, text zero-padded to the longest, on the CPU."""
        texts = [self._tensors.read(key, "text")[0] for key in key_B]
        return Conditioning(pad_sequence(texts, batch_first=True))


class ConditionKey(NamedTuple):
    """Keys of a sample's conditioning in the caches."""

    text: str
    frames: str | None


class Conditions:
    """The conditioning of samples, and the text of prompts, on disk."""

    def __init__(
        self,
        cache: Path,
        folder: Folder,
        device: torch.device,
        reader: MediaReader,
        samples_per_file: int,
        dtype: torch.dtype | None = None,
    ):
        """Name the caches' folders; nothing is read or written yet. Encoders compute on `device`.

        Args:
            dtype: as in `TextCache`.
        """
        self.text = TextCache(cache, folder, device, dtype)
        self._folder, self._device, self._reader = folder, device, reader
        parts = digest(fingerprint(folder.given_frames_parts), folder.config.given_places)
        unusable = cache / "frames" / "reasons.json"
        self._frames = MediaCache(cache / "frames" / parts, unusable, samples_per_file)

    def key(self, sample: Sample) -> ConditionKey:
        frames = None
        if self._folder.config.takes_image:
            frames = self._reader.key(sample.item.begins_with, sample.size)
            if last := sample.item.last_image:
                frames = digest(frames, self._reader.key(last, sample.size))
        return ConditionKey(self.text.key(sample.item.prompt), frames)

    def fill_frames(self, samples: list[Sample]) -> dict[str, Problem]:
        """Encode the given frames of samples. Collective.

        Returns:
            Problem of each sample that cannot be used, by its key of frames; equal on all ranks.
        """
        if not self._folder.config.takes_image:
            return {}
        by_key = {self.key(sample).frames: sample for sample in samples}
        return self._frames.fill(by_key, attrgetter("item.begins_with"), self._encoder, "given frames")

    def _encoder(self) -> Encode:
        encoder = self._folder.load_given_frames(self._device)

        def encode(sample: Sample) -> dict[str, Tensor]:
            return encoder.encode(given_frames(self._folder, self._reader, sample), sample.size.num_frames)

        return encode

    def batch(self, key_B: list[ConditionKey]) -> Conditioning:
        """Return the conditioning of samples of one size, text zero-padded to the longest, on the CPU."""
        text = self.text.batch([key.text for key in key_B])
        if not self._folder.config.takes_image:
            return text
        names = self._folder.config.given_fields
        columns = zip(*(self._frames.read(key.frames, *names) for key in key_B), strict=True)
        return replace(text, **dict(zip(names, map(torch.stack, columns), strict=True)))

    def of(self, samples: list[Sample]) -> Conditioning:
        return self.batch([self.key(sample) for sample in samples])


def given_frames(folder: Folder, reader: MediaReader, sample: Sample) -> Tensor:
    """Read the frames of a sample that its network is given: pixels_CTHW in [-1, 1].

    Raises:
        MediaError: its medium cannot be used.
    """
    if images := sample.item.images:
        return torch.cat([_read_image(image, reader, sample) for image in images], dim=1)
    numbers, size = folder.config.given_places, sample.size
    if numbers == [0]:  # the others may be missing
        size = replace(size, num_frames=1)
    return reader.read(sample.item.media, size)[:, numbers]


def _read_image(image: Path, reader: MediaReader, sample: Sample) -> Tensor:
    """Return pixels_C1HW of an image of a sample's; MediaError of the last one has its name."""
    try:
        return reader.read(image, replace(sample.size, num_frames=1))
    except MediaError as error:
        if image == sample.item.last_image:
            error.args = (f"its last image {image} {error}",)
        raise


def given_problems(folder: Folder, items: list[PromptItem]) -> list[str]:
    """List the problem of the first item whose images are not those of the frames that a Wan is given."""
    if without := next((item.prompt for item in items if not item.begins_with), None):
        remedy = "Give rows with `image` or `video`, a file beside each .txt, or for `sample` --image."
        none = f"{json.dumps(without)} has none. {remedy}"
        return [f"{folder.name} makes clips that begin with a given image, but {none}"]
    takes_both = len(folder.config.given_places) == 2
    wrong = next((item for item in items if item.image and takes_both != bool(item.last_image)), None)
    if not wrong:
        return []
    if takes_both:
        remedy = f"{wrong.image} is one image. Write `last_image` too, or `video`, which has both."
        return [f"{folder.name} is given the first and the last frame, but {remedy}"]
    remedy = f"{wrong.last_image} is a last one. Leave `last_image` out."
    return [f"{folder.name} is given the first frame alone, but {remedy}"]


def still(folder: Folder, reader: MediaReader, sample: Sample) -> Tensor:
    """Return a clip that shows the first given frame throughout: clip_CFHW in [0, 1]."""
    first_C1HW = given_frames(folder, reader, sample)[:, :1] / 2 + 0.5
    return first_C1HW.expand(-1, sample.size.num_frames, -1, -1)
