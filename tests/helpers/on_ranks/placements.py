"""Called on ranks by test_placements.py and test_node_aware.py: teacher JSONs next to diffusers' modules."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from networks import network_of
from shipped import placement
from states import state

from wandistiller.batch import State
from wandistiller.distributed import collectives
from wandistiller.experts import Expert
from wandistiller.teacher.base import Guidance, GuidedTeacher, LocalTeacher, OwnerTeacher, without_guidance
from wandistiller.teacher.build import build_teacher
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan import pipeline
from wandistiller.wan.transformer_config import TransformerConfig

NULL_LD = keyed_normal((12, 32), "null")
SCALES = {Expert.HIGH_NOISE: 4.0, Expert.LOW_NOISE: 3.0}


def uneven_batch(config: TransformerConfig, expert: Expert, call: int, device: torch.device) -> State:
    """Two samples on rank 0, one on the others: a last batch; their prompts differ in length."""
    rank, frames = collectives.rank(), 2 if config.takes_image else 1
    n, rows = (2, 9) if rank == 0 else (1, 5)
    x_t = keyed_normal((n, config.out_channels, frames, 4, 4), "x", rank, call).to(device)
    sigma, text = torch.tensor([0.95, 0.2])[:n], keyed_normal((n, rows, 32), "text", rank)
    noised = state(x_t, sigma.to(device), text.to(device), expert)
    blank = config.blank_state(x_t.shape[1:], n, rows).conditioning
    frames = [keyed_normal(t.shape, "given", rank, i) for i, t in enumerate(blank.tensors()[1:])]
    return replace(noised, conditioning=blank.with_tensors([text, *frames]).map(lambda t: t.to(device)))


def outputs(teacher: Any, config: TransformerConfig, device: torch.device) -> list[torch.Tensor]:
    """Return velocities of five batches, and the first and last hidden states of every other batch.

    In the fourth the first sample of each rank has no guidance.
    """
    tensors = []
    for call, expert in enumerate((*Expert, *Expert, Expert.HIGH_NOISE)):
        batch = uneven_batch(config, expert, call, device)
        if call == 3:
            batch = replace(batch, guided_B=torch.arange(float(len(batch.sigma_B)), device=device))
        output = teacher.predict(batch, () if call % 2 else tuple({0, config.num_layers - 1}))
        tensors += [output.v_BCFHW.cpu(), *(state.cpu() for state in output.features.values())]
    return tensors


def by_diffusers(folder: Path, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """Return by number of passes the outputs of diffusers' own modules on the CPU."""
    wan = pipeline.open_wan(str(folder))
    models = {
        e: WanTransformer3DModel.from_pretrained(folder / e.value, dtype=dtype).eval() for e in wan.configs
    }
    models = {e: models.get(e, models[Expert.HIGH_NOISE]) for e in Expert}
    for p in (p for m in models.values() for p in m.parameters()):
        p.data = p.data.clone()
    plain = LocalTeacher({e: network_of(model) for e, model in models.items()})
    guidance = Guidance(NULL_LD, SCALES)
    cpu = torch.device("cpu")
    return {
        str(passes): outputs(GuidedTeacher(plain, guidance, passes), wan.config, cpu) for passes in (1, 2)
    }


def difference(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max((a - e).abs().max().item() for a, e in zip(actual, expected, strict=True))


def parts(teacher: Any) -> int:
    """Among how many ranks the weights are cut; 0 where another rank has them."""
    local = without_guidance(teacher)
    local = local.inner if isinstance(local, OwnerTeacher) else local
    if local is None:
        return 0
    weight = local.experts[Expert.HIGH_NOISE].blocks[0].ffn.net[2].weight
    return dist.get_world_size(weight.ds_process_group) if hasattr(weight, "ds_process_group") else 1


def differences(folder: Path, work: Path, tasks: list[str]) -> dict[str, Any]:
    """Return what differs most from diffusers by task, and among how many ranks the weights are cut.

    A task is `NAME PRECISION PASSES`: a teacher JSON, float32 or bfloat16, 1 or 2 guidance passes.
    """
    results: dict[str, Any] = {}
    device = collectives.device()
    config = pipeline.open_wan(str(folder)).config
    expected = cache(lambda precision: by_diffusers(folder, getattr(torch, precision)))
    for task in sorted(tasks, key=lambda task: task.split()[1]):
        name, precision, passes = task.split()
        placed = placement(name, precision, swap=work / "swap", guidance_passes=int(passes))
        teacher = build_teacher(pipeline.open_wan(str(folder)), placed, Guidance(NULL_LD.to(device), SCALES))
        collectives.barrier()  # before and after: a rank that goes on deletes files of the teacher before
        results["bytes on disk"] = sum(file.stat().st_size for file in (work / "swap").rglob("*.swp"))
        collectives.barrier()
        results[f"parts of {name}"] = parts(teacher)
        results[task] = difference(outputs(teacher, config, device), expected(precision)[passes])
    return results
