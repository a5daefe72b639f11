"""The frames of a clip that an image-to-video Wan is given: the first, of some Wans also the last."""

import torch
from torch import Tensor

from wandistiller.network.folder import Folder
from wandistiller.utils.images import to_pil
from wandistiller.wan.loaded_components import ImageEncoder


def mask_of(places: list[int], num_frames: int, temporal: int) -> Tensor:
    """Return mask_CF: 1 where a pixel frame is given, for the frames C of each latent frame F.

    The first latent frame stands for one frame, which is repeated.
    Source: Wan2.1, wan/image2video.py; diffusers 0.42.1, pipeline_wan_i2v.py, `prepare_latents`.
    """
    given_T = torch.zeros(num_frames)
    given_T[places] = 1
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
        places, (channels, _, height, width) = self._config.given_places, pixels_CTHW.shape
        clip_CFHW = pixels_CTHW.new_zeros(channels, num_frames, height, width)
        clip_CFHW[:, places] = pixels_CTHW
        latents_CFHW = self._latents(clip_CFHW)
        mask_CF = mask_of(places, num_frames, self._temporal).to(latents_CFHW)
        mask_CFHW = mask_CF[..., None, None].expand(-1, -1, *latents_CFHW.shape[2:])
        return torch.cat([mask_CFHW, latents_CFHW])

    def _latents(self, pixels_CFHW: Tensor) -> Tensor:
        return self._vae.encode(pixels_CFHW[None].to(self._device))[0]
