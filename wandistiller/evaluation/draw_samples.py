"""The files that `wandistiller sample` draws with a finished pipeline: a PNG or MP4 per prompt, one grid."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wandistiller.checkpoint.facts import Facts
from wandistiller.data.conditions import given_frames
from wandistiller.data.dataset import PromptItem
from wandistiller.data.lines import prompt_problems
from wandistiller.data.media import MediaReader, Size
from wandistiller.data.tensor_cache import Sample
from wandistiller.distributed import collectives
from wandistiller.distributed.collectives import device
from wandistiller.distributed.device import memory_size, on_accelerator
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.round_robin import number_of_rounds, round_robin
from wandistiller.distributed.sequence_parallel import ALONE, SHARED, Ranks
from wandistiller.evaluation.candidates import Candidate, reader_of
from wandistiller.flow import EULER, TRAIN_TIMESTEPS
from wandistiller.network.folder import Folder
from wandistiller.network.sampling import few_step_scheduler, few_steps
from wandistiller.utils.errors import ConfigError, impossible_values, problem
from wandistiller.utils.files import atomic, read_json, write_json
from wandistiller.utils.images import can_write_mp4, save_grid, to_pil, write_mp4
from wandistiller.utils.keyed_random import keyed_generator

RANGES = [
    *((key, 1, 10**9) for key in ("height", "width", "num_frames", "num_prompts", "batch", SHARED)),
    ("steps", 1, int(TRAIN_TIMESTEPS)),
    ("seed", 0, 2**63 - 1),
    ("guidance_scale", 0, 1000),
    ("guidance_scale_2", 0, 1000),
]
"""Setting, least value, largest value."""

LIST = "wandistiller_samples.json"
"""Prompt by file, of the last call that drew into a folder; the next one deletes these files."""
STEPS = 40
"""Sampling steps where nothing says otherwise."""

NOT_FINITE = (
    "{}: its samples in {} step(s) are not finite: its weights are not, or what it computes with them is too "
    "large. Try --dtype float32, or give other weights."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Settings of a pipeline call."""

    height: int
    width: int
    num_frames: int = 1
    steps: int = STEPS
    guidance_scale: float = 1.0
    guidance_scale_2: float | None = None
    negative_prompt: str | None = None
    shift: float | None = None
    """Of a teacher's noise levels, as its student's run had; None: the pipeline's own."""


def number_problems(where: str, settings: Mapping[str, object]) -> list[str]:
    """Problems with the numbers and the negative prompt in a pipeline's settings; None is skipped."""
    problems = impossible_values(where, settings)
    for key, least, most in RANGES:
        values = settings.get(key)
        for value in dict.fromkeys(values if isinstance(values, list) else [values]):
            if value is not None and not math.isnan(value) and not least <= value <= most:
                allowed = f"a positive number, at most {most}" if least else f"a number from 0 to {most}"
                problems.append(problem(where, key, value, f"Write {allowed}."))
    if (negative := settings.get("negative_prompt")) is not None:
        problems += prompt_problems(where, "negative_prompt", [negative], none=True)
    return problems


def size_problems(folder: Folder, height: int, width: int, num_frames: int) -> list[str]:
    """Problems with sizes for a pipeline; none of sizes that are `number_problems` for all."""
    sizes = {"height": height, "width": width, "num_frames": num_frames}
    return [] if number_problems("", sizes) else folder.size_problems(**sizes)


def open_pipeline(
    folder: Folder, dtype: torch.dtype, facts: Facts | None = None, ranks: Ranks = ALONE
) -> Any:
    """Load a WanPipeline, its VAE in float32, to the GPU if there is one; ranks may share its sequences.

    With LoRA files of a run that has these `facts` it samples as they are trained for.

    Its parts go there one at a time, by accelerate where that is installed, unless all of them take less than
    half of the free memory.
    """
    pipeline = folder.load_pipeline(dtype, ranks)
    if folder.added and facts and facts.shift:
        pipeline.scheduler = folder.scheduler(facts.shift)
    pipeline.set_progress_bar_config(disable=True)
    if device().type == "cpu":
        return pipeline
    parts = (part for part in pipeline.components.values() if isinstance(part, nn.Module))
    weights = sum(p.nbytes for part in parts for p in part.parameters())
    if find_spec("accelerate") and weights > memory_size()[0] / 2:
        pipeline.enable_model_cpu_offload(device=device())
        return pipeline
    return pipeline.to(device())


