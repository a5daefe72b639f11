"""`wandistiller sample`: images or videos of a pipeline folder for some prompts."""

from wandistiller.cli.flags import SampleFlags
from wandistiller.config.cross_checks import division_problems
from wandistiller.config.validate import collecting
from wandistiller.distributed import collectives
from wandistiller.distributed.sequence_parallel import Ranks
from wandistiller.evaluation.candidates import Candidate, read_candidate
from wandistiller.evaluation.draw_samples import (
    STEPS,
    Sampling,
    number_problems,
    read_prompts,
    resolve_dtype,
    sample,
    sampling_problems,
)
from wandistiller.utils.errors import ConfigError, folder_problems, inside_problems
from wandistiller.wan.added_lora import added_lines
from wandistiller.wan.pipeline import usual_for


def run(flags: SampleFlags) -> None:
    """Check the flags, sample, print the files' paths. Collective."""
    with collectives.raise_on_all_ranks():
        model, prompts, settings = _read(flags)
    dtype = resolve_dtype(flags.dtype)
    collectives.init()
    for line in added_lines(model.folder.added):
        collectives.log0("%s", line)
    ranks = Ranks.in_groups_of(flags.context_parallel)
    files = sample(model, prompts, flags.output, settings, flags.seed, dtype, ranks)
    if collectives.rank() == 0:
        print(*files, sep="\n")
    collectives.destroy()


def _read(flags: SampleFlags) -> tuple[Candidate, list[str], Sampling]:
    """Check the flags; return the pipeline, the prompts and how to sample.

    Raises:
        ConfigError: with every problem found.
    """
    problems = number_problems("sample", vars(flags)) + folder_problems("output", flags.output)
    with collecting(problems):
        prompts = read_prompts(flags.prompts)
    with collecting(problems):
        model = read_candidate(flags.model, flags.lora or [], flags.strength)
        folder = model.folder
        trained, usual = model.trained, usual_for(folder)
        settings = Sampling(
            height=flags.height or usual.height,
            width=flags.width or usual.width,
            num_frames=flags.num_frames,
            steps=flags.steps or (trained.steps if trained else STEPS),
            guidance_scale=flags.guidance_scale,
            guidance_scale_2=flags.guidance_scale_2,
            negative_prompt=flags.negative_prompt,
        )
        problems += sampling_problems(folder, settings)
        size = settings.height, settings.width, settings.num_frames
        heads = {"The pipeline": folder.config.num_attention_heads}
        patches = {size: folder.tokens(*size)}
        problems += division_problems(
            "sample", flags.context_parallel, collectives.world_size(), heads, patches
        )
        problems += inside_problems("output", flags.output, {"model": folder.path})
    if problems:
        raise ConfigError(*problems)
    return model, prompts, settings
