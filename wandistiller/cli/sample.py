"""`wandistiller sample`: images or videos of a pipeline folder for some prompts."""

from wandistiller.cli.flags import SampleFlags
from wandistiller.data.dataset import PromptItem
from wandistiller.data.media import Size
from wandistiller.distributed import collectives
from wandistiller.distributed.sequence_parallel import Ranks, division_problems
from wandistiller.evaluation import draw_samples, sampling
from wandistiller.evaluation.candidates import (
    Candidate,
    frame_problems,
    image_problems,
    read_candidate,
    read_items,
    reader_of,
)
from wandistiller.planner.sampling import Drawing, choose, read_placed
from wandistiller.teacher.placements.base import Placement
from wandistiller.utils.errors import ConfigError, collecting, folder_problems, inside_problems


def run(flags: SampleFlags) -> None:
    """Check the flags, sample, print the files' paths. Collective."""
    with collectives.raise_on_all_ranks():
        model, items, settings, placement = read_sampling(flags)
    collectives.init()
    for line in [*model.lines, *sampling.guidance_lines(model.facts, settings)]:
        collectives.log0("%s", line)
    sharers = flags.context_parallel
    placement, _ = choose(placement, Drawing([model.folder], settings, 1, sharers))
    ranks = Ranks.in_groups_of(sharers)
    how = settings, flags.seed, placement, ranks, flags.layout
    files = draw_samples.sample(model, items, flags.output, *how)
    collectives.show(*files)
    collectives.destroy()


def read_sampling(flags: SampleFlags) -> tuple[Candidate, list[PromptItem], sampling.Sampling, Placement]:
    """Check the flags; return the pipeline, what to sample, how and where; ConfigError has every problem."""
    problems, items = sampling.flag_problems("sample", flags), []
    problems += folder_problems("output", flags.output)
    with collecting(problems):
        items = read_items(flags.prompts, flags.image or [], flags.last_image or [])
        problems += draw_samples.name_problems(items) if flags.layout == draw_samples.VBENCH else []
    with collecting(problems):
        model = read_candidate(flags.model, flags.lora or [], flags.strength)
        folder = model.folder
        facts, usual = model.facts, folder.usual
        settings = sampling.Sampling(
            height=flags.height or facts.height or usual.height,
            width=flags.width or facts.width or usual.width,
            num_frames=flags.num_frames or facts.num_frames or folder.shortest,
            steps=flags.steps or (facts.steps if facts.few_steps else sampling.STEPS),
            guidance_scale=flags.guidance_scale,
            guidance_scale_2=flags.guidance_scale_2,
            negative_prompt=flags.negative_prompt,
        )
        problems += sampling.sampling_problems(folder, settings)
        problems += image_problems(folder, items, by_flag=bool(flags.image)) if items else []
        size = settings.height, settings.width, settings.num_frames
        world = collectives.world_size()
        with collecting(problems):
            how = flags.teacher_deepspeed_config, flags.dtype
            placement = read_placed(*how, [folder], world, model.weights)
            heads = {"The pipeline": folder.config.num_attention_heads} if not placement.on_one_rank else {}
            patches = {size: folder.tokens(*size)}
            problems += division_problems("sample", flags.context_parallel, world, heads, patches)
        problems += inside_problems("output", flags.output, {"model": folder.path})
    if problems := problems or frame_problems(folder, reader_of(model.facts, folder), items, Size(*size)):
        raise ConfigError(*problems)
    return model, items, settings, placement
