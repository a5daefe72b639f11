"""Peak memory of a run on each rank, phase by phase, from its settings alone: nothing is loaded."""

from dataclasses import replace

import torch

from wandistiller.config.job import Job, swept
from wandistiller.config.networks import NetworkPlan
from wandistiller.engine.engine_config import RECOMPUTED, EngineConfig
from wandistiller.engine.zero_memory import Bytes
from wandistiller.experts import Expert
from wandistiller.network.activation_memory import activation_bytes, call_bytes, compared_bytes
from wandistiller.network.folder import Folder
from wandistiller.planner.machine import Machine, Parts, PhasePeak, total
from wandistiller.planner.student_memory import (
    GATHERED,
    bucket_bytes,
    cast_bytes,
    spread_bytes,
    student_parts,
)
from wandistiller.planner.teacher_memory import added_parts, hidden_states, sharers_of_a_call, teacher_parts
from wandistiller.utils.images import STILLS, WIDEST, tile_size
from wandistiller.utils.system_memory import FREED_KEPT, PIECES, reserve, room_of_a_rank

MIB = 2**20
PROCESS = 580 * MIB
"""CPU memory of a rank next to its tensors: Python, the libraries, and 60 MiB for freed blocks that the C
library keeps (tests/bench/memory.py)."""
EARLY = 540 * MIB
"""CPU memory while the cache is filled, before an engine is trained (tests/bench/memory.py)."""
CUDA_PROCESS = 2500 * MIB
"""CPU memory of a rank with CUDA's libraries: 2,400 MiB in the quick start (H100, torch 2.11)."""
CONTEXT = 520 * MIB
"""GPU memory of CUDA next to torch's allocator: 518 MiB on an H100 (driver 580, CUDA 13)."""
CUBLAS = 64 * MIB
"""cuBLAS's workspaces in torch's allocator, for the threads of forward and backward passes: 32 MiB each on
Hopper, 8 on other GPUs (torch 2.13, `getChosenWorkspaceSize`)."""
NCCL = 700 * MIB
"""GPU memory of NCCL's channels for each group of several ranks: 0.5 GB for two A100, 1.1 for eight H100
(issues 964 and 1685 of NVIDIA/nccl); not measured by us."""
LEAST_PART = 4
"""At least a quarter of the text encoder stays: its word embeddings are a fifth, and a layer comes."""
CAST, ACTIVATIONS = "student's gradients in float32", "student's activations"
IN_STEP = ", in a step"
"""End of the uses of memory that a network's learning takes from the first micro-step on."""
FREED = "freed by the teacher, kept by the C library"
"""CPU memory that a teacher's call has left in the heap while the student computes."""


def plan(job: Job, machine: Machine, *, coding: bool = True) -> dict[str, PhasePeak]:
    """The phases of `job` on a rank of `machine`; without an accelerator all is CPU memory.

    Args:
        coding: with those in which the text encoder and the VAE work, whose memory takes seconds to find.
    """
    phases = _Planner(job, machine).phases(coding)
    if machine.device_free is not None:
        return phases
    return {name: on_host(phase) for name, phase in phases.items()}


def _in_step(parts: Parts) -> Parts:
    return {use: nbytes for use, nbytes in parts.items() if use.endswith(IN_STEP)}


def on_host(phase: PhasePeak) -> PhasePeak:
    """Return a phase without an accelerator, where all is CPU memory."""

    def moved(parts: Parts) -> Parts:
        return {
            use: Bytes(host=b.device + b.transient + b.host, node=b.node, disk=b.disk)
            for use, b in parts.items()
        }

    return PhasePeak(moved(phase.lasting), {turn: moved(p) for turn, p in phase.alternatives.items()})


