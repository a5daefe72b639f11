"""LoRA files added to a pipeline's networks as their weights are read: W + strength B A."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AllowInfNan
from torch import Tensor, nn

from wandistiller.experts import Expert
from wandistiller.utils.errors import ConfigError, problem
from wandistiller.utils.files import file_digest
from wandistiller.utils.validation import Text, check, types_of
from wandistiller.wan.lora_experts import expert_of, files_of, require_one_side, unclear_problems
from wandistiller.wan.lora_files import LowRank, left_out_words, read_lora
from wandistiller.wan.transformer import shapes
from wandistiller.wan.transformer_config import TransformerConfig
from wandistiller.wan.weight_reader import WeightReader

NOT_FINITE = "LoRA files: with them `{}` holds numbers that are not finite. Fetch them again, or add less."


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedLora:
    """A LoRA file and how it is added."""

    file: Text
    """Of diffusers, ComfyUI or kohya's trainers."""
    strength: Annotated[float, AllowInfNan(False)] = 1.0
    expert: Literal["high_noise", "low_noise"] | None = None
    """The network that it is added to; None: to each."""

    @property
    def said(self) -> Expert | None:
        """The expert that it is said to be for."""
        return Expert.of_key(self.expert)

    def is_for(self, expert: Expert) -> bool:
        return self.said in (None, expert)

    @property
    def digest(self) -> str:
        """Hash of the file's content."""
        return file_digest(Path(self.file))

    @property
    def identity(self) -> list[Any]:
        """Equal for the same change, wherever the file lies."""
        return [self.digest, self.strength, self.expert]


def read_added(where: str, key: str, given: Any) -> list[AddedLora]:
    """Check a setting: a file, an object with the fields of `AddedLora`, or a list of such.

    Raises:
        ConfigError: with every problem.
    """
    problems, added = [], []
    for number, one in enumerate(given if isinstance(given, list) else [given]):
        name = f"{key}.{number}." if isinstance(given, list) else f"{key}."
        found, good = check(where, {"file": one} if isinstance(one, str) else one, types_of(AddedLora), name)
        if not found and "file" not in good:
            found = [f"{where}: `{name}file` is missing. Write the name of a LoRA file."]
        problems += found
        added += [] if found else [AddedLora(**good)]
    if problems:
        raise ConfigError(*problems)
    return added


def read_recorded(where: str, given: list[dict[str, Any]] | None) -> list[AddedLora]:
    """Read the LoRA files of a run's teacher, as its facts name them.

    Raises:
        ConfigError: one is not here; its name may be relative, and an export has the last part alone.
    """
    added = read_added(where, "teacher_lora", given or [])
    remedy = "No such file is here: start in the folder that the run was started in, or put it here."
    away = [one.file for one in added if not Path(one.file).exists()]
    if away:
        raise ConfigError(*(problem(where, "teacher_lora", file, remedy) for file in away))
    return added


def with_experts(
    where: str, added: Iterable[AddedLora], networks: Iterable[Expert], write: str
) -> list[AddedLora]:
    """Replace folders by the files in them, and name the expert that each file is for, of two.

    Args:
        networks: of the pipeline that they are added to.
        write: what to write for the file of an expert, with {expert} and {file}.

    Raises:
        ConfigError: files look like those of two experts, and nothing says which is whose.
    """
    files = [replace(one, file=str(file)) for one in added for file in files_of(Path(one.file), one.said)]
    unsaid = [Path(one.file) for one in files if not one.said]
    if len([*networks]) == 1:
        require_one_side(where, unsaid)
        return files
    own = {file: expert_of(file) for file in unsaid}
    if problems := unclear_problems(where, [file for file, expert in own.items() if not expert], write):
        raise ConfigError(*problems)
    experts = [one.said or own[Path(one.file)] for one in files]
    return [replace(one, expert=expert and expert.key) for one, expert in zip(files, experts, strict=True)]


