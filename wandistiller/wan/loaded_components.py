"""The components of a pipeline with their weights: VAE (pixels <-> latents), text and image encoder."""

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from wandistiller.network.folder import Folder
from wandistiller.network.weight_reader import TOKENIZER, WeightReader
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json
from wandistiller.utils.images import to_pil
from wandistiller.utils.system_memory import amount
from wandistiller.wan import components
from wandistiller.wan.checks import sound
from wandistiller.wan.text_padding import TEXT_TOKENS
from wandistiller.wan.vae import FittingVae

log = logging.getLogger("wandistiller")
CPU = torch.device("cpu")


def load_text_encoder(folder: Path, dtype: torch.dtype, **options: Any) -> "transformers.UMT5EncoderModel":
    """Load the text encoder in `folder` from its safetensors, with further arguments of `from_pretrained`.

    Raises:
        ConfigError: weights that cannot be right.
    """
    config = components.umt5_config(read_json(folder / "config.json"))
    options |= {"config": config, "use_safetensors": True, "trust_remote_code": False}
    beside = {"_keys_to_ignore_on_load_unexpected": [TOKENIZER]}  # in ComfyUI's file
    kind = type("UMT5EncoderModel", (transformers.UMT5EncoderModel,), beside)
    return sound(kind.from_pretrained(folder, dtype=dtype, **options), folder)


def load_vae(folder: Path) -> FittingVae:
    """Load the VAE in `folder` from its safetensors, in float32; of a batch it takes one sample at a time.

    An image of 480x832 takes 3.1 GiB to decode, 81 frames 8.8; in tiles, where that is not free, 2.0.

    Raises:
        ConfigError: weights that cannot be right.
    """
    with torch.device("meta"):
        vae = FittingVae.from_config(read_json(folder / "config.json"))
    vae.load_state_dict(WeightReader(folder).state(torch.float32), assign=True)
    vae.enable_slicing()
    return sound(vae, folder)


def load_image_encoder(folder: Path) -> "transformers.CLIPVisionModel":
    """Load the image encoder in `folder` from its safetensors, in float32.

    Raises:
        ConfigError: weights that cannot be right.
    """
    options = {"dtype": torch.float32, "use_safetensors": True}
    return sound(transformers.CLIPVisionModel.from_pretrained(folder, **options), folder)


def offload_kwargs(
    folder: Path, dtype: torch.dtype, room: int, swap: Path, device: torch.device = CPU
) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that offload what exceeds `room` bytes; empty if all fits.

    accelerate's hooks fetch the rest for each prompt, a layer at a time, into memory for one layer more: from
    disk, or for an accelerator from CPU memory.

    Args:
        room: bytes that it may take on `device`.
        swap: folder for copies of files in another precision than `dtype`.
    Raises:
        ConfigError: accelerate is needed and not installed.
    """
    with torch.device("meta"):
        model = components.text_encoder_of(read_json(folder / "config.json"), dtype)
    whole, block = (sum(p.nbytes for p in part.parameters()) for part in (model, model.encoder.block[0]))
    if whole <= room:
        return {}
    if not find_spec("accelerate"):
        where, rest = ("CPU", "read from disk") if device.type == "cpu" else ("its GPU's", "fetched")
        raise ConfigError(
            f"{folder}: it takes {amount(whole)} and each rank may take {amount(room)} of {where} "
            f"memory. Run: pip install accelerate, and the rest is {rest} for each prompt; or run "
            "`wandistiller prepare` on another machine and copy the cache."
        )
    message = "the text encoder takes %s, of which %s fit; the rest comes from %s for each prompt"
    log.info(message, amount(whole), amount(room), "disk" if device.type == "cpu" else "CPU memory")
    room_left: dict[str | int, int] = {"cpu": whole}
    room_left[device.index if device.type != "cpu" else "cpu"] = max(room - 2 * block, 0)
    return {"device_map": "auto", "max_memory": room_left, "offload_folder": str(swap)}


class Encoder:
    """UMT5 and its tokenizer."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, **offload_kwargs: Any):
        """Load them, the model with the result of `offload_kwargs`."""
        self._device = CPU if offload_kwargs else device  # accelerate's hooks bring tokens where they go
        self._tokenizer = components.load_tokenizer(folder / "tokenizer")
        self.cut: list[str] = []
        """Prompts of more than TEXT_TOKENS tokens, whose rest was not read."""
        self._model = load_text_encoder(folder / "text_encoder", dtype, **offload_kwargs)
        if not offload_kwargs:
            self._model.to(device)

    @torch.no_grad()
    def encode(self, prompt: str) -> Tensor:
        """Return text_LD of the prompt's own tokens, on the CPU.

        They do not attend to the padding that WanPipeline adds, so they are encoded without it.
        """
        tokens = components.tokenize(self._tokenizer, prompt).to(self._device)
        if tokens.input_ids.shape[1] == TEXT_TOKENS and len(self._tokenizer(prompt).input_ids) > TEXT_TOKENS:
            self.cut.append(prompt)
        states_BLD = components.states(self._model, tokens.input_ids, tokens.attention_mask)
        return states_BLD[0].cpu().contiguous()