def libraries(machine: Machine, sharers: int, process: int = PROCESS) -> Parts:
    """Memory of a rank beside its tensors.

    Args:
        sharers: ranks that compute each sample together.
        process: CPU memory of a rank without an accelerator.
    """
    if machine.device_free is None:
        return {"libraries": Bytes(host=process)}
    groups = (machine.ranks > 1) + (sharers > 1)  # all ranks; those of a sequence
    return {"libraries": Bytes(device=CONTEXT + CUBLAS + groups * NCCL, host=CUDA_PROCESS)}


def coding_parts(
    folder: Folder, machine: Machine, call: str, shape: tuple[int, ...], beside: Parts
) -> tuple[Parts, Parts]:
    """Memory of the VAE, which comes to an accelerator through CPU memory, and of its call.

    Args:
        call: `encode` or `decode`; in tiles if it does not fit whole `beside` what is there.
    """
    gpu, held = machine.device_free is not None, total(beside)
    if gpu:
        room = machine.device_free - reserve(machine.device_free, PIECES) - held.device - held.transient
    else:
        room = room_of_a_rank(machine.host_free - held.node, machine.ranks_on_node)
        room -= held.device + held.transient + held.host
    need, tiles = folder.vae_need(call, shape, room, accelerator=gpu)
    use = "VAE's activations, in tiles" if tiles else "VAE's activations"
    vae = {"VAE": Bytes(device=need.weights, host=need.weights if gpu else 0)}
    return vae, {use: Bytes(transient=need.work)}


