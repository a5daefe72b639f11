"""`wandistiller export`: write a checkpoint in one of the formats, and upload it to the hub if wanted."""

from typing import Any

import torch

from wandistiller.export import hub
from wandistiller.export.formats.base import flag_problems, formats
from wandistiller.export.source import read_source
from wandistiller.utils.errors import ConfigError, inside_problems
from wandistiller.wan.pipeline import TINY


def run(flags: dict[str, Any]) -> None:
    """Write the files, print their paths, and upload them."""
    name = "lora" if flags["adapter"] else flags["format"]
    problems = flag_problems(name, flags)
    if flags["private"] and not flags["push_to_hub"]:
        problems.append("command line: `private` is given without `push_to_hub`. Give both, or remove it.")
    if problems:
        raise ConfigError(*problems)
    repository = hub.check(flags["push_to_hub"]) if flags["push_to_hub"] else ""
    settings = flags | {"dtype": getattr(torch, flags["dtype"]), "repository": repository}
    source = read_source(flags["checkpoint"], flags["ema"])
    teacher = source.facts["teacher_path"]
    inputs = {"checkpoint": source.folder} | ({} if teacher in TINY else {"the teacher": teacher})
    if problems := inside_problems("output", flags["output"], inputs):
        raise ConfigError(*problems)
    exported = formats()[name].from_flags(settings).write(source, flags["output"])
    for path in exported:
        print(path)
    if repository:
        print(hub.push(exported, repository, flags["private"]))
