"""Memory of the teacher on one rank, as its placement has it."""

from dataclasses import replace
from typing import Any

from wandistiller.config.job import Job
from wandistiller.engine.zero_memory import Bytes
from wandistiller.planner.machine import Machine
from wandistiller.planner.phase_peak import Parts
from wandistiller.planner.student_memory import itemsize
from wandistiller.planner.student_network import matched_blocks
from wandistiller.teacher.sweep import branches, swept
from wandistiller.teacher.teacher_json import read_placement
from wandistiller.utils.memoize import once_for_each
from wandistiller.wan.activation_memory import call_bytes, waiting_bytes
from wandistiller.wan.pipeline import WanFolder
from wandistiller.wan.transformer import width


def teacher_bytes(folder: WanFolder, ds: dict[str, Any], sharers: int) -> Bytes:
    """Weights of all experts on a rank, placed by `ds`, which `teacher_engine` has checked.

    For `owner` and `device_map` on the owner's rank, for the latter as if nothing were mapped to CPU or disk.

    Args:
        sharers: ranks that an engine of stage 3 is divided among.
    """
    experts = [_expert_bytes(config, ds, sharers) for config in folder.configs.values()]
    return read_placement(ds).in_all(experts)


@once_for_each
def _expert_bytes(config: dict[str, Any], ds: dict[str, Any], sharers: int) -> Bytes:
    return read_placement(ds).memory(config, ds, sharers)


@once_for_each
def _on_the_way(config: dict[str, Any], ds: dict[str, Any]) -> tuple[int, int]:
    """Bytes of weights of a call that are unpacked, and of those that a GPU has yet to finish with."""
    placement = read_placement(ds)
    return placement.unpacked(config, ds), placement.behind(config, ds)


def sharers_of_a_call(job: Job) -> int:
    """Ranks that compute a sample of the teacher together; an owner's rank computes it whole."""
    return 1 if read_placement(job.teacher_ds).on_one_rank else job.run.context_parallel


def teacher_parts(
    job: Job, machine: Machine, latent: tuple[int, ...], samples: int, together: int = 1
) -> tuple[Parts, Parts]:
    """Memory that the teacher keeps, and memory of a call; both are empty if they cannot be known.

    Args:
        samples: samples of the call.
        together: calls that go through the network together.
    """
    ds, placement, gpu = job.teacher_ds, read_placement(job.teacher_ds), machine.device_free is not None
    if not placement.memory_known:
        return {}, {}
    weights = teacher_bytes(job.teachers_folder, ds, placement.sharers(machine.topology))
    batch = samples * max(1, branches(job) // placement.guidance_passes)
    on_gpu = gpu and not placement.on_cpu
    how = {"accelerator": on_gpu, "sharers": sharers_of_a_call(job)}
    activations = call_bytes(job.folder.config, ds, latent, batch, **how)
    if together > 1:
        activations += (together - 1) * waiting_bytes(job.folder.config, ds, latent, batch, **how)
    each = [_on_the_way(config, ds) for config in job.teachers_folder.configs.values()]
    unpacked, behind = map(max, zip(*each, strict=True))
    activations += unpacked
    pinned = gpu and ds["zero_optimization"].get("offload_param", {}).get("pin_memory")
    host = weights.host + placement.overhead(ds)
    kept = replace(weights, transient=0, host=host, pinned=weights.host if pinned else 0)
    if placement.on_one_rank and not gpu:  # once in a node's CPU memory
        kept = Bytes(node=kept.device)
    work = Bytes(host=activations) if placement.on_cpu else Bytes(transient=activations)
    late = behind if on_gpu and weights.transient else 0  # a single rank's own shards are used where they lie
    arriving = Bytes(transient=weights.transient + late)
    return {"teacher's weights": kept}, {
        "teacher's weights on their way": arriving,
        "a call of the teacher": work,
    }


def hidden_states(job: Job, tokens: int) -> Parts:
    """The teacher's hidden states in its forward pass; both branches, until the null branch is freed.

    Args:
        tokens: of one sample that a rank has them of.
    """
    if not (blocks := len(matched_blocks(job))):
        return {}
    passes = read_placement(job.teacher_ds).guidance_passes
    together = 2 // passes if branches(job) == 2 else 0
    each = tokens * width(job.folder.config) * itemsize(job.teacher_ds)
    nbytes = blocks * each * job.batch.micro * (1 + together) * swept(job)
    return {"the teacher's hidden states": Bytes(transient=nbytes)}
