"""`wandistiller sample`: images or videos of a pipeline folder for some prompts."""

from typing import Any

from wandistiller.distributed import collectives
from wandistiller.evaluation.draw_samples import (
    Sampling,
    number_problems,
    read_prompts,
    resolve_dtype,
    sample,
)
from wandistiller.utils.errors import ConfigError, folder_problems, inside_problems
from wandistiller.wan.pipeline import open_wan, usual_for


def run(flags: dict[str, Any]) -> None:
    """Check the flags, sample, print the files' paths."""
    collectives.init()
    folder = open_wan(flags["model"])
    usual = usual_for(folder)
    height, width = flags["height"] or usual.height, flags["width"] or usual.width
    keys = ("num_frames", "steps", "guidance_scale", "guidance_scale_2", "negative_prompt")
    settings = Sampling(height=height, width=width, **{key: flags[key] for key in keys})
    problems = number_problems("sample", flags) + folder_problems("output", flags["output"])
    problems += inside_problems("output", flags["output"], {"model": folder.path})
    if problems := problems or folder.size_problems(height, width, flags["num_frames"]):
        raise ConfigError(*problems)
    prompts, dtype = read_prompts(flags["prompts"]), resolve_dtype(flags["dtype"])
    for file in sample(flags["model"], prompts, flags["output"], settings, flags["seed"], dtype):
        print(file)
