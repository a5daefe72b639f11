"""`wandistiller sample`: a pipeline folder and prompts -> PNG (or MP4) files and one grid."""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_video
from torch import Tensor

from wandistiller.distributed import device
from wandistiller.files import atomic
from wandistiller.items import EMBEDDED, clean, read_items
from wandistiller.metrics import Progress
from wandistiller.noise import TRAIN_TIMESTEPS
from wandistiller.pictures import save_grid, to_pil
from wandistiller.problems import ConfigError, impossible_values, problem
from wandistiller.wan import TEXT_TOKENS, WanFolder, open_wan, require_weights

RANGES = [
    *((key, 1, 10**9) for key in ("height", "width", "num_frames", "num_prompts", "batch")), ("steps", 1, int(TRAIN_TIMESTEPS)),
    ("seed", 0, 10**18), ("guidance_scale", 0, 1000), ("guidance_scale_2", 0, 1000),
]  # fmt: skip
"""Setting, the least that it can be, the most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a pipeline is asked."""

    height: int
    width: int
    num_frames: int = 1
    steps: int = 40
    guidance_scale: float = 1.0
    guidance_scale_2: float | None = None
    negative_prompt: str | None = None


def number_problems(where: str, given: dict[str, Any]) -> list[str]:
    """What is wrong with the numbers that a pipeline is asked with; None is left out."""
    found = impossible_values(where, given)
    for key, least, most in RANGES:
        if (value := given.get(key)) is not None and not math.isnan(value) and not least <= value <= most:
            found.append(problem(where, key, value, f"Write a positive number, at most {most}." if least else
                                 f"Write a number from 0 to {most}."))  # fmt: skip
    return found


def open_pipeline(folder: Path, dtype: torch.dtype) -> WanPipeline:
    """diffusers' own pipeline; the VAE in float32, as Wan's needs; on the accelerator or, part by part, beside it."""
    pipeline = WanPipeline.from_pretrained(folder, dtype={"default": dtype, "vae": torch.float32})
    pipeline.set_progress_bar_config(disable=True)
    if pipeline.transformer_2 is None:  # a converted Wan2.1 can carry a boundary, below which None would be asked
        pipeline.register_to_config(boundary_ratio=None)
    if device().type == "cpu":
        return pipeline
    if find_spec("accelerate"):  # one part at a time on the accelerator: a teacher is often bigger than its memory
        pipeline.enable_model_cpu_offload(device=device())
        return pipeline
    return pipeline.to(device())


def read_prompts(given: list[str]) -> list[str]:
    """Texts as they are, or the lines of one file (or `tiny`, `tiny:held_out`)."""
    if len(given) == 1 and (given[0] in EMBEDDED or Path(given[0]).suffix in (".txt", ".jsonl")):
        return [item.prompt for item in read_items(given[0])]
    if empty := [prompt for prompt in given if not clean(prompt)]:
        raise ConfigError(problem("command line", "prompts", empty[0], "Write some text, or name a .txt or .jsonl of prompts."))
    return given


def draw(pipeline: WanPipeline, prompts: list[str], seeds: list[int], how: Sampling) -> Tensor:
    """Sample a batch: pixels_BCFHW in [0, 1]. Image i is what `torch.Generator().manual_seed(seeds[i])` gives."""
    frames_BFHWC = pipeline(
        prompt=prompts, negative_prompt=how.negative_prompt, height=how.height, width=how.width,
        num_frames=how.num_frames, num_inference_steps=how.steps, guidance_scale=how.guidance_scale,
        guidance_scale_2=how.guidance_scale_2, generator=[torch.Generator().manual_seed(s) for s in seeds],
        output_type="np", max_sequence_length=TEXT_TOKENS,
    ).frames  # fmt: skip
    return torch.from_numpy(np.asarray(frames_BFHWC)).permute(0, 4, 1, 2, 3)


def sample(model: str, prompts: list[str], output: Path, how: Sampling, seed: int, dtype: torch.dtype) -> list[Path]:
    """Write one PNG or MP4 per prompt, sampled from seed, seed + 1, ..., and grid.png.

    Raises:
        ConfigError: `model` or `how` is wrong, before anything is loaded.
    """
    folder = open_wan(model, weights=True)
    if found := _problems(folder, how):
        raise ConfigError(*found)
    require_weights(folder)
    pipeline = open_pipeline(folder.path, dtype)
    files, images, progress = [], [], Progress("samples", len(prompts))
    for i, prompt in enumerate(prompts):
        video_CFHW = draw(pipeline, [prompt], [seed + i], how)[0]
        files.append(_write(video_CFHW, output / f"{i:04d}", folder.fps))
        images.append(video_CFHW[:, video_CFHW.shape[1] // 2])
        progress.advance()
    save_grid(output / "grid.png", {"": images}, prompts)
    return [*files, output / "grid.png"]


def _problems(folder: WanFolder, how: Sampling) -> list[str]:
    found = []
    if how.guidance_scale_2 is not None and folder.boundary is None:
        found.append(problem(folder.name, "guidance_scale_2", how.guidance_scale_2, "It has one expert; leave it out."))
    if how.num_frames > 1 and not (find_spec("imageio") and find_spec("imageio_ffmpeg")):
        found.append(problem(folder.name, "num_frames", how.num_frames, "MP4 files need: pip install imageio imageio-ffmpeg."))
    return found


def _write(video_CFHW: Tensor, stem: Path, fps: int) -> Path:
    frames = [to_pil(frame_CHW) for frame_CHW in video_CFHW.unbind(1)]
    file = stem.with_suffix(".png" if len(frames) == 1 else ".mp4")
    with atomic(file) as temporary:
        if len(frames) == 1:
            frames[0].save(temporary, format="PNG")
        else:
            export_to_video(frames, str(temporary.with_suffix(".mp4")), fps=fps)
            temporary.with_suffix(".mp4").rename(temporary)
    return file
