"""The student's networks before any training."""

from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from wandistiller import distributed, prune, wan
from wandistiller.batch import Expert
from wandistiller.cuts import Cuts
from wandistiller.problems import ConfigError
from wandistiller.prune import Measured
from wandistiller.student_config import StudentConfig, kept_layers, source_experts, transformer_folder
from wandistiller.wan import WanFolder
from wandistiller.weights import WeightReader


class _Weights:
    """The tensors that a student's network is made of, read one at a time; those of several experts averaged."""

    def __init__(self, student: StudentConfig, folder: WanFolder, expert: Expert):
        from_teacher = [folder.path / e.value for e in source_experts(student, folder, expert)]
        sources = from_teacher if student.init == "teacher" else [transformer_folder(student.init, expert)]
        self.readers = [WeightReader(source) for source in sources]

    def read(self, name: str) -> Tensor:
        """Float32 on the CPU."""
        values = [torch.empty(reader.stored[name].shape) for reader in self.readers]
        for reader, value in zip(self.readers, values, strict=True):
            reader.read(name, value)
        return values[0] if len(values) == 1 else torch.stack(values).mean(0)


def start_model(student: StudentConfig, config: dict[str, Any], folder: WanFolder, expert: Expert, seed: int,
                cuts: Cuts | None = None) -> WanTransformer3DModel:  # fmt: skip
    """The student's network before any training, float32 on the CPU, the same on every rank.

    Args:
        cuts: of `plan_cuts`, for a student that is narrower than the teacher it starts from.
    Raises:
        ConfigError: on every rank, if weights could not be read or are not finite on any.
    """
    if student.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return WanTransformer3DModel.from_config(config)
    layers = kept_layers(student, config, folder) if student.init == "teacher" else list(range(config["num_layers"]))
    model, weights, cuts = wan.skeleton(config), _Weights(student, folder, expert), cuts or Cuts()
    for name, module in list(model.named_modules()):
        source = _renumbered(name, layers)
        own = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        for leaf, value in cuts.cut(source, {leaf: weights.read(f"{source}.{leaf}".strip(".")) for leaf in own}).items():
            wan.put(module, leaf, value.contiguous())  # DeepSpeed views parameters as bytes
    if problems := distributed.agree_on_problems([p for reader in weights.readers for p in reader.found_bad]):
        raise ConfigError(*problems)
    return model.requires_grad_(True)


def blank_model(config: dict[str, Any]) -> WanTransformer3DModel:
    """A network of zeros, float32 on the CPU, for a checkpoint to fill."""
    model = wan.skeleton(config)
    for name, parameter in list(model.named_parameters()):
        wan.put(model, name, torch.zeros(parameter.shape))
    return model.requires_grad_(True)


def plan_cuts(student: StudentConfig, config: dict[str, Any], folder: WanFolder, expert: Expert, measured: Measured) -> Cuts:
    """How one of the student's networks is cut from the teacher, as it was measured."""
    blocks, weights = kept_layers(student, config, folder), _Weights(student, folder, expert)
    return prune.plan(config, folder.config, blocks, measured, weights.read, student.width_basis, student.ffn_units)


def _renumbered(name: str, layers: list[int]) -> str:
    """The teacher's name of a module of the student."""
    first, *rest = name.split(".")
    return ".".join([first, str(layers[int(rest[0])]), *rest[1:]]) if first == "blocks" and rest else name
