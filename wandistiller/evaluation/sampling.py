"""Settings of sampling a finished pipeline, with their problems, and what follows from them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from wandistiller.checkpoint.facts import Facts
from wandistiller.data.lines import prompt_problems
from wandistiller.distributed.sequence_parallel import SHARED
from wandistiller.experts import Expert
from wandistiller.flow import EULER, TRAIN_TIMESTEPS, FewSteps
from wandistiller.network.folder import Folder
from wandistiller.network.sampling import few_steps
from wandistiller.utils.errors import impossible_values, problem
from wandistiller.utils.images import can_write_mp4

RANGES = [
    *((key, 1, 10**9) for key in ("height", "width", "num_frames", "num_prompts", "batch", SHARED)),
    ("steps", 1, int(TRAIN_TIMESTEPS)),
    ("seed", 0, 2**63 - 1),
    ("guidance_scale", 0, 1000),
    ("guidance_scale_2", 0, 1000),
]
"""Setting, least value, largest value."""

STEPS = 40
"""Sampling steps where nothing says otherwise."""


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


def sampling_problems(folder: Folder, sampling: Sampling) -> list[str]:
    """Reasons why a pipeline cannot sample with settings whose numbers alone are possible."""
    size = sampling.height, sampling.width, sampling.num_frames
    problems = size_problems(folder, *size)
    if sampling.num_frames > 1 and not can_write_mp4():
        remedy = "MP4 files need: pip install av."
        problems.append(problem(folder.name, "num_frames", sampling.num_frames, remedy))
    return problems


def guidance_lines(facts: Facts, sampling: Sampling) -> list[str]:
    """Say that a student gets guidance that it has learnt already."""
    folded = max(facts.guidance_scale or 0, facts.guidance_scale_2 or 0) > 1
    if not folded or max(sampling.guidance_scale, sampling.guidance_scale_2 or 0) <= 1:
        return []
    return ["warning   the student has its teacher's guidance folded in: made for --guidance_scale 1"]


def scales(sampling: Sampling) -> dict[Expert, float]:
    """Guidance scale of each expert; one number is for both, as in WanPipeline."""
    second = sampling.guidance_scale if sampling.guidance_scale_2 is None else sampling.guidance_scale_2
    return {Expert.HIGH_NOISE: sampling.guidance_scale, Expert.LOW_NOISE: second}


def sampler(folder: Folder, facts: Facts, steps: int) -> FewSteps | None:
    """Return the noise levels of a student of few steps in any number of them; None of another pipeline.

    Its experts change where those of its own number do, as its card says.

    Args:
        folder: of the student.
    """
    if not facts.few_steps:
        return None
    boundary = facts.boundary if facts.has_boundary else folder.boundary
    boundary = None if folder.boundary is None else boundary
    return few_steps(facts.shift, steps, boundary, facts.sampler or EULER)
