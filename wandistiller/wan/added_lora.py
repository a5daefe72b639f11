"""LoRA files added to a pipeline's networks as their weights are read: W + strength B A."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AllowInfNan
from torch import Tensor

from wandistiller.experts import Expert
from wandistiller.network.adapters import LowRank
from wandistiller.network.weight_reader import Stored, WeightReader
from wandistiller.utils.errors import ConfigError, Place, Problem
from wandistiller.utils.files import file_digest
from wandistiller.utils.validation import Text, check, types_of
from wandistiller.wan.lora_experts import BOTH, SIDES, files_of, require_files, sides_of, split_side
from wandistiller.wan.lora_files import left_out_words, read_lora, require_finite, second_time_in
from wandistiller.wan.transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedLora:
    """A LoRA file and how it is added."""

    file: Text
    """Of diffusers, ComfyUI or kohya's trainers; with `high_noise=` before it, the same as `expert`."""
    strength: Annotated[float, AllowInfNan(False)] = 1.0
    expert: Literal["high_noise", "low_noise", "both"] | None = None
    """The network that it is added to; None: by its name, or of one network to that."""

    @property
    def said(self) -> Expert | None:
        """The one expert that it is for; None: it is for each."""
        return None if self.expert == BOTH else Expert.of_key(self.expert)

    def is_for(self, expert: Expert) -> bool:
        return self.said in (None, expert)

    @property
    def digest(self) -> str:
        """Hash of the file's content."""
        return file_digest(Path(self.file))

    @property
    def identity(self) -> list[Any]:
        """Equal for the same change, wherever the file lies."""
        return [self.digest, self.strength, self.said and self.said.key]


def read_added(where: str, key: str, value: Any) -> list[AddedLora]:
    """Check a setting, which is one of these or a list of such.

    A file, with `high_noise=`, `low_noise=` or `both=` before it where it is for an expert; an object of
    these as keys; or an object with the fields of `AddedLora`.

    Raises:
        ConfigError: with every problem.
    """
    problems, added = [], []
    for number, item in enumerate(value if isinstance(value, list) else [value]):
        name = f"{key}.{number}." if isinstance(value, list) else f"{key}."
        if isinstance(item, dict) and item.keys() & {*SIDES}:
            wrong, good = check(where, item, dict.fromkeys(SIDES, Text), name)
            loras = [{"file": file, "expert": side} for side, file in good.items()]
        else:
            item = {"file": item} if isinstance(item, str) else item
            wrong, good = check(where, item, types_of(AddedLora), name)
            side, good["file"] = split_side(good.get("file", ""))
            loras = [good | ({"expert": side} if side else {})]
            if not wrong and not good["file"]:
                text = f"`{name}file` is missing. Write the name of a LoRA file."
                wrong = [Problem(text, where, f"{name}file")]
        problems += wrong
        added += [] if wrong else [AddedLora(**lora) for lora in loras]
    if problems:
        raise ConfigError(*problems)
    return added


def with_experts(where: Place, added: Sequence[AddedLora], networks: Iterable[Expert]) -> list[AddedLora]:
    """Replace folders by the files in them, and name the expert that each file is for, of two.

    Args:
        networks: of the pipeline that they are added to.

    Raises:
        ConfigError: nothing says for which of two experts a file is.
    """
    files = each_file(added)
    sides = sides_of(where, [(Path(lora.file), lora.expert or "") for lora in files], len([*networks]))
    return [replace(lora, expert=side or None) for lora, side in zip(files, sides, strict=True)]


def each_file(added: Sequence[AddedLora]) -> list[AddedLora]:
    """Replace folders by the files in them; raises ConfigError with all that are not here."""
    require_files(lora.file for lora in added)
    return [replace(lora, file=str(f)) for lora in added for f in files_of(lora.file, lora.expert or "")]


def added_problems(
    where: Place, added: Iterable[AddedLora], configs: dict[Expert, TransformerConfig]
) -> list[str]:
    """List the problems of LoRA files that are to be added to these networks; what they hold is read."""
    problems = []
    for lora in added:
        if not (experts := [expert for expert in configs if lora.is_for(expert)]):
            text = f"{lora.file} is for the {lora.said.in_words}, which is not here"
            problems.append(where.problem(f"{text}. Leave it out, or write {BOTH}={lora.file}."))
        try:
            for expert in experts:
                read_lora(Path(lora.file), configs[expert], expert, weights=False)
            require_finite(Path(lora.file))
        except ConfigError as error:
            problems += error.problems
    return problems


def added_lines(
    added: Iterable[AddedLora], configs: dict[Expert, TransformerConfig], title: str = "lora"
) -> list[str]:
    """Say which LoRA file is added to which of these networks, and which of its keys are not."""
    where = {None: "each network"} | {expert: f"the {expert.in_words}" for expert in Expert}
    lines = []
    for lora in added:
        lines.append(f"{title:<9} {lora.file}, strength {lora.strength:g}, on {where[lora.said]}")
        expert = next(expert for expert in configs if lora.is_for(expert))
        if left := read_lora(Path(lora.file), configs[expert], expert, weights=False).left_out:
            lines.append(f"warning   {lora.file}: {left_out_words(left)}")
    return lines


def added_changes(
    added: Iterable[AddedLora], config: TransformerConfig, expert: Expert, *, weights: bool = True
) -> dict[str, LowRank]:
    """Return what all files together change of each layer, strengths in it, as `Folder.added_changes`."""
    changes: dict[str, LowRank] = {}
    for lora in added:
        if not lora.is_for(expert):
            continue
        for layer, (a, b) in read_lora(Path(lora.file), config, expert, weights=weights).layers.items():
            changes[layer] = sum_of(changes.get(layer), LowRank(a, b * lora.strength))
    return changes


def added_second_time(added: Iterable[AddedLora], expert: Expert) -> dict[str, Stored]:
    """Return the weights of a flow map's second time in files, those of the last one; none of plain LoRA."""
    files = [Path(lora.file) for lora in added if lora.is_for(expert)]
    return {name: stored for file in files for name, stored in second_time_in(file).items()}


def sum_of(first: LowRank | None, second: LowRank | None) -> LowRank:
    """Return the sum of two changes of a layer, of which one may be missing: B A = B1 A1 + B2 A2."""
    if not (first and second):
        return first or second
    return LowRank(torch.cat([first.a, second.a]), torch.cat([first.b, second.b], dim=1))


def as_settings(added: Iterable[AddedLora]) -> list[dict[str, Any]]:
    """Return what `read_added` reads."""
    return [{key: value for key, value in asdict(lora).items() if value is not None} for lora in added]


class MergingReader(WeightReader):
    """The tensors of a transformer folder with LoRA files added, in float32, before they are cast."""

    def __init__(self, folder: Path, changes: dict[str, LowRank], second_time: dict[str, Stored]):
        super().__init__(folder)
        self.stored |= second_time
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
