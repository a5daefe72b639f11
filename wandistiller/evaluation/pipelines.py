"""Pipelines that draw samples and predict velocities, and the memory that they take."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from wandistiller.checkpoint.facts import Facts
from wandistiller.data.conditions import Conditions
from wandistiller.data.tensor_cache import Sample
from wandistiller.distributed import collectives
from wandistiller.distributed.device import empty_cache, held_memory, on_accelerator, synchronize
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.engine.workarounds import release_module_references
from wandistiller.evaluation.sampling import Sampling, sampler, scales
from wandistiller.monitoring import memory_usage
from wandistiller.network.folder import Folder, Vae
from wandistiller.network.sampling import denoise
from wandistiller.teacher.base import Guidance, Teacher, local_modules
from wandistiller.teacher.build import beside, build_teacher, keeps_beside
from wandistiller.teacher.placements.base import Placement
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_generator
from wandistiller.utils.system_memory import GIB

OTHERS = Facts()
"""Of a pipeline that no run here has made."""
NOT_FINITE = (
    "{}: its samples in {} step(s) are not finite: its weights are not, or what it computes with them is too "
    "large. Try --dtype float32, or give other weights."
)


class PlacedPipeline:
    """A pipeline whose networks are placed by a DeepSpeed JSON; every method is collective.

    It draws what diffusers' WanPipeline draws, up to rounding.
    """

    def __init__(
        self,
        folder: Folder,
        sampling: Sampling,
        conditions: Conditions,
        placement: Placement,
        vae: Vae,
        facts: Facts = OTHERS,
        base: Teacher | None = None,
        *,
        ranks: Ranks = ALONE,
    ):
        """Load the networks.

        Args:
            conditions: those of the samples, and the text of the negative prompt.
            facts: of the student that it is, for the sampling that it is trained for.
            base: the networks without the folder's LoRA files, which are computed beside their weights; left
                out: they are merged into the weights.
        """
        self._folder, self._sampling, self._conditions, self._vae = folder, sampling, conditions, vae
        self._facts = facts
        self._shift = sampling.shift or (folder.added and facts.shift) or folder.shift
        guidance = Guidance(conditions.text[sampling.negative_prompt or ""], scales(sampling))
        if base:
            self.network = beside(base, folder, placement, guidance, ranks)
        else:
            self.network = build_teacher(folder, placement, guidance, ranks=ranks)
        self.velocity = self.network.velocity
        """Predicts v_BCFHW, float32, guidance included."""
        self.denoising = 0.0
        """Seconds of the last call of `draw` before the VAE."""

    def draw(self, samples: list[Sample], seeds: list[int], steps: int, progress: Progress) -> Tensor:
        """Sample pixels_BCFHW in [0, 1], on the CPU; sample i starts from `manual_seed(seeds[i])`.

        What is drawn of a seed does not depend on the others.

        Raises:
            ConfigError: on all ranks, if a sample is not finite on any.
        """
        folder, sampling, device, start = self._folder, self._sampling, collectives.device(), time.monotonic()
        shape = folder.latent_shape(sampling.height, sampling.width, sampling.num_frames)

        def noise_of(generators: list[torch.Generator]) -> Tensor:
            return torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)

        first = [torch.Generator().manual_seed(seed) for seed in seeds]
        between = [keyed_generator(seed, "fresh") for seed in seeds]
        x0_BCFHW, _ = denoise(
            progress.counting(self.velocity),
            folder,
            self._shift,
            noise_of(first),
            self._conditions.of(samples).to(device),
            steps,
            sampler(folder, self._facts, steps),
            lambda _: noise_of(between),
            level_dtype=torch.float64,
        )
        synchronize()
        self.denoising = time.monotonic() - start
        pixels_BCFHW = self._vae.decode(x0_BCFHW).cpu()
        whole = x0_BCFHW.isfinite().all() and pixels_BCFHW.isfinite().all()
        if problems := collectives.gather_problems([] if whole else [NOT_FINITE.format(folder.name, steps)]):
            raise ConfigError(*problems)
        return pixels_BCFHW

    def close(self) -> None:
        release_module_references(local_modules(self.network))


def base_of(folder: Folder, placement: Placement, ranks: Ranks = ALONE) -> Teacher | None:
    """Load the networks of a pipeline without its LoRA files, if these can be beside them. Collective."""
    if not keeps_beside(folder, placement):
        return None
    return build_teacher(replace(folder, added=()), placement, ranks=ranks)


class PeakMemory:
    """Peak memory of the work under `running`, above what this process held when the object was made.

    Where the system cannot reset its own peak, CPU memory at the end of the work is taken for it.
    """

    def __init__(self, before: "PeakMemory | None" = None) -> None:
        """Measure what is held, or take what another measured, for work on what that has loaded."""
        gc.collect()
        memory_usage.trim()  # what came before has freed would be taken for the work, and not be counted
        empty_cache()
        self._held = {"host": memory_usage.read().host}
        if on_accelerator():
            self._held["gpu"] = held_memory().allocated
        if before:
            self._held = before._held
        self._peak = dict(self._held)

    @contextmanager
    def running(self) -> Iterator[None]:
        is_reset = memory_usage.reset_peaks()
        yield
        usage = memory_usage.read()
        peak = {"host": usage.host_peak if is_reset else usage.host, "gpu": held_memory().most_allocated}
        self._peak = {kind: max(before, peak[kind]) for kind, before in self._peak.items()}

    def peak_gib(self) -> dict[str, float]:
        """GiB in host memory and, where there is one, on the accelerator."""
        return {k: round((v - self._held[k]) / GIB, 4) for k, v in self._peak.items()}
