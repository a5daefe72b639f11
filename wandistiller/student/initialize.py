"""The student's initial weights: the teacher's, cut where it is narrower; random; or those of a folder."""

import torch
from torch import Tensor, nn

from wandistiller.distributed import collectives
from wandistiller.experts import Expert
from wandistiller.student import pruning
from wandistiller.student.config import StudentConfig, kept_layers, source_experts, transformer_folder
from wandistiller.student.pruning import CalibrationStats
from wandistiller.student.slicing import WidthSlicer
from wandistiller.utils.errors import ConfigError
from wandistiller.wan import transformer
from wandistiller.wan.pipeline import WanFolder
from wandistiller.wan.structure import in_block, split_name
from wandistiller.wan.transformer_config import TransformerConfig
from wandistiller.wan.weight_reader import WeightReader


class _Weights:
    """The source tensors of a student's network, read one at a time; averaged over several experts."""

    def __init__(self, student: StudentConfig, folder: WanFolder, expert: Expert):
        if student.init == "teacher":
            self.readers = [folder.reader(source) for source in source_experts(student, folder, expert)]
        else:
            self.readers = [WeightReader(transformer_folder(student.init, expert))]

    def read(self, name: str) -> Tensor:
        """Read a tensor, float32 on the CPU."""
        values = [torch.empty(reader.stored[name].shape) for reader in self.readers]
        for reader, value in zip(self.readers, values, strict=True):
            reader.read(name, value)
        return values[0] if len(values) == 1 else torch.stack(values).mean(0)


def start_model(
    student: StudentConfig,
    config: TransformerConfig,
    folder: WanFolder,
    expert: Expert,
    seed: int,
    cuts: WidthSlicer | None = None,
) -> nn.Module:
    """Make the student's network before training, float32 on the CPU, equal on every rank.

    Args:
        cuts: result of `plan_cuts`, for a student that is narrower than the teacher it starts from.
    Raises:
        ConfigError: on every rank, if weights are unreadable or not finite on any.
    """
    if student.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return transformer.new_network(config)
    copied = student.init == "teacher"
    layers = kept_layers(student, config, folder) if copied else list(range(config.num_layers))
    model, weights = transformer.meta_transformer(config), _Weights(student, folder, expert)
    cuts = cuts or WidthSlicer()
    for name, module in list(model.named_modules()):
        number, inside = split_name(name)
        source = name if number is None else in_block(layers[number], inside)
        leaves = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        values = {leaf: weights.read(f"{source}.{leaf}".strip(".")) for leaf in leaves}
        for leaf, value in cuts.cut(source, values).items():
            transformer.set_parameter(module, leaf, value.contiguous())  # DeepSpeed views parameters as bytes
    if problems := collectives.gather_problems([p for reader in weights.readers for p in reader.faults]):
        raise ConfigError(*problems)
    return model.requires_grad_(True)


def blank_model(config: TransformerConfig) -> nn.Module:
    """Make a network of zeros, float32 on the CPU, to be filled from a checkpoint."""
    model = transformer.meta_transformer(config)
    zeros = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    model.load_state_dict(zeros, assign=True)
    return model.requires_grad_(True)


def plan_cuts(
    student: StudentConfig,
    config: TransformerConfig,
    folder: WanFolder,
    expert: Expert,
    stats: CalibrationStats,
) -> WidthSlicer:
    """Choose the cut of one of the student's networks from the teacher's activation statistics."""
    blocks, weights = kept_layers(student, config, folder), _Weights(student, folder, expert)
    return pruning.plan(config, folder.config, blocks, stats, weights.read)
