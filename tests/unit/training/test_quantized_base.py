"""Errors of a quantised base without and with adapters, against modules of diffusers, torchao and peft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from recipes import recipe
from slow_cases import slow_but
from torch import Tensor, nn
from trainers import job_of, parts_of, trainer_of

pytest.importorskip("torchao")

from on_ranks.quantized import by_torchao

from wandistiller.batch import State
from wandistiller.evaluation.quantization_error import states_by_band
from wandistiller.experts import Expert
from wandistiller.student.lora import is_adapter
from wandistiller.training.prepare import conditioning_of_shortest, shortest_samples
from wandistiller.training.quantized_base import base_errors
from wandistiller.wan.transformer import velocity

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
PLACEMENTS: dict[str, dict[str, Any]] = {"streamed": {"placement": "streamed"}, "replicated": {}}


def velocities(model: WanTransformer3DModel, states: dict[str, State]) -> dict[str, Tensor]:
    with torch.no_grad():
        return {band: velocity(model, state) for band, state in states.items()}


def with_adapters(model: WanTransformer3DModel, like: nn.Module) -> WanTransformer3DModel:
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS))
    for name, p in model.named_parameters():
        if is_adapter(name):
            p.data.copy_(like.get_parameter(name))
    return model


def errors(pair: list[dict[str, Tensor]]) -> dict[str, float]:
    found, wanted = pair
    return {
        band: ((found[band] - v).double().square().sum() / v.double().square().sum()).item()
        for band, v in wanted.items()
    }


@pytest.mark.parametrize("placement", slow_but(["streamed"], PLACEMENTS))
@pytest.mark.parametrize("weights", slow_but(["nf4"], ["int8", "float8", "nf4"]))
def test_both_errors_are_those_of_plain_modules_and_the_student_is_then_on_unquantised_weights(
    weights: str, placement: str, wan1: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    teacher = {"wandistiller": PLACEMENTS[placement] | {"weights": weights}}
    given = {"student_config": {}, "lora": {"rank": 4}, "teacher_deepspeed_config": teacher}
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), **given)
    data, conditions, _ = parts = parts_of(job_of(given))
    trainer = trainer_of(given, parts)
    job, student = trainer.job, trainer.student
    network = student.networks[Expert.HIGH_NOISE]
    with torch.no_grad():
        for name, p in network.named_parameters():
            if ".lora_B" in name:
                p.normal_(std=0.1)
    conditioning = conditioning_of_shortest(job, conditions, data.sample_items)
    x0_BCFHW = shortest_samples(job, student.velocity, conditioning)
    states = states_by_band(job.folder, x0_BCFHW, conditioning, job.run.seed)
    plain = [by_torchao(wan1 / "transformer", torch.float32, each) for each in (weights, None)]
    alone = [velocities(model, states) for model in plain]
    adapted = [velocities(with_adapters(model, network), states) for model in plain]
    found = base_errors(job, conditions, data.sample_items, student)
    assert found == tuple(pytest.approx(errors(pair), rel=1e-4) for pair in (alone, adapted))
    assert 1e-6 < found[0]["0.75-0.875"] != found[1]["0.75-0.875"] > 1e-6
    with torch.no_grad():
        assert all(torch.equal(student.velocity(states[band]), v) for band, v in adapted[1].items())


def test_the_base_of_the_low_noise_expert_alone_is_measured_where_it_serves(
    wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    more = {"student_config": {"experts": "two"}, "objective": {"name": "dmd2", "expert": "low_noise"}}
    more["teacher_deepspeed_config"] = {"wandistiller": {"placement": "streamed", "weights": "nf4"}}
    given = recipe(tmp_path, wan2, output_dir=str(tmp_path / "run"), lora={"rank": 4}, **more)
    data, conditions, _ = parts = parts_of(job_of(given))
    trainer = trainer_of(given, parts)
    alone, adapted = base_errors(trainer.job, conditions, data.sample_items, trainer.student)
    assert alone.keys() == adapted.keys() == {"0-0.25", "0.25-0.5", "0.5-0.75", "0.75-0.875"}
    assert all(0 < error < 1 for error in [*alone.values(), *adapted.values()])
