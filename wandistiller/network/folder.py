"""A diffusers pipeline on disk, and what its family alone knows of it: parts, sizes, sampler, defaults."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from wandistiller.experts import Expert
from wandistiller.network.config import NetworkConfig
from wandistiller.network.weight_reader import WeightReader
from wandistiller.utils.files import digest, fingerprint


class Vae(Protocol):
    """Pixels to normalised latents and back, in float32. Drop the object to free its memory."""

    def encode(self, pixels_BCFHW: Tensor) -> Tensor:
        """Encode pixels in [-1, 1] to x0_BCFHW."""

    def decode(self, x0_BCFHW: Tensor) -> Tensor:
        """Decode latents to pixels_BCFHW in [0, 1]."""


class Need(NamedTuple):
    """Bytes."""

    weights: int
    work: int
    """Peak of all else, input and output included."""


@dataclass(frozen=True, slots=True)
class Usual:
    """A teacher's usual sampling settings, the defaults of a run."""

    height: int
    width: int
    guidance: tuple[float, float]
    """Scales of high-noise and low-noise expert."""


class Folder(Protocol):
    """A diffusers pipeline of one family on disk, described from its JSON files; no weight is read.

    Each family has one subclass, a frozen dataclass, whose methods are all that others ask of a folder.
    """

    path: Path
    name: str
    """The folder or hub id in the user's words."""
    configs: dict[Expert, NetworkConfig]
    """The config of each expert's network."""
    boundary: float | None
    """Noise level at which two experts change."""
    shift: float
    revision: str | None
    """Commit of a hub id; later fetches use the same."""
    added: tuple[Any, ...]
    """LoRA files that are added to the networks' weights when they are read."""
    spatial: int
    """Pixels per latent pixel."""
    temporal: int
    """Frames per latent frame."""
    fps: int
    """Frames a second of its videos."""

    @property
    def config(self) -> NetworkConfig:
        """Of its first expert; of a part of it, as where one expert trains, this may be the low-noise one."""
        return next(iter(self.configs.values()))

    def only(self, experts: Iterable[Expert]) -> Self:
        """Return the folder with these experts alone."""
        return replace(self, configs={expert: self.configs[expert] for expert in experts})

    @property
    def shortest(self) -> int:
        """Least number of frames of its samples: an image, or one latent frame after the given one."""
        return 1 + self.temporal if self.config.takes_image else 1

    @property
    def hub_id(self) -> str | None:
        """The published pipeline that single files are of; None: it is a folder, or known by its own name."""

    @property
    def identity(self) -> str:
        """Equal for networks of the same weights: a commit or the files' fingerprint, and what is added."""
        # a hub id's weights may not be here yet, but its commit identifies them
        stored = self.revision or fingerprint(self.path / expert.value for expert in self.configs)
        return digest(stored, self.added_identities) if self.added else stored

    @property
    def weights_identity(self) -> str:
        """Equal for pipelines whose networks have the same weights, before anything is added to them."""
        folders = (self.path / expert.value for expert in Expert)
        return self.revision or fingerprint(folder for folder in folders if folder.is_dir())

    @property
    def added_identities(self) -> list[list[Any]]:
        return [lora.identity for lora in self.added]

    def latent_shape(self, height: int, width: int, num_frames: int) -> tuple[int, int, int, int]:
        """Return (C, F, H, W) of one sample of the given size in pixels and frames."""
        frames = (num_frames - 1) // self.temporal + 1
        return self.config.out_channels, frames, height // self.spatial, width // self.spatial

    @property
    def multiple(self) -> tuple[int, int]:
        """Divisors of every height and every width, in pixels: those of a patch."""
        _, height, width = self.config.patch_size
        return self.spatial * height, self.spatial * width

    def tokens(self, height: int, width: int, num_frames: int) -> int:
        """Return the number of patches of a sample of the given size: the length of attention's sequence."""
        shape = self.latent_shape(height, width, num_frames)[1:]
        return math.prod(n // p for n, p in zip(shape, self.config.patch_size, strict=True))

    def size_problems(self, height: int, width: int, num_frames: int) -> list[str]:
        """List the sizes that are not whole latents and whole patches, or are too large."""

    def require_weights(self) -> None:
        """Check that all weights are here and fit their configs, before any is loaded; fetch a hub id's.

        Raises:
            ConfigError: names every part without a safetensors file, and every missing, truncated or
                misshapen tensor.
        """

    def reader(self, expert: Expert) -> WeightReader:
        """Read the headers of an expert's files; what is read then has the changes of `added` in it."""

    def with_loras(self, added: Sequence[Any]) -> Self:
        """Return the pipeline with LoRA files added to its networks, after those that it has.

        Raises:
            ConfigError: they are not for its networks.
        """

    def added_changes(self, expert: Expert, *, weights: bool = True) -> dict[str, Any]:
        """Return the `LowRank` change of each layer of a network by all added files, by name, float32.

        Args:
            weights: read them; without, the changes are on the meta device.
        """

    @property
    def added_lines(self) -> list[str]:
        """Lines that say which LoRA file is added to which network, and which of its keys are not."""

    @property
    def added_settings(self) -> list[dict[str, Any]]:
        """The LoRA files that are added, as a recipe names them."""

    def with_first_frames(self) -> Self:
        """Return the pipeline as it makes clips that begin with a given image, if it makes both kinds."""

    @property
    def parts(self) -> dict[str, list[Path]]:
        """The folders of each part beside the networks: text encoder, VAE, image encoder if it has one."""

    @property
    def given_frames_parts(self) -> list[Path]:
        """The folders of all that the encoded frames depend on."""

    def load_vae(self, device: torch.device) -> Vae:
        """Load the VAE."""

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device, room: int, swap: Path) -> Any:
        """Load what makes text_LD, on the CPU, of a prompt: `encode`; `cut` lists prompts that were too long.

        Args:
            room: bytes that it may take; the rest is offloaded.
            swap: folder for copies of files in another precision than `dtype`.
        """

    def load_given_frames(self, device: torch.device) -> Any:
        """Load the encoder of given frames: `encode` makes all of `batch.Conditioning` but the text."""

    @property
    def text_width(self) -> int:
        """Width of a prompt's states."""

    def text_need(self, dtype: torch.dtype, *, accelerator: bool) -> tuple[Need, torch.dtype]:
        """Return the memory of the text encoder for one prompt, and the dtype of its file."""

    def vae_need(
        self, call: str, shape: tuple[int, ...], room: float, *, accelerator: bool
    ) -> tuple[Need, bool]:
        """Return the memory of the VAE and of a call, and True if it runs in tiles.

        Args:
            call: encode or decode.
            shape: (B, C, F, H, W) of its input.
            room: bytes that weights and call may take.
        """

    @property
    def image_encoder_bytes(self) -> int:
        """Bytes of the image encoder's weights in float32; 0 without one."""

    def bytes_to_fetch(self) -> int | None:
        """Return the size of the files of a hub id that are not here; None if offline."""

    @property
    def usual(self) -> Usual:
        """Its usual sampling settings."""

    def scheduler_config(self, shift: float) -> dict[str, Any]:
        """Return the pipeline's own scheduler_config.json with another shift."""

    def scheduler(self, shift: float) -> Any:
        """Return the pipeline's own scheduler, of diffusers, with another shift."""

    def noise_problems(self) -> list[str]:
        """List the problem of a teacher whose samples cannot be repeated: each step adds noise of its own."""
