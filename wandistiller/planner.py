"""What a run will take of each rank, phase by phase, from its settings alone: nothing is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from wandistiller.blocks import add_projections
from wandistiller.deepspeed_json import dtype_name, stage
from wandistiller.footprint import activation_bytes, call_bytes, compared_bytes
from wandistiller.items import Kind
from wandistiller.job import Job
from wandistiller.machine import Machine, room_of_a_rank
from wandistiller.memory import (
    GATHERED,
    Bytes,
    Network,
    bucket_bytes,
    numels,
    once_for_each,
    spread_bytes,
    start_bytes,
    student_parts,
    teacher_bytes,
)
from wandistiller.pipeline_parts import text_config
from wandistiller.placement import BLOCK, read_placement
from wandistiller.recompute import SECTION
from wandistiller.rehearsal import decoding, encoding, text_encoding
from wandistiller.tuning import tune
from wandistiller.wan import skeleton, width

MIB = 2**20
PROCESS = 520 * MIB
"""CPU memory of a rank beside its tensors: Python, torch, DeepSpeed, diffusers, transformers (tests/bench/memory.py)."""
EARLY = 480 * MIB
"""The same while the cache is filled: no engine of DeepSpeed learns yet, and ranks have little to tell each other (the same)."""
ENGINE = 40 * MIB
"""What a ZeRO-Inference engine adds to its weights and those on their way (the same)."""
CUDA_PROCESS = 2500 * MIB
"""The same with CUDA's libraries; not measured by us."""
CONTEXT = 500 * MIB
"""What CUDA takes of a GPU beside torch's allocator; not measured by us."""

LEAST_PART = 4
"""A text encoder is there to a quarter at least: Wan's table of words is a fifth of it, and a layer is on its way."""

UNKNOWN = ("auto", "device_map")
"""Placements of which no arithmetic says what a rank takes."""

CAST = "student's gradients in float32"

Parts = dict[str, Bytes]
"""What takes memory of a rank, in words, and how much."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What takes memory in one phase of a run."""

    kept: Parts
    """All the time."""
    turns: dict[str, Parts] = field(default_factory=dict)
    """In turn: one of these at a time."""

    def peak(self) -> Bytes:
        """The most of each kind of memory; `live` is part of `device`."""
        return _sum(self.kept) + _most([_sum(parts) for parts in self.turns.values()])

    def at(self, turn: str) -> Bytes:
        """What is taken in one of the turns."""
        return _sum(self.kept) + _sum(self.turns.get(turn, {}))

    def parts(self, taken: Callable[[Bytes], int]) -> dict[str, int]:
        """What is there at the height of one kind of memory: all that is kept, and the turn that takes most of it.

        Args:
            taken: bytes of that kind.
        """
        most = max(self.turns.values(), key=lambda parts: taken(_sum(parts)), default={})
        return {name: taken(self.kept.get(name, Bytes()) + most.get(name, Bytes())) for name in self.kept | most}


def _sum(parts: Parts) -> Bytes:
    return sum(parts.values(), Bytes())


def _most(several: list[Bytes]) -> Bytes:
    """The most of each kind of memory; `live` is part of `device`."""
    kinds = ("host", "node", "disk", "pinned")
    return Bytes(max((b.device + b.live for b in several), default=0), 0,
                 *(max((getattr(b, kind) for b in several), default=0) for kind in kinds))  # fmt: skip


def most(phases: dict[str, Phase]) -> Bytes:
    """The most of each kind of memory in any phase."""
    return _most([phase.peak() for phase in phases.values()])


def student_network(job: Job) -> Network:
    """What of one of the student's networks is trained, its adapters and projections included, and what is frozen."""
    return _network(job.student_transformer, job.run.frozen, job.run.lora, _matched_blocks(job), width(job.folder.config))


def _matched_blocks(job: Job) -> list[int]:
    """The student's blocks whose hidden states are matched; `lineage` may not be known yet."""
    term = job.objective.feature_term
    return (term.blocks or list(range(job.student_transformer["num_layers"]))) if term else []


@once_for_each
def _network(
    config: dict[str, Any], frozen: list[str] | None, lora: dict[str, Any] | None, blocks: Sequence[int], teacher_width: int
) -> Network:
    """As `train.student_models` has it, without memory."""
    with torch.device("meta"):
        model = skeleton(config).requires_grad_(True)
        tune(model, frozen, lora, seed=0)
        add_projections(model, blocks, teacher_width)
    found: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for name, p in model.named_parameters():
        found[p.requires_grad][name] = p.numel()
    return Network(found[True], found[False])


def cast_bytes(network: Network, ds: dict[str, Any]) -> int:
    """One copy in float32 of all gradients, which stage 0 makes below it: one at its start, and two in a step, by parameter and
    all in one, beside those that came (deepspeed 0.19.8, FP16_Optimizer)."""
    return 4 * sum(network.trained.values()) if stage(ds) == 0 and dtype_name(ds) != "float32" else 0


