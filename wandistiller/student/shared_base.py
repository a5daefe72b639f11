"""A network whose frozen weights are another's: in a run of adapters the teacher's, for every role."""

import json
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from wandistiller.experts import Expert
from wandistiller.student.config import IMPORTANCE, kept_layers, source_experts
from wandistiller.student.lora import Lora
from wandistiller.teacher.block_source import SOURCE
from wandistiller.utils.errors import RECIPE, Problem
from wandistiller.wan.transformer import meta_transformer, set_parameter, share_rope
from wandistiller.wan.transformer_config import TransformerConfig

BASE_LAYER = ".base_layer."
"""Part of the names of a linear layer with an adapter (peft 0.21)."""


def teacher_bases(job: Any) -> dict[Expert, Expert]:
    """Return the teacher's network that each of a `config.job.Job`'s student is, but for adapters.

    Empty if they are networks of their own.
    """
    config, folder, start = job.student_transformer, job.folder, job.start
    if job.run.lora is None or config.raw != folder.config.raw:
        return {}
    if start:
        facts = start.facts
        same_kind = facts.bases and _kind(facts.lora) == _kind(job.run.lora)
        if not same_kind or start.teacher != folder.identity:
            return {}
        return dict(zip(job.student_experts, map(Expert, facts.bases), strict=True))
    return copied_experts(job)


def copied_experts(job: Any) -> dict[Expert, Expert]:
    """Return the teacher's network that each of a new student's is a whole copy of; empty if they are not."""
    student, config, folder = job.student, job.student_transformer, job.folder
    is_other = student.init != "teacher" or config.raw != folder.config.raw
    if job.start or is_other or student.keep_layers == IMPORTANCE:
        return {}
    sources = {e: source_experts(student, folder, e) for e in job.student_experts}
    copies_all = kept_layers(student, config, folder) == list(range(config.num_layers))
    if not copies_all or any(len(experts) > 1 for experts in sources.values()):
        return {}
    return {e: expert for e, (expert,) in sources.items()}


def _kind(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of adapters, with the defaults, without what they began with."""
    if given is None:
        return None
    lora = Lora(**given)
    alpha = lora.alpha or (None if lora.ranks else lora.rank)
    return asdict(replace(lora, start=None, alpha=alpha, ranks=lora.ranks or None))


def other_adapters(job: Any) -> list[str]:
    """List the adapters of a `config.job.Job` that differ from those of the run that it starts from.

    That run's would be merged into a copy of the teacher's weights for every role.
    """
    before, own = job.start and job.start.facts, job.run.lora
    if not before or not before.bases or own is None:
        return []
    if own.get("start") and not job.previous:  # of an earlier stage's it was the beginning
        whose = f"but the student begins with the adapters of {job.start.folder}. Keep one."
        return [Problem(f"`lora.start` is {own['start']}, {whose}", RECIPE, "lora.start")]
    if (old := _kind(before.lora)) == (new := _kind(own)):
        return []
    changed = {key: value for key, value in old.items() if new[key] != value}
    if "rank" in changed and before.lora.get("alpha") is None and own.get("alpha") is None:
        changed.pop("alpha", None)  # it follows from the rank
    keys = ", ".join(changed)
    text = (
        f"`lora` has another {keys} than the run {job.start.folder}, whose adapters it begins with: "
        "they would be merged, and each role need a copy of the whole network. Write that run's "
        f"{json.dumps(changed)}, or begin anew with its exported file as `lora.start`."
    )
    return [Problem(text, RECIPE, "lora")]


def obstacle(job: Any) -> str:
    """Say why networks that are the teacher's but for adapters cannot have its weights; empty if they can."""
    engine, teacher = job.student_engine, job.teacher
    if not teacher.can_be_shared():
        return f"the teacher is {teacher.describe()}"
    if engine.dtype != teacher.engine.dtype:
        return f"its JSON has {teacher.engine.precision}, the student's {engine.precision}"
    return ""


def begins_as_teacher(job: Any) -> bool:
    """Return whether a `config.job.Job`'s student computes before training what its teacher computes."""
    if (job.run.lora or {}).get("start") or copied_experts(job) != {e: e for e in job.folder.configs}:
        return False
    engine, teacher = job.student_engine, job.teacher
    if teacher.weights and not job.shares_base or engine.autocast or teacher.engine.autocast:
        return False
    return engine.dtype == teacher.engine.dtype


class TrainedParts(nn.Module):
    """The trained parts of a network, under the names that they have there: all that an engine is to know.

    The rest is hidden from it, so that it neither casts, moves, cuts nor stores it.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        self._hidden = (network.train(),)
        for name, module in network.named_modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                *path, leaf = name.split(".")
                place: nn.Module = self
                for part in path:
                    if part not in place._modules:
                        place.add_module(part, nn.Module())
                    place = place._modules[part]
                place.add_module(leaf, module)

    @property
    def network(self) -> nn.Module:
        return self._hidden[0]

    def forward(self, **inputs: Any) -> Any:
        return self.network(**inputs)


def whole_network(model: nn.Module) -> nn.Module:
    """Return the network whose trained parts `model` may be."""
    return model.network if isinstance(model, TrainedParts) else model


def hollow_model(config: TransformerConfig) -> nn.Module:
    """Make a network of float32 weights on the CPU that take no memory, to be replaced."""
    model = meta_transformer(config)
    for name, p in list(model.named_parameters()):
        set_parameter(model, name, torch.zeros(()).expand(p.shape))
    return model


def on_base(model: nn.Module, base: nn.Module) -> TrainedParts:
    """Replace the frozen weights of `model` by those of `base`, which both then have; return the others."""
    for name, p in list(model.named_parameters()):
        if not p.requires_grad:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path) if path else model
            module._parameters[leaf] = base.get_parameter(name.replace(BASE_LAYER, "."))
    share_rope(model, base)
    if source := getattr(base, SOURCE, None):
        source.serve(model)
    return TrainedParts(model)
