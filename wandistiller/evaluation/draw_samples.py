"""The files that `wandistiller sample` draws with a finished pipeline: PNGs or MP4s, and one grid."""

import re
from pathlib import Path

from torch import Tensor

from wandistiller.data.conditions import Conditions
from wandistiller.data.dataset import PromptItem
from wandistiller.data.media import Size
from wandistiller.data.tensor_cache import Sample
from wandistiller.distributed import collectives
from wandistiller.distributed.collectives import device
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.round_robin import number_of_rounds, round_robin
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.evaluation.candidates import Candidate, reader_of
from wandistiller.evaluation.pipelines import PlacedPipeline, base_of
from wandistiller.evaluation.sampling import Sampling, sampling_problems
from wandistiller.teacher.placements.base import Placement
from wandistiller.utils.errors import ConfigError, problem
from wandistiller.utils.files import atomic, read_json, write_json
from wandistiller.utils.images import save_grid, to_pil, write_mp4

LIST = "wandistiller_samples.json"
"""Prompt by file, of the last call that drew into a folder; the next one deletes these files."""
CACHE = "cache"
"""Folder of the encoded prompts and given frames, beside the files."""
VBENCH = "vbench"
"""Layout, and folder, of PROMPT-0.mp4 to PROMPT-4.mp4 alone: VBench takes its ending from any file there."""
VIDEOS = 5
"""Videos of a prompt that VBench asks for."""
LONGEST = 210
"""Bytes of a prompt that names a file; while it is written, 40 are added. Those of VBench have up to 210."""


def sample(
    model: Candidate,
    items: list[PromptItem],
    output: Path,
    sampling: Sampling,
    seed: int,
    placement: Placement,
    ranks: Ranks = ALONE,
    layout: str = "numbered",
) -> list[Path]:
    """Write one PNG or MP4 per prompt, sampled from seed, seed + 1, ..., and grid.png. Collective.

    In the layout VBENCH there are VIDEOS of each prompt, each from the next seed, and no grid. The ranks
    share the prompts. The text encoder is freed before the networks are loaded.

    Raises:
        ConfigError: `model` or `sampling` is wrong, before anything is loaded.
    """
    folder, facts = model.folder, model.facts
    if problems := sampling_problems(folder, sampling):
        raise ConfigError(*problems)
    folder.require_weights()
    names, items = _named(items, layout)
    size = Size(sampling.height, sampling.width, sampling.num_frames)
    samples, prompts = [Sample(item, size) for item in items], [item.prompt for item in items]
    how = {"samples_per_file": 1, "dtype": placement.engine.dtype}
    conditions = Conditions(output / CACHE, folder, device(), reader_of(facts, folder), **how)
    conditions.text.fill([*prompts, sampling.negative_prompt or ""])
    if unusable := conditions.fill_frames(samples):
        raise ConfigError(*sorted(unusable.values()))
    vae, base = folder.load_vae(device()), base_of(folder, placement, ranks)
    pipeline = PlacedPipeline(folder, sampling, conditions, placement, vae, facts, base, ranks=ranks)
    drawn: dict[int, tuple[Path, Tensor | None]] = {}
    numbers, steps = list(range(len(items))), sampling.steps
    progress = Progress("samples", number_of_rounds(numbers, ranks) * steps)
    for _, i, counts in round_robin(numbers, ranks):
        video_CFHW = pipeline.draw([samples[i]], [seed + i], steps, progress)[0]
        if counts:
            frames = [to_pil(frame_CHW) for frame_CHW in video_CFHW.unbind(1)]
            file = output / f"{names[i]}{'.png' if len(frames) == 1 else '.mp4'}"
            with atomic(file) as temporary:
                if len(frames) == 1:
                    frames[0].save(temporary, format="PNG")
                else:
                    write_mp4(temporary, lambda frames=frames: frames, folder.fps)
            middle_CHW = video_CFHW[:, video_CFHW.shape[1] // 2].clone() if layout != VBENCH else None
            drawn[i] = file, middle_CHW
    pipeline.close()
    for of_rank in collectives.gather_objects(drawn):
        drawn |= of_rank
    files, images = zip(*(drawn[i] for i in numbers), strict=True)
    if collectives.rank() == 0:
        for name in _made(output) - {file.name for file in files}:
            (output / name).unlink(missing_ok=True)
        write_json(output / LIST, dict(zip((file.name for file in files), prompts, strict=True)))
        if layout != VBENCH:
            save_grid(output / "grid.png", {"": list(images)}, prompts)
    return [*files, output / "grid.png"] if layout != VBENCH else [output / VBENCH]


def _named(items: list[PromptItem], layout: str) -> tuple[list[str], list[PromptItem]]:
    """Return the files' names without ending, and the item of each."""
    if layout != VBENCH:
        return [f"{number:04d}" for number in range(len(items))], items
    names = [f"{VBENCH}/{item.prompt}-{number}" for item in items for number in range(VIDEOS)]
    return names, [item for item in items for _ in range(VIDEOS)]


def name_problems(items: list[PromptItem]) -> list[str]:
    """List the prompts that no file can be named by."""
    remedy = f"A file cannot have it as its name: a slash, or more than {LONGEST} bytes. Write another."
    wrong = (i.prompt for i in items if "/" in i.prompt or len(i.prompt.encode()) > LONGEST)
    return [problem("sample", "prompts", prompt, remedy) for prompt in wrong]


def _made(output: Path) -> set[str]:
    """Return the names of the files that an earlier call has made in a folder."""
    names = read_json(output / LIST) if (output / LIST).is_file() else ()
    return {name for name in names if re.fullmatch(r"\d+\.(png|mp4)", name)}
