"""Samples of finished pipelines: as the package draws them, and as diffusers' own pipelines do."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from shipped import placement
from torch import Tensor

from wandistiller.checkpoint.facts import Facts
from wandistiller.data.conditions import Conditions
from wandistiller.data.dataset import PromptItem
from wandistiller.data.media import Size
from wandistiller.data.tensor_cache import Sample
from wandistiller.distributed.collectives import device
from wandistiller.distributed.progress import Progress
from wandistiller.evaluation.candidates import reader_of
from wandistiller.evaluation.pipelines import OTHERS, PlacedPipeline, base_of
from wandistiller.evaluation.sampling import Sampling
from wandistiller.network.folder import Folder
from wandistiller.teacher.placements.base import Placement

GPU = placement("replicated", "float32")


def stock(folder: Path) -> DiffusionPipeline:
    """diffusers' own pipeline of a folder, in float32."""
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def of_stock(pipe: DiffusionPipeline, prompts: list[str], seeds: list[int], sampling: Sampling) -> Tensor:
    """Return pixels_BCFHW in [0, 1] of diffusers' own pipeline."""
    settings = {key: getattr(sampling, key) for key in ("height", "width", "num_frames", "guidance_scale")}
    settings |= {key: getattr(sampling, key) for key in ("guidance_scale_2", "negative_prompt")}
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    how: dict[str, Any] = {"generator": generators, "output_type": "pt", "max_sequence_length": 512}
    return pipe(prompts, num_inference_steps=sampling.steps, **settings, **how).frames.transpose(1, 2)


def pixels(
    folder: Folder,
    cache: Path,
    prompts: list[str],
    seeds: list[int],
    sampling: Sampling,
    facts: Facts = OTHERS,
    placed: Placement = GPU,
) -> Tensor:
    """Return pixels_BCFHW in [0, 1] as `sample` and `evaluate` draw them."""
    size = Size(sampling.height, sampling.width, sampling.num_frames)
    samples = [Sample(PromptItem(prompt), size) for prompt in prompts]
    conditions = Conditions(cache, folder, device(), reader_of(facts, folder), samples_per_file=1)
    conditions.text.fill([*prompts, sampling.negative_prompt or ""])
    vae = folder.load_vae(device())
    base = base_of(folder, placed)
    pipeline = PlacedPipeline(folder, sampling, conditions, placed, vae, facts, base)
    drawn_BCFHW = pipeline.draw(samples, seeds, sampling.steps, Progress("samples", sampling.steps))
    pipeline.close()
    return drawn_BCFHW