def resolve_dtype(name: str) -> torch.dtype:
    """The dtype that --dtype names; `auto` is bfloat16 on a GPU and float32 on the CPU."""
    auto = "bfloat16" if on_accelerator() else "float32"
    return getattr(torch, auto if name == "auto" else name)


def set_steps(pipeline: Any, trained: Facts | None, steps: int, folder: Folder) -> None:
    """Give the pipeline of a few-step student the noise levels of another number of steps than its own.

    Its experts change where those of its own number do, as its card says. One that is the teacher's with LoRA
    files has the noise levels of no number yet.

    Args:
        folder: of the pipeline.
    """
    if trained and (steps != trained.steps or folder.added):
        pipeline.scheduler = few_step_scheduler(trained.shift, steps, trained.sampler or EULER)
        boundary = trained.boundary if trained.has_boundary else folder.boundary
        levels = few_steps(trained.shift, steps, None if folder.boundary is None else boundary)
        pipeline.register_to_config(boundary_ratio=levels.boundary)


def draw(
    pipeline: Any,
    folder: Folder,
    samples: list[Sample],
    seeds: list[int],
    sampling: Sampling,
    progress: Progress | None = None,
    reader: MediaReader | None = None,
) -> Tensor:
    """Sample pixels_BCFHW in [0, 1]; sample i starts from `torch.Generator().manual_seed(seeds[i])`.

    What is drawn of a seed does not depend on the others. Collective.

    Args:
        samples: of an image-to-video pipeline one, which takes one image a call (diffusers 0.42.1).
        reader: how the given frames are read; needed by an image-to-video pipeline.

    Raises:
        ConfigError: on all ranks, if a sample is not finite on any.
    """

    def after_step(*_: Any) -> dict[str, Any]:
        if progress:
            progress.advance()
        return {}

    settings = asdict(sampling)
    steps, _ = settings.pop("steps"), settings.pop("shift")  # the scheduler has it
    if folder.config.takes_image:
        (sample,) = samples
        pixels_CTHW = given_frames(folder, reader, sample)
        frames = [to_pil(p_CHW / 2 + 0.5) for p_CHW in pixels_CTHW.unbind(1)]
        settings |= zip(("image", "last_image"), frames, strict=False)
    with _noise_between_steps(pipeline, seeds):
        frames_BFHWC = pipeline(
            prompt=[sample.item.prompt for sample in samples],
            **settings,
            num_inference_steps=steps,
            generator=[torch.Generator().manual_seed(s) for s in seeds],
            output_type="np",
            callback_on_step_end=after_step,
            max_sequence_length=folder.config.text_tokens,
        ).frames
    pixels_BCFHW = torch.from_numpy(np.asarray(frames_BFHWC)).permute(0, 4, 1, 2, 3)
    whole = pixels_BCFHW.isfinite().all()
    if problems := collectives.gather_problems([] if whole else [NOT_FINITE.format(folder.name, steps)]):
        raise ConfigError(*problems)
    return pixels_BCFHW


@contextmanager
def _noise_between_steps(pipeline: Any, seeds: list[int]) -> Iterator[None]:
    """Give a pipeline's scheduler that takes noise between its steps that of each sample's seed.

    WanPipeline (diffusers 0.42.1) passes it no generator: torch's own, whose stream may be that of the start.
    """
    scheduler = pipeline.scheduler
    if "generator" not in signature(scheduler.step).parameters:
        yield
        return
    generators = [keyed_generator(seed, "fresh") for seed in seeds]
    scheduler.step = partial(scheduler.step, generator=generators)
    try:
        yield
    finally:
        del scheduler.step