def plan(job: Job, machine: Machine) -> dict[str, Phase]:
    """The phases of `job` on a rank of `machine`; without an accelerator all is CPU memory."""
    found = _Planner(job, machine).phases()
    if machine.device_free is not None:
        return found
    return {name: Phase(_on_host(phase.kept), {turn: _on_host(parts) for turn, parts in phase.turns.items()})
            for name, phase in found.items()}  # fmt: skip


def activations(job: Job, machine: Machine) -> tuple[int, int]:
    """Bytes of the student's on a rank with activation checkpointing, as its JSON has it or else of every block; and without."""
    p, ds = _Planner(job, machine), job.student_ds
    both = {SECTION: {}} | ds, {key: value for key, value in ds.items() if key not in (SECTION, BLOCK)}
    again, kept = (activation_bytes(job.student_transformer, ds, p.tokens, p.samples, accelerator=p.gpu) for ds in both)
    return again, kept


def _on_host(parts: Parts) -> Parts:
    return {name: Bytes(host=b.device + b.live + b.host, node=b.node, disk=b.disk) for name, b in parts.items()}


class _Planner:
    def __init__(self, job: Job, machine: Machine):
        self.job, self.machine = job, machine
        self.gpu = machine.device_free is not None
        self.largest = max((job.size, *job.buckets), key=lambda s: job.folder.tokens(s.height, s.width, s.num_frames))
        self.tokens = job.folder.tokens(self.largest.height, self.largest.width, self.largest.num_frames)
        self.samples = job.batch.micro * len(job.objective.states)
        """That go through the student together: the states of all terms."""
        self.placement = read_placement(job.teacher_ds)
        self.base = self._libraries(PROCESS)
        self.cast = cast_bytes(student_network(job), job.student_ds)

    def _libraries(self, process: int) -> Parts:
        return {"libraries": Bytes(device=CONTEXT, host=CUDA_PROCESS) if self.gpu else Bytes(host=process)}

    def phases(self) -> dict[str, Phase]:
        kept, call = self._teacher(self.job.batch.micro) if self.job.objective.needs_teacher else ({}, {})
        student, gathered, steps = self._student()
        config, experts = self.job.student_transformer, len(self.job.student_experts)
        written = (4 if self.job.run.lora else 2) * sum(numels(config).values())  # what a LoRA is fused into is float32 first
        return {
            "prepare": self._prepare(),
            "load": Phase(self.base | kept, {
                "start": {"student's weights in float32": Bytes(host=start_bytes(config, experts))},
                "optimizer's start": student | {CAST: Bytes(live=self.cast)},
                "first look": student | call,
            }),
            "train": Phase(self.base | kept | student, {"teacher's turn": call | self._shown()} | steps),
            "checkpoint": Phase(self.base | kept | student | {"a tensor": Bytes(host=4 * max(numels(config).values()))}),
            "draw": self._draw(kept | student, call, gathered),
            "export": Phase(self.base | {"a network": Bytes(host=written)}),
        }  # fmt: skip

    def _teacher(self, samples: int) -> tuple[Parts, Parts]:
        """What is there all the time, and in its turn, when it is asked for so many samples at once."""
        j, asked = self.job, self.placement
        if asked.placement in UNKNOWN:
            return {}, {}
        sharers = self.machine.ranks_on_node if asked.shards == "node" else self.machine.ranks
        whole = teacher_bytes(j.folder, j.teacher_ds, sharers)
        branches = 2 // asked.guidance_passes if {j.run.guidance_scale, j.run.guidance_scale_2} != {1} else 1
        on_gpu = self.gpu and not asked.on_cpu
        taken = call_bytes(j.folder.config, j.teacher_ds, self.tokens, branches * samples, accelerator=on_gpu)
        call = Bytes(host=taken) if asked.on_cpu else Bytes(live=taken)
        engine = ENGINE if asked.placement == "engine" and stage(j.teacher_ds) == 3 else 0
        pinned = j.teacher_ds["zero_optimization"].get("offload_param", {}).get("pin_memory") and self.gpu
        kept = replace(whole, live=0, host=whole.host + engine, pinned=whole.host if pinned else 0)
        turn = {"teacher's weights on their way": Bytes(live=whole.live), "a call of the teacher": call}
        if asked.on_one_rank and not self.gpu:  # of a node's CPU memory it takes this once
            kept = Bytes(node=kept.device)
        return {"teacher's weights": kept}, turn

    def _shown(self) -> Parts:
        """The teacher's hidden states while it answers: of both branches, until those of the null branch are dropped."""
        j, blocks = self.job, len(_matched_blocks(self.job))
        branches = 2 // self.placement.guidance_passes if {j.run.guidance_scale, j.run.guidance_scale_2} != {1} else 0
        item = getattr(torch, dtype_name(j.teacher_ds)).itemsize
        whole = blocks * self.tokens * width(j.folder.config) * item * j.batch.micro * (1 + branches)
        return {"the teacher's hidden states": Bytes(live=whole)} if blocks else {}

    def _compared(self) -> Parts:
        """Hidden states that are compared, until the student goes back through them."""
        j, blocks = self.job, len(_matched_blocks(self.job))
        items = tuple(getattr(torch, dtype_name(ds)).itemsize for ds in (j.teacher_ds, j.student_ds))
        widths = width(j.folder.config), width(j.student_transformer)
        n = compared_bytes(blocks, self.tokens, j.batch.micro, self.samples, widths, items)
        return {"hidden states to compare": Bytes(live=n)} if blocks else {}

    def _student(self) -> tuple[Parts, Parts, dict[str, Parts]]:
        """What is there all the time, the weights that come and go in any call, and the turns of a step."""
        j = self.job
        config, ds = j.student_transformer, j.student_ds
        network, ranks = student_network(j), self.machine.ranks
        parts = student_parts(network, len(j.student_experts), ds, ranks, accelerator=self.gpu, ema=j.run.ema is not None)
        activations = activation_bytes(config, ds, self.tokens, self.samples, accelerator=self.gpu)
        kept = {f"student's {name}": replace(b, live=0) for name, b in parts.items()}
        work = {f"student's {name}, in a step": Bytes(live=b.live) for name, b in parts.items() if b.live}
        turns = {"student's turn": work | {"student's activations": Bytes(live=activations)} | self._compared(),
                 "optimizer's turn": work | {CAST: Bytes(live=2 * self.cast)} if self.cast else {}}  # fmt: skip
        if not self.gpu and ranks > 1:
            turns["student's turn"]["gloo's copy of a bucket"] = Bytes(live=bucket_bytes(network, ds))
            turns["optimizer's turn"]["gloo's copies of the weights"] = Bytes(live=spread_bytes(network, ds, ranks))
        name = f"student's {GATHERED}, in a step"
        return kept, {name: work[name]} if name in work else {}, turns

    def _prepare(self) -> Phase:
        """Text encoder, VAE and teacher have their turns."""
        turns, kinds = self._prompts(), self.job.items.kinds
        if (kinds != Kind.PROMPT).any():
            turns["media"] = self._media()
        if (kinds == Kind.PROMPT).any():
            weights, call = self._teacher(self.job.run.prepare_batch)
            turns["rollouts"] = weights | call
        return Phase(self._libraries(EARLY), turns)

    def _prompts(self) -> dict[str, Parts]:
        """The text encoder is loaded into CPU memory, where its file lies too if that is in another precision."""
        config, dtype = text_config(self.job.folder.path), torch.bfloat16 if self.gpu else torch.float32
        need = text_encoding(config, dtype, accelerator=self.gpu)
        stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), dtype)
        file = need.weights // dtype.itemsize * stored.itemsize if stored != dtype else 0
        kept = need.weights
        if not self.gpu:  # the rest is read from disk, see conditioning.homes
            m = self.machine
            room = room_of_a_rank(m.host_free, m.ranks_on_node) - _sum(self._libraries(EARLY)).host
            kept = min(kept, max(room - need.work, need.weights // LEAST_PART))
        return {
            "loading the text encoder": {"text encoder": Bytes(host=kept), "its file": Bytes(node=file)},
            "prompts": {"text encoder": Bytes(live=kept), "text encoder's activations": Bytes(live=need.work)},
        }

    def _media(self) -> Parts:
        """Media are encoded one by one."""
        s = self.largest
        need = encoding(self.job.folder.vae, (1, 3, s.num_frames, s.height, s.width), accelerator=self.gpu)
        return {"VAE": self._vae(need.weights), "VAE's activations": Bytes(live=need.work),
                "pixels as they were read": Bytes(host=4 * 3 * s.num_frames * s.height * s.width)}  # fmt: skip

    def _draw(self, kept: Parts, call: Parts, gathered: Parts) -> Phase:
        """The VAE is there from beginning to end, and decodes one sample at a time; the student keeps nothing for backward."""
        j = self.job
        latents = 1, *j.folder.latent_shape(j.size.height, j.size.width, j.size.num_frames)
        need = decoding(j.folder.vae, latents, accelerator=self.gpu)
        taken = call_bytes(j.student_transformer, j.student_ds, self.tokens, j.batch.micro, accelerator=self.gpu)
        return Phase(self.base | kept | {"VAE": self._vae(need.weights)}, {
            "teacher's turn": call,
            "student's turn": gathered | {"student's activations": Bytes(live=taken)},
            "decode": {"VAE's activations": Bytes(live=need.work)},
        })  # fmt: skip

    def _vae(self, weights: int) -> Bytes:
        """It comes to an accelerator through CPU memory."""
        return Bytes(device=weights, host=weights if self.gpu else 0)
