"""`wandistiller sample`: images or videos of a pipeline folder for some prompts."""

from typing import Any

from wandistiller.config.cross_checks import SHARED, division_problems
from wandistiller.config.validate import collecting
from wandistiller.distributed import collectives, sequence
from wandistiller.evaluation.draw_samples import (
    STEPS,
    Sampling,
    number_problems,
    read_prompts,
    resolve_dtype,
    sample,
    sampling_problems,
)
from wandistiller.export.source import trained_steps
from wandistiller.utils.errors import ConfigError, folder_problems, inside_problems
from wandistiller.wan.defaults import Usual
from wandistiller.wan.pipeline import open_wan, student_of, usual_for


def run(flags: dict[str, Any]) -> None:
    """Check the flags, sample, print the files' paths. Collective."""
    with collectives.raise_on_all_ranks():
        prompts, settings = _read(flags)
    dtype = resolve_dtype(flags["dtype"])
    collectives.init()
    sequence.share(flags[SHARED])
    files = sample(flags["model"], prompts, flags["output"], settings, flags["seed"], dtype)
    if collectives.rank() == 0:
        print(*files, sep="\n")
    collectives.destroy()


def _read(flags: dict[str, Any]) -> tuple[list[str], Sampling]:
    """Check the flags; return the prompts and how to sample.

    Raises:
        ConfigError: with every problem found.
    """
    flags["model"] = student_of(flags["model"])
    problems = number_problems("sample", flags) + folder_problems("output", flags["output"])
    with collecting(problems):
        prompts = read_prompts(flags["prompts"])
    with collecting(problems):
        folder = open_wan(flags["model"])
        trained = trained_steps(folder.path)
        flags["steps"] = flags["steps"] or (trained.steps if trained else STEPS)
        settings = _settings(flags, usual_for(folder))
        problems += sampling_problems(folder, settings)
        size = settings.height, settings.width, settings.num_frames
        heads = {"The pipeline": folder.config["num_attention_heads"]}
        patches = {size: folder.tokens(*size)}
        problems += division_problems("sample", flags[SHARED], collectives.world_size(), heads, patches)
        problems += inside_problems("output", flags["output"], {"model": folder.path})
    if problems:
        raise ConfigError(*problems)
    return prompts, settings


def _settings(flags: dict[str, Any], usual: Usual) -> Sampling:
    height, width = flags["height"] or usual.height, flags["width"] or usual.width
    keys = ("num_frames", "steps", "guidance_scale", "guidance_scale_2", "negative_prompt")
    return Sampling(height=height, width=width, **{key: flags[key] for key in keys})