def added_problems(
    where: str, added: Iterable[AddedLora], configs: dict[Expert, TransformerConfig]
) -> list[str]:
    """List the problems of LoRA files that are to be added to these networks; weights are not read."""
    problems = []
    for one in added:
        experts = [expert for expert in configs if one.is_for(expert)]
        if not experts or one.expert and len(configs) == 1:
            problems.append(f'{where}: `expert` is "{one.expert}", but it has one network. Leave it out.')
            continue
        try:
            read = read_lora(Path(one.file), weights=False)
        except ConfigError as error:
            problems += error.problems
            continue
        if other := read.other_layer(shapes(configs[experts[0]])):
            text = f"which changes `{other}`, and {where} has no such layer of that shape"
            problems.append(f"{one.file}: is a LoRA {text}. Give one that was made for it.")
    return problems


def added_lines(added: Iterable[AddedLora]) -> list[str]:
    """Say which LoRA file is added to what, and which of its keys are not."""
    where = {None: "each network"} | {expert: f"the {expert.in_words}" for expert in Expert}
    lines = []
    for one in added:
        lines.append(f"lora      {one.file}, strength {one.strength:g}, on {where[one.said]}")
        if left := read_lora(Path(one.file), weights=False).left_out:
            lines.append(f"warning   {one.file}: {left_out_words(left)}")
    return lines


def added_changes(added: Iterable[AddedLora], expert: Expert, *, weights: bool = True) -> dict[str, LowRank]:
    """Return what all files together change of each layer, by diffusers' names, strengths in it; float32.

    Args:
        weights: read them; without, the changes are on the meta device.
    """
    changes: dict[str, LowRank] = {}
    for one in added:
        if not one.is_for(expert):
            continue
        for layer, (a, b) in read_lora(Path(one.file), weights=weights).layers.items():
            changes[layer] = sum_of(changes.get(layer), LowRank(a, b * one.strength))
    return changes


@torch.no_grad()
def add_changes(network: nn.Module, changes: dict[str, LowRank]) -> None:
    """Add each change to the weight of its layer, in float32."""
    for layer, (a, b) in changes.items():
        weight = network.get_submodule(layer).weight
        weight.copy_(weight.float() + b @ a)
        if not weight.isfinite().all():
            raise ConfigError(NOT_FINITE.format(layer))


def sum_of(first: LowRank | None, second: LowRank | None) -> LowRank:
    """Return the sum of two changes of a layer, of which one may be missing: B A = B1 A1 + B2 A2."""
    if not (first and second):
        return first or second
    return LowRank(torch.cat([first.a, second.a]), torch.cat([first.b, second.b], dim=1))


def as_settings(added: Iterable[AddedLora]) -> list[dict[str, Any]]:
    """Return what `read_added` reads."""
    return [{key: value for key, value in asdict(one).items() if value is not None} for one in added]


class MergingReader(WeightReader):
    """The tensors of a transformer folder with low-rank changes added, in float32, before they are cast."""

    def __init__(self, folder: Path, changes: dict[str, LowRank]):
        super().__init__(folder)
        self._changes = {f"{layer}.weight": change for layer, change in changes.items()}

    def read(self, name: str, out: Tensor, first: int = 0) -> None:
        if not (change := self._changes.get(name)):
            super().read(name, out, first)
            return
        out_N = out.view(-1)[: max(0, self.stored[name].shape.numel() - first)]
        value_N = torch.empty(len(out_N))
        super().read(name, value_N, first)
        # all of the product, as a part of it may be rounded otherwise
        value_N += (change.b @ change.a).view(-1)[first : first + len(out_N)]
        out_N.copy_(value_N)
        extremes = torch.stack(out_N.aminmax()) if len(out_N) else out_N  # makes no copies, as isfinite does
        if not extremes.isfinite().all() and (text := NOT_FINITE.format(name)) not in self.faults:
            self.faults.append(text)