def sample(
    model: Candidate,
    items: list[PromptItem],
    output: Path,
    sampling: Sampling,
    seed: int,
    dtype: torch.dtype,
    ranks: Ranks = ALONE,
) -> list[Path]:
    """Write one PNG or MP4 per prompt, sampled from seed, seed + 1, ..., and grid.png. Collective.

    The ranks share the prompts.

    Raises:
        ConfigError: `model` or `sampling` is wrong, before anything is loaded.
    """
    folder = model.folder
    if problems := sampling_problems(folder, sampling):
        raise ConfigError(*problems)
    folder.require_weights()
    pipeline = open_pipeline(folder, dtype, model.facts, ranks)
    set_steps(pipeline, model.trained, sampling.steps, folder)
    drawn: dict[int, tuple[Path, Tensor]] = {}
    numbers = list(range(len(items)))
    reader = reader_of(model.facts, folder)
    size = Size(sampling.height, sampling.width, sampling.num_frames)
    progress = Progress("samples", number_of_rounds(numbers, ranks) * sampling.steps)
    for _, i, counts in round_robin(numbers, ranks):
        samples = [Sample(items[i], size)]
        video_CFHW = draw(pipeline, folder, samples, [seed + i], sampling, progress, reader)[0]
        if counts:
            frames = [to_pil(frame_CHW) for frame_CHW in video_CFHW.unbind(1)]
            file = output / f"{i:04d}{'.png' if len(frames) == 1 else '.mp4'}"
            with atomic(file) as temporary:
                if len(frames) == 1:
                    frames[0].save(temporary, format="PNG")
                else:
                    write_mp4(temporary, lambda frames=frames: frames, folder.fps)
            drawn[i] = file, video_CFHW[:, video_CFHW.shape[1] // 2].clone()
    for of_rank in collectives.gather_objects(drawn):
        drawn |= of_rank
    files, images = zip(*(drawn[i] for i in numbers), strict=True)
    if collectives.rank() == 0:
        prompts = [item.prompt for item in items]
        for name in _made(output) - {file.name for file in files}:
            (output / name).unlink(missing_ok=True)
        write_json(output / LIST, dict(zip((file.name for file in files), prompts, strict=True)))
        save_grid(output / "grid.png", {"": list(images)}, prompts)
    return [*files, output / "grid.png"]


def guidance_lines(facts: Facts, sampling: Sampling) -> list[str]:
    """Say that a student gets guidance that it has learnt already."""
    folded = max(facts.guidance_scale or 0, facts.guidance_scale_2 or 0) > 1
    if not folded or max(sampling.guidance_scale, sampling.guidance_scale_2 or 0) <= 1:
        return []
    return ["warning   the student has its teacher's guidance folded in: made for --guidance_scale 1"]


def output_problems(output: Path) -> list[str]:
    """List the problem of an output folder that has the files of a run."""
    above = next((p for p in (output, *output.parents) if (p / "resolved" / "run.json").is_file()), None)
    here = {file.name for file in output.iterdir()} if output.is_dir() else set()
    ours = {*_made(output), LIST, "grid.png"}  # it must be readable before anything is drawn
    if not above or output != above and here <= ours:
        return []
    remedy = f"Its files would be mixed with the samples. Name a new folder, such as {above / 'drawn'}."
    return [f"`output` is {output}, a folder of the run {above}. {remedy}"]


def _made(output: Path) -> set[str]:
    """Return the names of the files that an earlier call has made in a folder."""
    names = read_json(output / LIST) if (output / LIST).is_file() else ()
    return {name for name in names if re.fullmatch(r"\d+\.(png|mp4)", name)}


def sampling_problems(folder: Folder, sampling: Sampling) -> list[str]:
    """Reasons why a pipeline cannot sample with settings whose numbers alone are possible."""
    size = sampling.height, sampling.width, sampling.num_frames
    problems = size_problems(folder, *size)
    if (second := sampling.guidance_scale_2) is not None and folder.boundary is None:
        problems.append(problem(folder.name, "guidance_scale_2", second, "It has one expert; leave it out."))
    if sampling.negative_prompt is not None and max(sampling.guidance_scale, second or 0) <= 1:
        remedy = "It is used with guidance only; give --guidance_scale above 1, or leave it out."
        problems.append(problem("sample", "negative_prompt", sampling.negative_prompt, remedy))
    if sampling.num_frames > 1 and not can_write_mp4():
        remedy = "MP4 files need: pip install av."
        problems.append(problem(folder.name, "num_frames", sampling.num_frames, remedy))
    return problems
