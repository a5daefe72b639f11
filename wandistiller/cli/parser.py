"""The command line. Nothing heavy is imported, so that --help and a wrong flag take no seconds."""

import argparse
import dataclasses
import json
import os
import shutil
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from wandistiller import __version__
from wandistiller.cli import flags
from wandistiller.config.run_config import RunConfig
from wandistiller.teacher.strategies import strategies
from wandistiller.utils.errors import closest, is_text
from wandistiller.utils.files import OTHER_PATHS, PATH_ENDS, at_home

COMMANDS = {
    "prepare": "encode prompts, images, videos, or let the teacher make latents; fills the cache",
    "train": "distil; prepares what the cache lacks, draws pictures, exports the student",
    "export": "a checkpoint -> a diffusers pipeline, original-Wan files (ComfyUI), or a LoRA; to the hub",
    "sample": "a pipeline folder and prompts -> PNG or MP4 files and a grid",
    "evaluate": "teacher and student side by side: scores, velocity error, speed, size",
    "plan": "memory, disk, hours and cost of a run, before anything is loaded; which JSONs fit",
    "report": "a run's curves, pictures, evaluation and settings in one HTML file",
    "doctor": "whether this machine has what a run needs; what to install",
}
OF_RUN = "[--recipe FILE] [any flag below; it wins over the recipe and its JSONs]"
USAGE = dict.fromkeys(("prepare", "train", "plan"), OF_RUN) | {
    "evaluate": "--student_path S [--teacher_path T] [any flag below]"
}
ENDS = {
    "plan": "Exit code 0: it fits, or the recipe that `--recommend` wrote does. 2: it does not, or the input "
    "is wrong.",
}
"""Last sentences of the help of a command."""
IGNORED = "ignored"
"""Destination of flags that are accepted and change nothing."""
UNLISTED = ("sample_interval", "sample_dir")
"""Settings of older command lines that are accepted, and not in the help."""
NAMES_FILES = (*OTHER_PATHS, "lora", "teacher_lora", "image", "last_image", "prompts")
"""Settings beside those with `PATH_ENDS` whose values are, or may be, names of files and folders."""
METAVARS = {int: "INT", float: "NUMBER", str: "TEXT", dict: "JSON", Path: "PATH"}
"""Type of a flag -> the word for its value in the help."""