class _Planner:
    def __init__(self, job: Job, machine: Machine):
        self.job, self.machine = job, machine
        self.gpu = machine.device_free is not None
        sizes = [(s.height, s.width, s.num_frames) for s in (job.size, *job.buckets)]
        self.size = max(sizes, key=lambda size: job.folder.tokens(*size))
        self.latent, tokens = job.folder.latent_shape(*self.size), job.folder.tokens(*self.size)
        self.sharers = job.run.context_parallel
        self.tokens = tokens // sharers_of_a_call(job), tokens // self.sharers
        """Tokens of a sample that this rank has the teacher's and the student's hidden states of."""
        self.samples = job.batch.micro * len(job.objective.kinds)
        """Samples of one forward pass of the student: the states of all terms."""
        self.network = job.networks.first.parameters
        self.teacher = job.folder.only(job.networks.teacher)
        self.base = self._libraries(PROCESS)

    def _libraries(self, process: int) -> Parts:
        return libraries(self.machine, self.sharers, process)

    def _teacher(self, samples: int, together: int = 1) -> tuple[Parts, Parts]:
        return teacher_parts(self.job, self.machine, self.latent, samples, together)

    def saved(
        self, row: NetworkPlan, engine: EngineConfig, samples: int, *, recomputes: bool = True
    ) -> Bytes:
        """Memory of the activations of a learning network, as in `activation_bytes`."""
        how = {"accelerator": self.gpu, "sharers": self.sharers, "lora": row.trained.lora}
        return activation_bytes(row.config, engine, self.latent, samples, recomputes=recomputes, **how)

    def _sampled(self, passes: Parts) -> Parts:
        """The same parts of a student's passes between its forward and its backward pass."""
        j = self.job
        held = self.saved(j.networks.first, j.student_engine, self.samples, recomputes=False)
        return passes | {ACTIVATIONS: held}

    def phases(self, coding: bool) -> dict[str, PhasePeak]:
        """The phases in their order; `coding` as in `plan`."""
        j, cast = self.job, cast_bytes(self.network, self.job.student_engine)
        teacher, call = self._teachers()
        student, gathered, steps = self._student(cast)
        again, starts = self._read_again(), {}
        sampled = self._sampled(steps["student"])
        for name, other in j.networks.others.items():
            # it and the teacher are called beside the student's activations
            lasting, its_steps, slope = self._other(other)
            held = sampled
            if other.setting.is_shared:  # both learn in one update: each beside what the other one holds
                of_student, of_other = _in_step(sampled), _in_step(its_steps[name])
                held = sampled | of_other
                if j.networks.share_base and j.teacher.sweeps:  # both go through the blocks together
                    samples = j.batch.micro * (1 + other.trained.has_heads)
                    inputs = self.saved(other, other.engine, samples, recomputes=False)
                    held |= {f"{name}'s activations": inputs}
                steps = {a: parts | of_other for a, parts in steps.items()}
                its_steps = {
                    a: parts | (sampled if a == name else of_student) for a, parts in its_steps.items()
                }
            steps |= its_steps | {f"teacher and {name} at samples": held | call}
            if slope:
                steps[f"gradient through the {name}"] = held | slope
            student |= lasting
            numel = other.parameters.trained_numel
            starts[f"{name}'s start"] = student | {"its weights in float32": Bytes(host=4 * numel)} | again
        if call and not self.gpu:
            freed = total(call)
            steps["student"] |= {FREED: Bytes(host=min(freed.host + freed.transient, FREED_KEPT))}
        numel, weights = j.student_transformer.numels, j.student_transformer.numel
        networks = self.base | teacher | student
        each = self.network.trained_numel if j.networks.share_base else weights
        start = Bytes(host=4 * each * len(j.networks.student))
        starts = {"start": {"student's weights in float32": start} | again} | starts
        adapters = self.network.trained_numel if j.run.lora else 0
        stored = adapters if j.networks.is_teacher_with_adapters(j.folder) else weights
        exported = Bytes(host=2 * stored + 4 * adapters)
        written = self.network.trained if j.networks.bases else numel  # the other weights are the teacher's
        return {
            **({"prepare": self._prepare()} if coding else {}),
            "load": PhasePeak(
                self.base | teacher,
                starts
                | {
                    "loading the teacher": self._added(teacher),
                    "optimizer's start": student | {CAST: Bytes(transient=cast)},
                    "calibration": student | call,
                    "measuring": self._measuring(),
                },
            ),
            "train": PhasePeak(networks, {"teacher": call | hidden_states(j, self.tokens[0])} | steps),
            "checkpoint": PhasePeak(networks | {"a tensor to write": Bytes(host=4 * max(written.values()))}),
            **({"draw": self._draw(teacher | student, call, gathered)} if coding else {}),
            "export": PhasePeak(self.base | {"exported network": exported}),
        }

    def _teachers(self) -> tuple[Parts, Parts]:
        """Memory that the teacher keeps, for others' use too, and of a call; empty without one."""
        j = self.job
        if not (j.objective.needs_teacher or j.networks.share_base):
            return {}, {}
        weights, call = self._teacher(j.batch.micro, swept(j))
        return weights, call if j.objective.needs_teacher else {}

    def _added(self, weights: Parts) -> Parts:
        """Memory of what is added to the teacher's weights as they are read, unless it keeps that."""
        read = added_parts(self.teacher, once=self.job.teacher.on_one_rank)
        return {use: nbytes for use, nbytes in read.items() if weights and use not in weights}

    def _read_again(self) -> Parts:
        """The same where each rank reads the teacher's weights for its other networks."""
        j = self.job
        copied = j.networks.bases or j.student.init == "teacher" and not j.start
        return added_parts(self.teacher) if copied and not j.networks.share_base else {}

    def _measuring(self) -> Parts:
        """A call of the teacher on whole samples, to measure it at all patches; there is no student yet."""
        j = self.job
        if not j.needs_measuring or self.sharers == 1:
            return {}
        whole = replace(j, run=replace(j.run, context_parallel=1))
        return teacher_parts(whole, self.machine, self.latent, j.batch.micro)[1]

    def _compared(self) -> Parts:
        """Hidden states that are compared, until the student's backward pass."""
        j, blocks = self.job, len(self.job.networks.first.trained.compared)
        items = j.teacher.engine.dtype.itemsize, j.student_engine.dtype.itemsize
        widths = j.folder.config.width, j.student_transformer.width
        n = compared_bytes(blocks, self.tokens, j.batch.micro, self.samples, widths, items, j.student_engine)
        return {"hidden states to compare": Bytes(transient=n)} if blocks else {}

    def _unpacked(self, engine: EngineConfig) -> Parts:
        """Quantised weights of a shared base as a learning network's passes unpack them."""
        j = self.job
        if not (j.networks.share_base and j.teacher.weights):
            return {}
        n = j.teacher.unpacked_with_gradients(j.folder.config, engine.recompute)
        return {"the base's weights, unpacked": Bytes(transient=n)}

    def _student(self, cast: int) -> tuple[Parts, Parts, dict[str, Parts]]:
        """Memory that is kept, weights gathered during any call, and the alternatives of a step."""
        j, engine, ranks = self.job, self.job.student_engine, self.machine.ranks
        ema = j.run.ema is not None
        experts = len(j.networks.learning)
        parts = student_parts(self.network, experts, engine, ranks, accelerator=self.gpu, ema=ema)
        saved = self.saved(j.networks.first, engine, self.samples)
        lasting = {f"student's {use}": replace(b, transient=0) for use, b in parts.items()}
        transient = {f"student's {use}{IN_STEP}": b.transient for use, b in parts.items() if b.transient}
        if Expert.HIGH_NOISE in {*j.networks.student} - {*j.networks.learning}:  # the samples begin with it
            whole = j.student_transformer.numel
            numel = self.network.trained_numel if j.networks.share_base else whole
            lasting["student's finished expert"] = Bytes(device=numel * engine.dtype.itemsize)
        step = {use: Bytes(transient=n) for use, n in transient.items()}
        passes = step | {ACTIVATIONS: saved} | self._compared() | self._unpacked(engine)
        optimizer = step | {CAST: Bytes(transient=2 * cast)} if cast else {}
        if not self.gpu and ranks > 1:
            spread = spread_bytes(self.network, engine, ranks)
            passes["gloo's copy of a bucket"] = Bytes(transient=bucket_bytes(self.network, engine))
            optimizer["gloo's copies of the weights"] = Bytes(transient=spread)
        gathered = {use: b for use, b in step.items() if use == f"student's {GATHERED}{IN_STEP}"}
        return lasting, gathered, {"student": passes, "optimizer": optimizer}

    def _other(self, other: NetworkPlan) -> tuple[Parts, dict[str, Parts], Parts]:
        """Memory of a network beside the student: what is kept, alternatives of its updates, its slope's."""
        j, engine, ranks, name = self.job, other.engine, self.machine.ranks, other.role
        has_heads = other.trained.has_heads  # on samples and cached latents
        network = other.parameters
        parts = student_parts(network, 1, engine, ranks, accelerator=self.gpu)
        saved = self.saved(other, engine, j.batch.micro * (2 if has_heads else 1))
        lasting = {f"{name}'s {use}": replace(b, transient=0) for use, b in parts.items()}
        step = {f"{name}'s {use}{IN_STEP}": Bytes(transient=b.transient) for use, b in parts.items()}
        optimizer = {f"{name}'s gradients in float32": Bytes(transient=2 * cast_bytes(network, engine))}
        if not self.gpu and ranks > 1:
            step["gloo's copy of a bucket"] = Bytes(transient=bucket_bytes(network, engine))
            optimizer["gloo's copies of the weights"] = Bytes(transient=spread_bytes(network, engine, ranks))
        passes = step | {f"{name}'s activations": saved} | self._unpacked(engine)
        steps, slope = {name: passes, f"{name}'s optimizer": step | optimizer}, {}
        if has_heads:  # a gradient of their input; checkpoints only of blocks whose weights are replaced
            arrive = j.networks.share_base and j.teacher.sweeps
            held = engine.without_recompute
            held = held.replaced(**{RECOMPUTED: {}}) if arrive else held
            whole = self.saved(other, held, j.batch.micro)
            slope = {f"{name}'s activations, of a slope": whole} | self._unpacked(held)
        return lasting, steps, slope

    def _prepare(self) -> PhasePeak:
        """Text encoder, VAE and teacher work one after the other."""
        alternatives, made, j = self._prompts(), self.job.items.made, self.job
        if j.updates_with_latents and not made.all() or j.folder.config.takes_image:
            alternatives["media"] = self._media()
        if j.updates_with_latents and made.any():
            weights, call = self._teacher(self.job.run.prepare_batch)
            alternatives["loading the teacher"] = weights | self._added(weights)
            alternatives["rollouts"] = weights | call
        return PhasePeak(self._libraries(EARLY), alternatives)

    def _prompts(self) -> dict[str, Parts]:
        """The text encoder is loaded into CPU memory, with its file if that is in another precision."""
        dtype = torch.bfloat16 if self.gpu else torch.float32
        need, stored = self.job.folder.text_need(dtype, accelerator=self.gpu)
        file = need.weights // dtype.itemsize * stored.itemsize if stored != dtype else 0
        m, libraries = self.machine, total(self._libraries(EARLY))
        if self.gpu:
            room = int(m.device_free - reserve(m.device_free, PIECES)) - libraries.device
        else:
            room = room_of_a_rank(m.host_free, m.ranks_on_node) - libraries.host
        # the rest comes from CPU memory, or is read from disk, see `wan.loaded_components.offload_kwargs`
        there = min(need.weights, max(room - need.work, need.weights // LEAST_PART))
        held = need.weights if self.gpu else there
        return {
            "loading the text encoder": {"text encoder": Bytes(host=held), "its file": Bytes(node=file)},
            "prompts": {
                "text encoder": Bytes(transient=there, host=held - there),
                "text encoder's activations": Bytes(transient=need.work),
            },
        }

    def _media(self) -> Parts:
        """Media are encoded one by one."""
        height, width, frames = self.size
        pixels = {"pixels as they were read": Bytes(host=4 * 3 * frames * height * width)}
        beside = self._libraries(EARLY) | pixels
        vae, work = self._coding("encode", (1, 3, frames, height, width), beside)
        nbytes = self.job.folder.image_encoder_bytes
        return vae | work | pixels | ({"image encoder": Bytes(device=nbytes)} if nbytes else {})

    def _draw(self, networks: Parts, call: Parts, gathered: Parts) -> PhasePeak:
        """The VAE stays for the whole phase and decodes one sample at a time; there is no backward pass."""
        j, gpu = self.job, self.gpu
        latent = j.folder.latent_shape(j.size.height, j.size.width, j.size.num_frames)
        held = self.base | networks | self._clips()
        vae, decode = self._coding("decode", (1, *latent), held)
        how = {"accelerator": gpu, "sharers": self.sharers}
        work, _ = call_bytes(j.student_transformer, j.student_engine, self.latent, j.batch.micro, **how)
        return PhasePeak(
            held | vae,
            {"teacher": call, "student": gathered | {ACTIVATIONS: Bytes(transient=work)}, "decode": decode},
        )

    def _clips(self) -> Parts:
        """Stills and small clips of teacher and student, of 8 bits, which all ranks have."""
        size, number = self.job.size, len(self.job.run.sample_prompts or ())
        height, width, frames = size.height, size.width, size.num_frames
        if frames == 1:
            return {}
        tile_h, tile_w = tile_size(height, width, max(number, 1), WIDEST)
        pixels = STILLS * height * width + frames * min(tile_h, height) * min(tile_w, width)
        return {"clips that are drawn": Bytes(host=2 * number * 3 * pixels)}

    def _coding(self, call: str, shape: tuple[int, ...], beside: Parts) -> tuple[Parts, Parts]:
        return coding_parts(self.job.folder, self.machine, call, shape, beside)
