"""A teacher, a batch and an engine for a student beside it, in this process."""

from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from states import state
from torch import nn

from wandistiller.batch import Batch
from wandistiller.engine.ds_config import load, student_engine
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.experts import Expert
from wandistiller.network.network import Computing, Network
from wandistiller.student.learner import Learner
from wandistiller.teacher.base import LocalTeacher
from wandistiller.utils.keyed_random import keyed_normal


def loaded(folder: Path) -> WanTransformer3DModel:
    model = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.float32)
    for p in model.parameters():
        p.data = p.data.clone()  # not the file itself, which the session's other tests read
    return model.requires_grad_(True)


def learner_of(module: nn.Module, engine: EngineConfig, **more: Any) -> Learner:
    """Return a learner of one network, prepared as its JSON says."""
    network = Network(module).prepare(computing=Computing.of(engine))
    return Learner({Expert.HIGH_NOISE: network}, engine, **more)


def teacher_of(wan1: Path) -> LocalTeacher:
    return LocalTeacher(dict.fromkeys(Expert, Network(loaded(wan1 / "transformer").eval())))


def batch_for(model: WanTransformer3DModel) -> Batch:
    x_t = keyed_normal((2, model.config.in_channels, 1, 4, 4), "x")
    text = keyed_normal((2, 512, model.config.text_dim), "text")
    return state(x_t, torch.tensor([0.95, 0.2]), text)


def engine(**more: Any) -> EngineConfig:
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    ds = {"train_batch_size": 2, "optimizer": adam, "gradient_clipping": 0.0, **more}
    return student_engine(load(ds), 1)