class ImageEncoder:
    """CLIP's vision model and its image processor, in float32. Drop the object to free its memory."""

    def __init__(self, folder: Path, device: torch.device):
        """Load them from a pipeline's folder."""
        self._device = device
        self._processor = transformers.CLIPImageProcessor.from_pretrained(folder / "image_processor")
        self._model = load_image_encoder(folder / "image_encoder").to(device)

    @torch.no_grad()
    def encode(self, images: list[Image.Image]) -> Tensor:
        """Encode images to states_LD, one after the other: the last layer's but one, as Wan takes them."""
        pixels_BCHW = self._processor(images=images, return_tensors="pt").pixel_values.to(self._device)
        states_BLD = self._model(pixels_BCHW, output_hidden_states=True).hidden_states[-2]
        return states_BLD.flatten(0, 1)


class Vae:
    """AutoencoderKLWan with normalised latents, in float32 as in Wan. Drop the object to free its memory."""

    def __init__(self, folder: Path, config: dict[str, Any], device: torch.device):
        self._vae = load_vae(folder).to(device)
        mean_and_std = (torch.tensor(config[f"latents_{key}"], device=device) for key in ("mean", "std"))
        self._mean_C111, self._std_C111 = (t_C.view(-1, 1, 1, 1) for t_C in mean_and_std)

    @torch.no_grad()
    def encode(self, pixels_BCFHW: Tensor) -> Tensor:
        """Encode pixels in [-1, 1]: x0_BCFHW = (z - latents_mean) / latents_std, z the posterior's mode."""
        return (components.encoded(self._vae, pixels_BCFHW) - self._mean_C111) / self._std_C111

    @torch.no_grad()
    def decode(self, x0_BCFHW: Tensor) -> Tensor:
        """Decode normalised latents to pixels_BCFHW in [0, 1]."""
        return components.decoded(self._vae, x0_BCFHW * self._std_C111 + self._mean_C111)


def mask_of(frame_numbers: list[int], num_frames: int, temporal: int) -> Tensor:
    """Return mask_CF: 1 where a pixel frame is given, for the frames C of each latent frame F.

    The first latent frame stands for one frame, which is repeated.
    Source: Wan2.1, wan/image2video.py; diffusers 0.42.1, pipeline_wan_i2v.py, `prepare_latents`.
    """
    given_T = torch.zeros(num_frames)
    given_T[frame_numbers] = 1
    return torch.cat([given_T[:1].repeat(temporal), given_T[1:]]).view(-1, temporal).T


class GivenFramesEncoder:
    """VAE, and image encoder if the transformer takes its states. Drop the object to free their memory."""

    def __init__(self, folder: Folder, device: torch.device):
        self._config, self._temporal, self._device = folder.config, folder.temporal, device
        self._vae = folder.load_vae(device)
        self._images = ImageEncoder(folder.path, device) if folder.config.image_dim else None

    def encode(self, pixels_CTHW: Tensor, num_frames: int) -> dict[str, Tensor]:
        """Return the fields of `batch.Conditioning` but the text, of one sample, float32, on the CPU.

        Args:
            pixels_CTHW: the given frames alone, in [-1, 1].
        """
        expands = self._config.expands_time
        tensors = [self._latents(pixels_CTHW) if expands else self._joined(pixels_CTHW, num_frames)]
        if self._images:
            tensors.append(self._images.encode([to_pil(p / 2 + 0.5) for p in pixels_CTHW.unbind(1)]))
        return dict(zip(self._config.given_fields, (t.float().cpu() for t in tensors), strict=True))

    def _joined(self, pixels_CTHW: Tensor, num_frames: int) -> Tensor:
        """Return the mask, and the latents of a clip that is zero, mid-grey, between the given frames."""
        numbers, (channels, _, height, width) = self._config.given_places, pixels_CTHW.shape
        clip_CFHW = pixels_CTHW.new_zeros(channels, num_frames, height, width)
        clip_CFHW[:, numbers] = pixels_CTHW
        latents_CFHW = self._latents(clip_CFHW)
        mask_CF = mask_of(numbers, num_frames, self._temporal).to(latents_CFHW)
        mask_CFHW = mask_CF[..., None, None].expand(-1, -1, *latents_CFHW.shape[2:])
        return torch.cat([mask_CFHW, latents_CFHW])

    def _latents(self, pixels_CFHW: Tensor) -> Tensor:
        return self._vae.encode(pixels_CFHW[None].to(self._device))[0]
