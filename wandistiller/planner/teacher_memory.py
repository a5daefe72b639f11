"""Memory of the teacher on one rank, as its placement has it."""

from dataclasses import replace

from wandistiller.config.job import Job, branches, swept
from wandistiller.engine.zero_memory import Bytes
from wandistiller.experts import Expert
from wandistiller.network.activation_memory import call_bytes
from wandistiller.network.config import NetworkConfig
from wandistiller.network.folder import Folder
from wandistiller.planner.machine import Machine, Parts
from wandistiller.teacher.placements.base import Placement
from wandistiller.utils.memoize import once_for_each


def teacher_bytes(folder: Folder, placement: Placement, sharers: int) -> Bytes:
    """Weights of all experts on a rank.

    For `owner` and `device_map` on the owner's rank, for the latter as if nothing were mapped to CPU or disk.

    Args:
        sharers: ranks that an engine of stage 3 is divided among.
    """
    return placement.in_all([_expert_bytes(config, placement, sharers) for config in folder.configs.values()])


@once_for_each
def _expert_bytes(config: NetworkConfig, placement: Placement, sharers: int) -> Bytes:
    return placement.memory(config, sharers)


@once_for_each
def _on_the_way(config: NetworkConfig, placement: Placement) -> tuple[int, int]:
    """Bytes of weights of a call that are unpacked, and of those that a GPU has yet to finish with."""
    return placement.unpacked(config), placement.behind(config)


def sharers_of_a_call(job: Job) -> int:
    """Ranks that compute a sample of the teacher together; an owner's rank computes it whole."""
    return 1 if job.teacher.on_one_rank else job.run.context_parallel


def teacher_parts(
    job: Job, machine: Machine, latent: tuple[int, ...], samples: int, together: int = 1
) -> tuple[Parts, Parts]:
    """Memory that the teacher keeps, and memory of a call; both are empty if they cannot be known.

    Args:
        together: calls that go through the network together.
    """
    folder = job.folder.only(job.networks.teacher)
    batch = samples * max(1, branches(job) // job.teacher.guidance_passes)
    return placed_parts(folder, job.teacher, machine, latent, batch, sharers_of_a_call(job), together)


def placed_parts(
    folder: Folder,
    placement: Placement,
    machine: Machine,
    latent: tuple[int, ...],
    batch: int,
    sharers: int,
    together: int = 1,
) -> tuple[Parts, Parts]:
    """Memory that a pipeline's networks keep, and memory of a call; empty if they cannot be known.

    Args:
        batch: samples of a call; each counts twice with both branches of guidance.
        sharers: ranks that compute a sample together.
        together: as in `teacher_parts`.
    """
    engine, gpu = placement.engine, machine.device_free is not None
    if not placement.memory_known:
        return {}, {}
    held = teacher_bytes(folder, placement, placement.sharers(machine.topology))
    on_gpu = gpu and not placement.on_cpu
    peak, waiting = call_bytes(folder.config, engine, latent, batch, accelerator=on_gpu, sharers=sharers)
    activations = peak + (together - 1) * waiting
    each = [_on_the_way(config, placement) for config in folder.configs.values()]
    unpacked, behind = map(max, zip(*each, strict=True))
    activations += unpacked
    weights = replace(held, transient=0, host=held.host + placement.overhead())
    if placement.on_one_rank and not gpu:  # once in a node's CPU memory
        weights = Bytes(node=weights.device)
    work = Bytes(host=activations) if placement.on_cpu else Bytes(transient=activations)
    late = behind if on_gpu and held.transient else 0  # a single rank's own shards are used where they lie
    arriving = Bytes(transient=held.transient + late)
    read = added_parts(folder) if placement.reads_at_calls else {}
    return {"teacher's weights": weights} | read, {
        "teacher's weights on their way": arriving,
        "a call of the teacher": work,
    }


@once_for_each
def added_sizes(folder: Folder, experts: tuple[Expert, ...]) -> tuple[int, int]:
    """Elements of the factors of LoRA files in all of these networks, and of the largest changed weight."""
    changes = [pair for e in experts for pair in folder.added_changes(e, weights=False).values()]
    factors = sum(a.numel() + b.numel() for a, b in changes)
    return factors, max((len(b) * a.shape[1] for a, b in changes), default=0)


def added_parts(folder: Folder, *, once: bool = False) -> Parts:
    """CPU memory of LoRA files that are added to a pipeline, where its weights are read; float32.

    Every network's reader has the factors. A weight that is read is there beside its change.

    Args:
        once: one rank of a node reads.
    """
    if not folder.added:
        return {}
    factors, largest = added_sizes(folder, tuple(folder.configs))
    sizes = {"LoRA files added to the teacher": 4 * factors, "a weight and its change": 2 * 4 * largest}
    return {use: Bytes(node=n) if once else Bytes(host=n) for use, n in sizes.items()}


def hidden_states(job: Job, tokens: int) -> Parts:
    """The teacher's hidden states in its forward pass; both branches, until the null branch is freed.

    Args:
        tokens: of one sample that a rank has them of.
    """
    if not (blocks := len(job.networks.first.trained.compared)):
        return {}
    passes = job.teacher.guidance_passes
    together = 2 // passes if branches(job) == 2 else 0
    each = tokens * job.folder.config.width * job.teacher.engine.dtype.itemsize
    nbytes = blocks * each * job.batch.micro * (1 + together) * swept(job)
    return {"the teacher's hidden states": Bytes(transient=nbytes)}
