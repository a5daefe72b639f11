"""`wandistiller export`: write a checkpoint in one of the formats, and upload it to the hub if wanted."""

from dataclasses import fields, replace

import torch

from wandistiller.cli.flags import ExportFlags
from wandistiller.distributed import collectives
from wandistiller.export import hub
from wandistiller.export.output import formats
from wandistiller.export.source import read_source, read_whole_model, require_no_whole_model
from wandistiller.utils.errors import ConfigError, inside_problems, problem
from wandistiller.utils.files import TINY


def run(flags: ExportFlags) -> None:
    name = "lora" if flags.adapter else flags.format
    kind = formats()[name]
    settings = {f.name: v for f in fields(kind) if (v := getattr(flags, f.name, None)) is not None}
    written = kind(**settings | {"dtype": getattr(torch, flags.dtype)})
    problems = _foreign_problems(name, flags) + written.problems()
    if flags.ema is not None and flags.teacher_path:
        problems.append(
            problem("command line", "ema", flags.ema, "A whole model has one kind of weights; remove it.")
        )
    if flags.private and not flags.push_to_hub:
        problems.append("command line: `private` is given without `push_to_hub`. Give both, or remove it.")
    if problems:
        raise ConfigError(*problems)
    repository = hub.check(flags.push_to_hub) if flags.push_to_hub else ""
    if flags.teacher_path:
        source = read_whole_model(str(flags.checkpoint), flags.teacher_path)
    else:
        if name == "lora":
            require_no_whole_model(flags.checkpoint)
        source = read_source(flags.checkpoint, flags.ema)
    if source.facts.is_flow_map and "original" in (name, flags.format):
        text = "is a flow map, and no node of ComfyUI says where its velocity leads"
        raise ConfigError(f"{source.folder}: {text}. Write --format diffusers or lora.")
    teacher = source.facts.teacher_path
    inputs = {"checkpoint": source.folder} | ({} if teacher in TINY else {"the teacher": teacher})
    if problems := inside_problems("output", flags.output, inputs):
        raise ConfigError(*problems)
    exported = replace(written, repository=repository).write(source, flags.output)
    collectives.show(*exported)
    if repository:
        collectives.show(hub.push(exported, repository, flags.private))


def _foreign_problems(name: str, flags: ExportFlags) -> list[str]:
    """Problems with flags that belong to another format than `name`."""
    known, dtype, problems = formats(), flags.dtype, []
    if dtype not in known[name].DTYPES:
        others = " or ".join(f"--format {other}" for other in known if dtype in known[other].DTYPES)
        stored = " or ".join(known[name].DTYPES)
        remedy = f"Only {others} stores it, without --adapter; --format {name} stores {stored}."
        problems.append(problem("command line", "dtype", dtype, remedy))
    fitting = {"format", *(field.name for field in fields(known[name]))}
    for other, kind in known.items():
        keys = [field.name for field in fields(kind) if field.name not in fitting]
        for key in (key for key in keys if getattr(flags, key) is not None):
            how = "--adapter" if other == "lora" else f"--format {other}"
            remedy = f"It belongs to {how}, and --format is {name}; remove it."
            problems.append(problem("command line", key, getattr(flags, key), remedy))
    return problems
