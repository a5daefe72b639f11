"""Items that `sample` and `evaluate` are asked to draw: prompts and, for image-to-video, first frames."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from wandistiller.data.dataset import EMBEDDED, FIRST_FRAMES, PromptItem, read_dataset
from wandistiller.data.lines import LISTS, prompt_problems
from wandistiller.utils.errors import ConfigError, problem
from wandistiller.wan.pipeline import WanFolder


def read_items(words: list[str], images: Sequence[str] = ()) -> list[PromptItem]:
    """Return texts as they are, or the rows of one file, folder or embedded set.

    Args:
        images: the first frame of each clip, or of all.
    """
    first = os.path.expanduser(words[0])  # no shell does it in `--prompts=~/x`
    if len(words) == 1 and (first in {*EMBEDDED, *FIRST_FRAMES} or _names_a_file(first)):
        items = list(read_dataset(first, first_frames=True))
    elif problems := prompt_problems("command line", "prompts", words):
        raise ConfigError(*problems)
    else:
        items = [PromptItem(word) for word in words]
    files = [Path(image).expanduser() for image in images]
    if missing := [file for file in files if not file.is_file()]:
        raise ConfigError(f"command line: `image`: no such file: {missing[0]}. Fix the name.")
    if files and len(files) not in (1, len(items)):
        found = f"{len(files)} images for {len(items)} prompts"
        raise ConfigError(problem("command line", "image", found, "Give one of each, or one of all."))
    files = files * len(items) if len(files) == 1 else files
    return [PromptItem(i.prompt, image=f) for i, f in zip(items, files, strict=True)] if files else items


def image_problems(folder: WanFolder, items: list[PromptItem], *, given: bool = False) -> list[str]:
    """List the problem of first frames that a pipeline needs or, if they are `given`, does not take."""
    if not folder.config.takes_image:
        remedy = "It makes clips of text alone; leave it out."
        return [problem(folder.name, "image", "given", remedy)] if given else []
    if without := next((item.prompt for item in items if not item.begins_with), None):
        remedy = "Give rows with `image` or `video`, or for `sample` --image."
        return [
            f"{folder.name} makes clips that begin with a given image, but {json.dumps(without)} has none. "
            + remedy
        ]
    if folder.config.pos_embed_seq_len and (first := next((i.image for i in items if i.image), None)):
        remedy = "Give videos, which have both."
        return [f"{folder.name} is given the first and the last frame, but {first} is one image. {remedy}"]
    return []


def _names_a_file(word: str) -> bool:
    """Return whether a text is meant as a path, be it there or not."""
    like_one = "/" in word and not any(letter.isspace() for letter in word)
    # not Path.exists, which raises OSError of a long text (Python 3.11)
    return like_one or word.lower().endswith(LISTS) or os.path.lexists(word)
