"""The student's networks before any training."""

from typing import Any

import torch
from diffusers import WanTransformer3DModel

from wandistiller import distributed, wan
from wandistiller.batch import Expert
from wandistiller.config import ConfigError
from wandistiller.student_config import StudentConfig, kept_layers, transformer_folder
from wandistiller.wan import WanFolder
from wandistiller.weights import WeightReader


def start_model(student: StudentConfig, config: dict[str, Any], folder: WanFolder, expert: Expert,
                seed: int) -> WanTransformer3DModel:  # fmt: skip
    """The student's network before any training, float32 on the CPU, the same on every rank."""
    if student.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return WanTransformer3DModel.from_config(config)
    if student.init == "teacher":
        source = folder.path / _source_expert(student, folder, expert).value
        layer_of = dict(enumerate(kept_layers(student, config, folder)))
    else:
        source, layer_of = transformer_folder(student.init, expert), {i: i for i in range(config["num_layers"])}
    model, reader = wan.skeleton(config), WeightReader(source)
    for name in list(dict(model.named_parameters())):
        parts = name.split(".")
        if parts[0] == "blocks":
            parts[1] = str(layer_of[int(parts[1])])
        value = torch.empty(model.get_parameter(name).shape)
        reader.read(".".join(parts), value)
        wan.put(model, name, value)
    if problems := distributed.agree_on_problems(reader.found_bad):
        raise ConfigError(*problems)
    return model.requires_grad_(True)


def _source_expert(student: StudentConfig, folder: WanFolder, expert: Expert) -> Expert:
    if len(folder.configs) == 1:
        return Expert.HIGH_NOISE
    if student.experts == "two":
        return expert
    return Expert.LOW_NOISE if student.from_expert == "low_noise" else Expert.HIGH_NOISE
