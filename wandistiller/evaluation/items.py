"""Items that `sample` and `evaluate` are asked to draw: prompts and, for image-to-video, first frames."""

import os
from collections.abc import Sequence
from pathlib import Path

from wandistiller.checkpoint.facts import Facts
from wandistiller.data.colours import WHITE, background_of
from wandistiller.data.conditions import given_frames, given_problems
from wandistiller.data.dataset import EMBEDDED, FIRST_FRAMES, PromptItem, read_dataset
from wandistiller.data.lines import LISTS, prompt_problems
from wandistiller.data.media import CROP, MediaError, MediaReader, Size
from wandistiller.data.tensor_cache import Sample
from wandistiller.network.folder import Folder
from wandistiller.utils.errors import ConfigError, problem


def read_items(
    words: list[str], images: Sequence[str] = (), last_images: Sequence[str] = ()
) -> list[PromptItem]:
    """Return texts as they are, or the rows of one file, folder or embedded set.

    Args:
        images: the first frame of each clip, or of all.
        last_images: the same of the last frame.
    """
    first = os.path.expanduser(words[0])  # no shell does it in `--prompts=~/x`
    is_path = "/" in first and not any(letter.isspace() for letter in first)  # be it there or not
    # not Path.exists, which raises OSError of a long text (Python 3.11)
    is_path = is_path or first.lower().endswith(LISTS) or os.path.lexists(first)
    if len(words) == 1 and (is_path or first in {*EMBEDDED, *FIRST_FRAMES}):
        items = list(read_dataset(first, first_frames=True))
    elif problems := prompt_problems("command line", "prompts", words):
        raise ConfigError(*problems)
    else:
        items = [PromptItem(word) for word in words]
    first = _of_each("image", images, len(items))
    last = _of_each("last_image", last_images, len(items))
    if any(last) and not any(first):
        raise ConfigError(problem("command line", "last_image", last_images[0], "Give `image` too."))
    if not any(first):
        return items
    if there := next((item.begins_with for item in items if item.begins_with), None):
        remedy = f"{words[0]} has images of its own, such as {there}. Leave this out, or give prompts alone."
        raise ConfigError(problem("command line", "image", images[0], remedy))
    return [PromptItem(i.prompt, None, *ends) for i, *ends in zip(items, first, last, strict=True)]


def _of_each(key: str, images: Sequence[str], number: int) -> list[Path | None]:
    """Return the files of a flag for a number of prompts; None for each if there are none."""
    files = [Path(os.path.expanduser(image)) for image in images]
    if missing := [file for file in files if not file.is_file()]:
        raise ConfigError(f"command line: `{key}`: no such file: {missing[0]}. Fix the name.")
    if files and len(files) not in (1, number):
        numbers = f"{len(files)} images for {number} prompts"
        raise ConfigError(problem("command line", key, numbers, "Give one of each, or one of all."))
    return files if len(files) == number else (files or [None]) * number


def image_problems(folder: Folder, items: list[PromptItem], *, by_flag: bool = False) -> list[str]:
    """List the problem of first frames that a pipeline needs, or does not take where given `by_flag`."""
    if not folder.config.takes_image:
        remedy = "It makes clips of text alone; leave it out."
        return [problem(folder.name, "image", "given", remedy)] if by_flag else []
    return given_problems(folder, items)


def reader_of(facts: Facts, folder: Folder) -> MediaReader:
    """Return how given frames are read: as in the run that made a model, else cropped, over white."""
    background = background_of(facts.background) if facts.background else WHITE
    return MediaReader(facts.video_fps or float(folder.fps), background, facts.fit or CROP)


def frame_problems(folder: Folder, reader: MediaReader, items: list[PromptItem], size: Size) -> list[str]:
    """List the images and videos whose given frames cannot be used, with the reasons; all are read."""
    problems = []
    for item in items if folder.config.takes_image else []:
        try:
            given_frames(folder, reader, Sample(item, size))
        except MediaError as error:
            problems.append(f"{item.begins_with}: {error}.")
    return problems
