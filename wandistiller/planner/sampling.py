"""The placement of pipelines that are only sampled: named, or the simplest that fits."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from wandistiller.distributed import collectives, device
from wandistiller.engine.ds_config import load
from wandistiller.engine.ds_schema import BLOCK
from wandistiller.engine.preflight import config_problems
from wandistiller.engine.zero_memory import Bytes
from wandistiller.evaluation.sampling import Sampling, scales
from wandistiller.network.folder import Folder
from wandistiller.planner.machine import Demand, Machine, PhasePeak, demands, moments, this_machine
from wandistiller.planner.peak_memory import coding_parts, libraries, on_host
from wandistiller.planner.resolve_auto import AS_IS, placements_like
from wandistiller.planner.teacher_memory import added_parts, added_sizes, placed_parts
from wandistiller.teacher.build import keeps_beside
from wandistiller.teacher.placements.base import Placement
from wandistiller.teacher.quantized import missing_problems
from wandistiller.teacher.strategies import teacher_file
from wandistiller.teacher.teacher_json import AUTO, quantized_facts, read_placement, with_keys
from wandistiller.utils.errors import ConfigError


def read_placed(
    name: str, dtype: str, folders: Iterable[Folder], world: int, weights: str | None = None
) -> Placement:
    """Read the JSON that places the networks of pipelines.

    Args:
        name: a shipped JSON's name, or a file.
        dtype: of the arithmetic; `auto`: the JSON's, or where the placement is `auto` bfloat16 on a GPU and
            float32 on the CPU.
        weights: format beside which LoRA files were trained, which `auto` keeps where this machine can.

    Raises:
        ConfigError: with every problem.
    """
    json = load(teacher_file(name))
    if dtype == "auto" and json.section(BLOCK).get("placement") == AUTO:
        dtype = "bfloat16" if device.on_accelerator() else "float32"
    placement = read_placement(json.in_precision(None if dtype == "auto" else dtype), world)
    if weights and placement.name == AUTO:
        trained = with_keys(placement, weights=weights)
        if not trained.weights_problems() + missing_problems(trained.engine, weights):
            placement = trained
    problems = config_problems(placement.engine) + missing_problems(placement.engine, placement.weights)
    for folder in folders:
        problems += placement.teacher_problems(folder.config.top_modules, device.count())
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return placement


class Drawing(NamedTuple):
    """Samples that pipelines draw."""

    folders: Sequence[Folder]
    """The pipelines, of which one is loaded at a time."""
    sampling: Sampling
    batch: int
    """The most samples of one call."""
    sharers: int
    """Ranks that compute each sample together."""


class Choice(NamedTuple):
    """A placement, and the samples of one call."""

    name: str
    placement: Placement
    batch: int
    needs: list[Demand]

    @property
    def over(self) -> float:
        """The bytes that are missing most; 0 and below if it fits."""
        return max((need.over for need in self.needs), default=0)

    def __str__(self) -> str:
        needs = " and ".join(map(str, self.needs)) or "memory that is not known"
        place = " in ".join([self.name, *quantized_facts(self.placement).values()])
        return f"{place}, {self.batch} at once: {needs} at most"


def choose(placement: Placement, drawing: Drawing) -> tuple[Placement, int]:
    """Return the simplest placement that fits, where it is `auto`, and how many samples it draws at once.

    Collective. Where nothing fits, it is what lacks the least memory, and a warning says so.
    """
    is_open = placement.name == AUTO
    if not is_open and drawing.batch == 1:
        return placement, 1
    tried = []
    for choice in choices(placement, drawing, this_machine(Path())):
        tried.append(choice)
        if choice.over <= 0:
            break
    best = min(tried, key=lambda choice: choice.over)
    if best.over > 0:
        free = " and ".join(need.supply for need in best.needs)
        text = "memory may be short; available: %s. What helps: fewer or smaller frames, --context_parallel."
        collectives.log0(f"warning   {text}", free, level=logging.WARNING)
    if is_open or best.batch < drawing.batch or best.over > 0:
        collectives.log0("placed    %s", best)
    return best.placement, best.batch


def choices(placement: Placement, drawing: Drawing, machine: Machine) -> Iterable[Choice]:
    """Yield what `placement` may be, the simplest first, unquantised last, each with ever fewer samples."""
    candidates = [(AS_IS, placement)]
    if placement.name == AUTO:
        formats = dict.fromkeys([placement.weights, None])
        candidates = [c for weights in formats for c in placements_like(placement, machine, True, weights)]
    for name, candidate in candidates:
        at_once = drawing.batch
        while at_once:
            needs = _demands(candidate, drawing._replace(batch=at_once), machine)
            yield Choice(name, candidate, at_once, needs)
            at_once //= 2


def _demands(placement: Placement, drawing: Drawing, machine: Machine) -> list[Demand]:
    """List what sampling demands: networks are loaded and called, and the VAE decodes beside them."""
    if not placement.memory_known:
        return []
    sampling, sharers, phases = drawing.sampling, drawing.sharers, {}
    in_one_call = {*scales(sampling).values()} != {1} and placement.guidance_passes == 1
    for number, folder in enumerate(drawing.folders):
        latent = folder.latent_shape(sampling.height, sampling.width, sampling.num_frames)
        of_call = drawing.batch * (1 + in_one_call), 1 if placement.on_one_rank else sharers
        read, held = added_parts(folder), libraries(machine, sharers)
        if keeps_beside(folder, placement):
            sizes = [added_sizes(folder, (expert,))[0] for expert in folder.configs]
            held |= {"LoRA files": Bytes(device=sum(sizes) * placement.engine.dtype.itemsize)}
            read, folder = {"factors in float32": Bytes(host=4 * max(sizes))}, replace(folder, added=())
        weights, call = placed_parts(folder, placement, machine, latent, *of_call)
        held |= weights
        vae, decode = coding_parts(folder, machine, "decode", (1, *latent), held)
        read = {use: nbytes for use, nbytes in read.items() if use not in weights}
        there = {use: replace(nbytes, host=0) for use, nbytes in vae.items()}  # loaded before the networks
        phases["VAE"] = PhasePeak(libraries(machine, sharers) | vae)
        phases[f"{number}"] = PhasePeak(held | there, {"loading": read, "call": call, "decode": decode})
    if machine.device_free is None:
        phases = {name: on_host(phase) for name, phase in phases.items()}
    return [demand for demand in demands(moments(phases), machine) if demand.need]
