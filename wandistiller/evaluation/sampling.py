"""Settings of sampling a finished pipeline, with their problems, and what follows from them."""

from dataclasses import dataclass
from typing import Any

from wandistiller.checkpoint.facts import Facts
from wandistiller.data.lines import prompt_problems
from wandistiller.experts import Expert
from wandistiller.flow import EULER, FewSteps
from wandistiller.network.folder import Folder
from wandistiller.network.sampling import few_steps
from wandistiller.utils.errors import impossible_values, problem
from wandistiller.utils.images import can_write_mp4
from wandistiller.utils.validation import types_of, value_problems

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


def flag_problems(where: str, flags: Any) -> list[str]:
    """List the flags of a command that are wrong by themselves, and a negative prompt without text."""
    settings = {key: value for key, value in vars(flags).items() if value is not None}
    problems = impossible_values(where, settings) or value_problems(where, settings, types_of(type(flags)))
    negative = [settings["negative_prompt"]] if "negative_prompt" in settings else []
    return problems + prompt_problems(where, "negative_prompt", negative, none=True)


def size_problems(folder: Folder, height: int, width: int, num_frames: int) -> list[str]:
    """Problems with sizes for a pipeline; none of sizes that `flag_problems` has."""
    return folder.size_problems(height, width, num_frames) if min(height, width, num_frames) > 0 else []


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