def parser() -> argparse.ArgumentParser:
    """Build the whole command line; every flag of prepare and train is a field of RunConfig."""
    top = _Parser("wandistiller", description="Distil a large Wan into a small student.", allow_abbrev=False)
    _ignore_local_rank(top)
    top.add_argument("--version", action="version", version=f"wandistiller {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        how: dict[str, Any] = {"help": text, "description": text, "epilog": ENDS.get(name)}
        how["usage"] = f"wandistiller {name} {USAGE[name]}" if name in USAGE else None
        command = commands.add_parser(name, allow_abbrev=False, formatter_class=_Wide, **how)
        _ignore_local_rank(command)
        if issubclass(kind := flags.of(name), flags.RunFlags):
            _add_flags(command, RunConfig)
            _accept_older(command)
        _add_flags(command, kind)
    return top


def _ignore_local_rank(command: argparse.ArgumentParser) -> None:
    """Accept the flag of launchers, before the command (deepspeed) or after; the environment has it too."""
    command.add_argument(
        "--local_rank", "--local-rank", dest=IGNORED, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def _accept_older(command: argparse.ArgumentParser) -> None:
    """Accept the flags of older command lines: other names of settings, and some that change nothing."""
    unlisted: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    # launchers imply the first two; samples are always drawn; data is encoded once, then only read
    needless = ("--distributed", "--multi_gpu", "--save_samples")
    command.add_argument(*needless, dest=IGNORED, action="store_true", **unlisted)
    command.add_argument("--num_workers", dest=IGNORED, **unlisted)
    command.add_argument("--num_steps", dest="max_steps", type=int, **unlisted)
    teacher: dict[str, Any] = {"dest": "teacher_deepspeed_config"}
    command.add_argument("--teacher_on_cpu", action="store_const", const="cpu", **teacher, **unlisted)
    text = "the same as --teacher_deepspeed_config with the name of a shipped JSON"
    listed = {"default": argparse.SUPPRESS, "help": text, "metavar": "NAME", "choices": [*strategies()]}
    command.add_argument_group("older names").add_argument("--teacher_device_strategy", **teacher, **listed)


class _Parser(argparse.ArgumentParser):
    """Print an error once for all ranks."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        """Raise an error at an unknown flag, with the nearest that there is."""
        known, extras = super().parse_known_args(*args, **kwargs)
        for word in extras:
            flag = word.partition("=")[0].lstrip("-")  # dashes alone make no two words alike
            near = closest(flag, [f[2:] for f in self._option_string_actions if f.startswith("--")])
            hint = f" Did you mean `--{near}`?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(extras)}.{hint}".removesuffix("."))
        return known, extras

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            end = "" if message.endswith("?") else "."
            super().error(f"{message}{end} See {self.prog} --help.")
        self.exit(2)


class _Wide(argparse.HelpFormatter):
    """One line a flag, where the terminal allows it."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=max(120, shutil.get_terminal_size().columns))


def _with_default(text: str, default: Any) -> str:
    """Return a flag's help with its default value, unless it has a word about that itself."""
    nothing = default is None or default is False or default in ("", {}, dataclasses.MISSING)
    if nothing or "default" in text:
        return text
    value = " ".join(default) if isinstance(default, list) else default
    return f"{text}; default {value:g}" if isinstance(value, float) else f"{text}; default {value}"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None


def _text_or_json(text: str) -> Any:
    """Return the value of a setting that is a name, or an object or list as in a recipe."""
    return _json(text) if text.lstrip().startswith(("{", "[")) else text


def _of_path(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return `read` for a flag that names files or folders; blank text names none, and Path("") is `.`."""

    def named(text: str) -> Any:
        if not is_text(text):
            what = "holds a character that no file name or prompt can have. Remove it."
            raise argparse.ArgumentTypeError(f"{text!r} {what}")
        if not text.strip():
            remedy = "Write one, or leave the flag out; is a variable of the shell unset?"
            raise argparse.ArgumentTypeError(f"{text!r} is no name and no text. {remedy}")
        return read(text)

    return named


def _add_flags(command: argparse.ArgumentParser, settings: type) -> None:
    """Add the flag of each field; limits of their types are checked later, with the recipe's values."""
    groups: dict[str, Any] = {"": command}
    hints = typing.get_type_hints(settings)
    for f in filter(lambda f: f.metadata, dataclasses.fields(settings)):
        title = f.metadata["group"]
        group = groups[title] = groups.get(title) or command.add_argument_group(title)
        names = f.metadata.get("names") or (f"--{f.name}",)
        needed = f.default is f.default_factory is dataclasses.MISSING and names[0].startswith("--")
        required = {"required": True} if needed else {}
        group.add_argument(*names, **_of_field(f, hints[f.name]), **required)


def _of_field(f: dataclasses.Field, hint: Any) -> dict[str, Any]:
    """Return argparse's settings of the flag of a field, by its type."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    kind = typing.get_origin(kinds[0]) or kinds[0]
    default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    listed = f.metadata["help"] and f.name not in UNLISTED
    text = _with_default(f.metadata["help"], default) if listed else argparse.SUPPRESS
    how: dict[str, Any] = dict(f.metadata["argparse"], default=argparse.SUPPRESS, help=text)
    if kind is bool:
        return {"action": "store_true"} | how
    if kind is typing.Literal:
        return how | {"choices": typing.get_args(kinds[0])}
    if kind is list:
        (kind,) = typing.get_args(kinds[0])
        how["nargs"] = "+"
    name = METAVARS[Path if f.name.endswith(PATH_ENDS) else kind]
    read = _json if kind is dict else _text_or_json if kind is str and dict in kinds else kind
    if f.name.endswith(PATH_ENDS) or f.name in NAMES_FILES:
        read = _of_path(read)
    return {"type": read, "metavar": name} | how


def read(argv: list[str] | None) -> tuple[str, Any]:
    """Return the command's name and its flags, of the type that `flags.of` names."""
    values = at_home(vars(parser().parse_args(argv)))
    values.pop(IGNORED, None)
    kind = flags.of(command := values.pop("command"))
    named = {f.name: values.pop(f.name) for f in dataclasses.fields(kind) if f.name in values}
    return command, kind(**named, **({"settings": values} if values else {}))
