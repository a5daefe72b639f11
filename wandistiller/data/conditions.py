"""Cached inputs of the networks beside latents: text, and of image-to-video Wans the given frames."""

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wandistiller.batch import Conditioning
from wandistiller.data.dataset import PromptItem
from wandistiller.data.media import MediaError, MediaReader
from wandistiller.data.media_cache import Encode, MediaCache, Sample
from wandistiller.data.text_cache import TextCache
from wandistiller.utils.errors import Problem
from wandistiller.utils.files import digest, fingerprint
from wandistiller.wan.given_frames import GivenFramesEncoder, encoder_folders, field_names, given_places
from wandistiller.wan.pipeline import WanFolder


class ConditionKey(NamedTuple):
    """Keys of a sample's conditioning in the caches."""

    text: str
    frames: str | None


class Conditions:
    """The conditioning of samples, and the text of prompts, on disk."""

    def __init__(
        self, cache: Path, folder: WanFolder, device: torch.device, reader: MediaReader, samples_per_file: int
    ):
        """Name the caches' folders; nothing is read or written yet. Encoders compute on `device`."""
        self.text = TextCache(cache, folder.path, device)
        self._folder, self._device, self._reader = folder, device, reader
        parts = digest(fingerprint(encoder_folders(folder)), given_places(folder.config))
        unusable = cache / "frames" / "reasons.json"
        self._frames = MediaCache(cache / "frames" / parts, unusable, samples_per_file)

    def key(self, sample: Sample) -> ConditionKey:
        frames = None
        if self._folder.config.takes_image:
            frames = self._reader.key(sample.item.begins_with, sample.size, sample.clip)
            if last := sample.item.last_image:
                frames = digest(frames, self._reader.key(last, sample.size))
        return ConditionKey(self.text.key(sample.item.prompt), frames)

    def fill_frames(self, samples: list[Sample]) -> dict[str, Problem]:
        """Encode the given frames of samples. Collective.

        Returns:
            File and reason of each sample that cannot be used, by its key of frames; equal on all ranks.
        """
        if not self._folder.config.takes_image:
            return {}
        by_key = {self.key(sample).frames: sample for sample in samples}
        return self._frames.fill(by_key, attrgetter("item.begins_with"), self._encoder, "given frames")

    def _encoder(self) -> Encode:
        encoder = GivenFramesEncoder(self._folder, self._device)

        def encode(sample: Sample) -> dict[str, Tensor]:
            return encoder.encode(given_frames(self._folder, self._reader, sample), sample.size.num_frames)

        return encode

    def batch(self, key_B: list[ConditionKey]) -> Conditioning:
        """Return the conditioning of samples of one size, text zero-padded to the longest, on the CPU."""
        text = self.text.batch([key.text for key in key_B])
        if not self._folder.config.takes_image:
            return text
        names = field_names(self._folder.config)
        columns = zip(*(self._frames.read(key.frames, *names) for key in key_B), strict=True)
        return replace(text, **dict(zip(names, map(torch.stack, columns), strict=True)))

    def of(self, samples: list[Sample]) -> Conditioning:
        return self.batch([self.key(sample) for sample in samples])


def given_frames(folder: WanFolder, reader: MediaReader, sample: Sample) -> Tensor:
    """Read the frames of a sample that its network is given: pixels_CTHW in [-1, 1].

    Raises:
        MediaError: its medium cannot be used.
    """
    if images := sample.item.images:
        return torch.cat([_read_image(image, reader, sample) for image in images], dim=1)
    places, size = given_places(folder.config), sample.size
    if places == [0] and not sample.clip:  # the others may be missing
        size = replace(size, num_frames=1)
    return reader.read(sample.item.media, size, sample.clip)[:, places]


def _read_image(image: Path, reader: MediaReader, sample: Sample) -> Tensor:
    """Return pixels_C1HW of an image of a sample's; MediaError of the last one has its name."""
    try:
        return reader.read(image, replace(sample.size, num_frames=1))
    except MediaError as error:
        if image == sample.item.last_image:
            error.args = (f"its last image {image} {error}",)
        raise


def given_problems(folder: WanFolder, items: list[PromptItem]) -> list[str]:
    """List the problem of the first item whose images are not those of the frames that a Wan is given."""
    if without := next((item.prompt for item in items if not item.begins_with), None):
        remedy = "Give rows with `image` or `video`, a file beside each .txt, or for `sample` --image."
        found = f"begin with a given image, but {json.dumps(without)} has none. {remedy}"
        return [f"{folder.name} makes clips that {found}"]
    takes_both = len(given_places(folder.config)) == 2
    wrong = next((item for item in items if item.image and takes_both != bool(item.last_image)), None)
    if not wrong:
        return []
    given, found = "first frame alone", f"{wrong.last_image} is a last one. Leave `last_image` out."
    if takes_both:
        remedy = "Write `last_image` too, or `video`, which has both."
        given, found = "first and the last frame", f"{wrong.image} is one image. {remedy}"
    return [f"{folder.name} is given the {given}, but {found}"]


def still(folder: WanFolder, reader: MediaReader, sample: Sample) -> Tensor:
    """Return a clip that shows the first given frame throughout: clip_CFHW in [0, 1]."""
    first_C1HW = given_frames(folder, reader, sample)[:, :1] / 2 + 0.5
    return first_C1HW.expand(-1, sample.size.num_frames, -1, -1)
