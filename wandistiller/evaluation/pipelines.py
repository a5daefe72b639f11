"""Pipelines under evaluation, which draw samples and predict velocities, and the memory that they take."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from wandistiller.batch import Conditioning, State
from wandistiller.checkpoint.facts import Facts
from wandistiller.data.conditions import Conditions
from wandistiller.data.media import MediaReader
from wandistiller.data.tensor_cache import Sample
from wandistiller.distributed import collectives
from wandistiller.distributed.device import empty_cache, held_memory, on_accelerator, synchronize
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.sequence_parallel import ALONE, Ranks, whole_sequences
from wandistiller.engine.workarounds import release_module_references
from wandistiller.evaluation.draw_samples import Sampling, draw, open_pipeline, set_steps
from wandistiller.evaluation.velocity_error import quantization_error
from wandistiller.experts import Expert
from wandistiller.monitoring import memory_usage
from wandistiller.network.folder import Folder, Vae
from wandistiller.network.network import Network
from wandistiller.network.sampling import denoise
from wandistiller.teacher.base import Guidance, GuidedTeacher, LocalTeacher, local_modules
from wandistiller.teacher.build import build_teacher
from wandistiller.teacher.placements.base import Placement
from wandistiller.utils.system_memory import GIB

P, R = ParamSpec("P"), TypeVar("R")


class DiffusersPipeline:
    """The WanPipeline of diffusers, as users run it."""

    def __init__(
        self,
        folder: Folder,
        sampling: Sampling,
        null_text_LD: Tensor,
        dtype: torch.dtype,
        facts: Facts | None = None,
        *,
        reader: MediaReader | None = None,
        ranks: Ranks = ALONE,
    ):
        """Load it.

        Args:
            facts: of a student, the sampling that it is trained for.
            reader: how the given frames are read; needed by an image-to-video pipeline.
        """
        self._pipeline, self._sampling = open_pipeline(folder, dtype, facts, ranks), sampling
        if sampling.shift:
            self._pipeline.scheduler = folder.scheduler(sampling.shift)
        self._folder, self._reader = folder, reader
        self._trained = facts if facts and facts.few_steps else None
        self._usual = self._pipeline.scheduler, self._pipeline.config.boundary_ratio
        self._outside = 0.0  # seconds of a call of `draw`
        for part, method in ((self._pipeline, "encode_prompt"), (self._pipeline.vae, "decode")):
            setattr(part, method, self._timed(getattr(part, method)))
        self.denoising = 0.0
        """Seconds of the last call of `draw` between text encoder and VAE."""
        high, low = self._pipeline.transformer, self._pipeline.transformer_2 or self._pipeline.transformer
        modules, config = {Expert.HIGH_NOISE: high, Expert.LOW_NOISE: low}, folder.config
        experts = LocalTeacher({expert: Network(module, config) for expert, module in modules.items()})
        self._network = GuidedTeacher(experts, Guidance(null_text_LD, scales(sampling)))
        self._last_expert = Expert.HIGH_NOISE

    def draw(self, samples: list[Sample], seeds: list[int], steps: int, progress: Progress) -> Tensor:
        """Sample as `draw_samples.draw` does, in so many steps."""
        self._pipeline.scheduler, boundary = self._usual
        self._pipeline.register_to_config(boundary_ratio=boundary)
        set_steps(self._pipeline, self._trained, steps, self._folder)
        self._outside, start = 0.0, time.monotonic()
        sampling = replace(self._sampling, steps=steps)
        pixels_BCFHW = draw(self._pipeline, self._folder, samples, seeds, sampling, progress, self._reader)
        self.denoising = time.monotonic() - start - self._outside
        return pixels_BCFHW

    def _timed(self, method: Callable[P, R]) -> Callable[P, R]:
        """Return a method whose seconds are outside of denoising."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            synchronize()
            start = time.monotonic()
            result = method(*args, **kwargs)
            synchronize()
            self._outside += time.monotonic() - start
            return result

        return timed

    def velocity(self, batch: State) -> Tensor:
        """Predict v_BCFHW, float32, guidance included."""
        if batch.expert is not self._last_expert:  # offloaded networks: the other would stay on the GPU
            self._pipeline.maybe_free_model_hooks()
            self._last_expert = batch.expert
        return self._network.velocity(batch)

    def close(self) -> None:
        """Drop the networks, so that their memory can be freed; here nothing but this object holds them."""


class PlacedTeacher:
    """A teacher placed by its DeepSpeed JSON, with the same methods, all collective."""

    def __init__(
        self,
        folder: Folder,
        sampling: Sampling,
        conditions: Conditions,
        placement: Placement,
        vae: Vae,
        *,
        ranks: Ranks = ALONE,
    ):
        """`conditions` has the samples and the text of the negative prompt."""
        self._folder, self._sampling, self._conditions, self._vae = folder, sampling, conditions, vae
        self._guidance = Guidance(conditions.text[sampling.negative_prompt or ""], scales(sampling))
        self._placement = placement
        self._network = build_teacher(folder, placement, self._guidance, ranks=ranks)
        self.velocity = self._network.velocity
        self.denoising = 0.0

    def draw(self, samples: list[Sample], seeds: list[int], steps: int, progress: Progress) -> Tensor:
        folder, settings, device = self._folder, self._sampling, collectives.device()
        shape = folder.latent_shape(settings.height, settings.width, settings.num_frames)
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
        noise_BCFHW = torch.stack(noise).to(device)
        conditioning = self._conditions.of(samples).to(device)
        start = time.monotonic()
        velocity = progress.counting(self.velocity)
        shift = settings.shift or folder.shift
        x0_BCFHW, _ = denoise(velocity, folder, shift, noise_BCFHW, conditioning, steps)
        synchronize()
        self.denoising = time.monotonic() - start
        return self._vae.decode(x0_BCFHW).cpu()

    def quantization_error(self, x0_BCFHW: Tensor, conditioning: Conditioning, seed: int) -> dict[str, float]:
        """Return the error of its velocities against those of unquantised weights, by band of sigma."""
        teacher = self._folder, self._placement, self._network, self._guidance
        with whole_sequences(local_modules(self._network)):  # on single frames
            return quantization_error(*teacher, x0_BCFHW, conditioning, seed)

    def close(self) -> None:
        release_module_references(local_modules(self._network))


def scales(sampling: Sampling) -> dict[Expert, float]:
    """Guidance scale of each expert; one number is for both, as in WanPipeline."""
    second = sampling.guidance_scale if sampling.guidance_scale_2 is None else sampling.guidance_scale_2
    return {Expert.HIGH_NOISE: sampling.guidance_scale, Expert.LOW_NOISE: second}


class PeakMemory:
    """Peak memory of the work under `running`, above what this process held when the object was made.

    Where the system cannot reset its own peak, CPU memory at the end of the work is taken for it.
    """

    def __init__(self) -> None:
        gc.collect()
        memory_usage.trim()  # what came before has freed would be taken for the work, and not be counted
        empty_cache()
        self._held = {"host": memory_usage.read().host}
        if on_accelerator():
            self._held["gpu"] = held_memory().allocated
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
