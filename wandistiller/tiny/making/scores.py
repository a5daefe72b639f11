"""The measured table of a made teacher: pictures or clips drawn by the stock pipeline, judged by programs.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

import hashlib
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor

from wandistiller.tiny import shapes, video_scores
from wandistiller.tiny.first_frames import FOLDER
from wandistiller.tiny.making.vae import reproduced, vae_psnr
from wandistiller.tiny.making.worlds import World

SCORED_BATCH = 56
"""Prompts per call of the pipeline."""
VAE_SEED = 10_000
"""Jitter of the held-out clips on which the VAE is measured; no training has it."""


def megabytes(folder: Path) -> float:
    """Return the size of all files below a folder, in 10^6 bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def open_pipeline(folder: Path) -> DiffusionPipeline:
    """Open the pipeline in `folder` without progress bars, its bfloat16 weights in float32."""
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(
    world: World,
    pipeline: DiffusionPipeline,
    prompts: list[str],
    *,
    steps: int,
    guidance: tuple[float, float],
    negative_prompt: str = "",
) -> Tensor:
    """Draw one clip per prompt with the stock pipeline, clip i from the noise of generator i.

    Args:
        guidance: guidance scale of the high- and the low-noise expert; (1, 1) is unguided.
        negative_prompt: text of the unconditional branch.

    Returns:
        clip_BCFHW in [0, 1].
    """
    generators = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    clip_BFCHW, number = [], 1 if world.begins else SCORED_BATCH  # which takes one image a call
    for start in range(0, len(prompts), number):
        part, inputs = slice(start, start + number), {}
        if world.begins:
            inputs["image"] = Image.open(FOLDER / world.scenes[prompts[start]].picture)
        drawn = pipeline(
            **inputs,
            prompt=[world.scenes[name].worded(0) for name in prompts[part]],
            negative_prompt=negative_prompt,
            num_inference_steps=steps,
            generator=generators[part],
            height=world.size,
            width=world.size,
            num_frames=world.frames,
            output_type="pt",
            guidance_scale=guidance[0],
            guidance_scale_2=guidance[1],
        )
        clip_BFCHW.append(drawn.frames)
    return torch.cat(clip_BFCHW).transpose(1, 2)


def chosen(prompts: list[str], number: int) -> list[str]:
    """Return `number` prompts in an order fixed by their hashes, repeated if there are fewer."""
    by_hash = sorted(prompts, key=lambda prompt: hashlib.sha256(f"scored {prompt}".encode()).digest())
    return [by_hash[i % len(by_hash)] for i in range(number)]


def judgements(world: World, clip_BCFHW: Tensor, prompts: list[str]) -> dict[str, str]:
    """Judge clips in [0, 1] of their world's frames: the cells of a row of the table by column."""
    how = {"begins": world.begins}
    if clip_BCFHW.shape[2] == 1:
        image_BCHW = clip_BCFHW[:, :, 0]
        right_B = shapes.fully_right(image_BCHW, prompts)
        mse_B = shapes.mse_to_prompts(image_BCHW, prompts)
        return {"fully right": f"{100 * sum(right_B) / len(prompts):.1f} %", "MSE": f"{mse_B.mean():.5f}"}
    right_B = video_scores.fully_right(clip_BCFHW, prompts, **how)
    mse_B = video_scores.mse_to_prompts(clip_BCFHW, prompts, **how)
    speed_B = video_scores.speeds(clip_BCFHW, prompts, **how)
    speed_B = speed_B[~speed_B.isnan()]
    return {
        "fully right": f"{100 * sum(right_B) / len(prompts):.1f} %",
        "MSE": f"{mse_B.mean():.5f}",
        "speed": f"{speed_B.mean():.3f}",
        "speed's standard deviation": f"{speed_B.std():.3f}",
        "flicker": f"{video_scores.flicker(clip_BCFHW, prompts, **how).mean():.5f}",
    }


def print_scores(
    world: World, folder: Path, *, number: int, steps: int, guidance: tuple[float, float]
) -> None:
    """Print the measured table of a pipeline folder; MSE is to the prompt's canonical picture or clip.

    The last rows are what can be reached: jittered clips of held-out prompts after the VAE, and as they are
    rendered.
    """
    pipeline = open_pipeline(folder)
    psnr = vae_psnr(pipeline.vae, world, seed=VAE_SEED)
    sizes = ", ".join(
        f"{path.name} {megabytes(path):.2f}" for path in sorted(folder.iterdir()) if path.is_dir()
    )
    print(f"{folder}: {megabytes(folder):.2f} MB ({sizes}); VAE {psnr:.1f} dB on held-out prompts")
    print(f"{steps} steps, {number} prompts per row")
    held_out = chosen(world.held_out, number)
    rendered_BCFHW = torch.stack([world.render(prompt, VAE_SEED) for prompt in held_out])
    true = judgements(world, rendered_BCFHW, held_out)
    print(f"| prompts | guidance | {' | '.join(true)} |\n{'|---' * (2 + len(true))}|")
    for name, prompts in (("seen", world.seen), ("held out", world.held_out)):
        scored = chosen(prompts, number)
        for scales in (guidance, (1.0, 1.0)):
            clip_BCFHW = sample(world, pipeline, scored, steps=steps, guidance=scales)
            cells = judgements(world, clip_BCFHW, scored)
            print(f"| {name} | {scales[0]:g}, {scales[1]:g} | {' | '.join(cells.values())} |", flush=True)
    coded_BCFHW = (reproduced(pipeline.vae, rendered_BCFHW * 2 - 1) + 1) / 2
    print(f"| held out | after the VAE | {' | '.join(judgements(world, coded_BCFHW, held_out).values())} |")
    print(f"| held out | rendered | {' | '.join(true.values())} |")
