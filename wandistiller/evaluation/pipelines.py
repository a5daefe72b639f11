"""Pipelines under evaluation, which draw samples and predict velocities, and the memory that they take."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from wandistiller.batch import Batch, Expert
from wandistiller.distributed import collectives
from wandistiller.engine.workarounds import release_module_references
from wandistiller.evaluation.draw_files import Sampling, draw, open_pipeline
from wandistiller.teacher.base import Guidance, GuidedTeacher, LocalTeacher, local_modules, without_guidance
from wandistiller.teacher.build import build_teacher
from wandistiller.utils.system_memory import GIB
from wandistiller.wan.encoders import Vae
from wandistiller.wan.pipeline import WanFolder
from wandistiller.wan.sampling import denoise


class Candidate(Protocol):
    """Anything that draws samples and predicts velocities."""

    def draw(self, prompts: list[str], seeds: list[int]) -> Tensor:
        """Sample pixels_BCFHW in [0, 1]; sample i starts from `torch.Generator().manual_seed(seeds[i])`."""
        ...

    def velocity(self, batch: Batch) -> Tensor:
        """Predict v_BCFHW, float32, guidance included."""
        ...

    def close(self) -> None:
        """Drop the networks, so that their memory can be freed."""
        ...


class DiffusersPipeline:
    """The WanPipeline of diffusers, as users run it."""

    def __init__(self, folder: WanFolder, sampling: Sampling, null_text_LD: Tensor, dtype: torch.dtype):
        self._pipeline, self._sampling = open_pipeline(folder.path, dtype), sampling
        high, low = self._pipeline.transformer, self._pipeline.transformer_2 or self._pipeline.transformer
        experts = LocalTeacher({Expert.HIGH_NOISE: high, Expert.LOW_NOISE: low})
        self._network = GuidedTeacher(experts, Guidance(null_text_LD, scales(sampling)))
        self._last_expert = Expert.HIGH_NOISE

    def draw(self, prompts: list[str], seeds: list[int]) -> Tensor:
        return draw(self._pipeline, prompts, seeds, self._sampling)

    def velocity(self, batch: Batch) -> Tensor:
        if batch.expert is not self._last_expert:  # offloaded networks: the other would stay on the GPU
            self._pipeline.maybe_free_model_hooks()
            self._last_expert = batch.expert
        return self._network.velocity(batch)

    def close(self) -> None:
        """Nothing but this object holds its networks."""


class PlacedTeacher:
    """A teacher placed by its DeepSpeed JSON; every method is collective."""

    def __init__(
        self,
        folder: WanFolder,
        sampling: Sampling,
        text: Callable[[str], Tensor],
        ds: dict[str, Any],
        vae: Vae,
    ):
        """`text` gives a prompt's states text_LD, and the negative prompt's."""
        self._folder, self._sampling, self._text, self._vae = folder, sampling, text, vae
        guidance = Guidance(text(sampling.negative_prompt or ""), scales(sampling))
        self._network = build_teacher(folder, ds, guidance)

    def draw(self, prompts: list[str], seeds: list[int]) -> Tensor:
        settings = self._sampling
        shape = self._folder.latent_shape(settings.height, settings.width, settings.num_frames)
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
        noise_BCFHW = torch.stack(noise).to(collectives.device())
        text_BLD = torch.stack([self._text(p) for p in prompts]).to(collectives.device())
        folder, steps = self._folder, settings.steps
        x0_BCFHW, _ = denoise(self.velocity, folder, folder.shift, noise_BCFHW, text_BLD, steps)
        return self._vae.decode(x0_BCFHW).cpu()

    def velocity(self, batch: Batch) -> Tensor:
        return self._network.velocity(batch)

    def close(self) -> None:
        release_module_references(local_modules(without_guidance(self._network)).values())


def scales(sampling: Sampling) -> dict[Expert, float]:
    """Guidance scale of each expert; one number is for both, as in WanPipeline."""
    second = sampling.guidance_scale if sampling.guidance_scale_2 is None else sampling.guidance_scale_2
    return {Expert.HIGH_NOISE: sampling.guidance_scale, Expert.LOW_NOISE: second}


class PeakMemory:
    """Peak memory of the work under `running`, above what this process held when the object was made.

    Host memory is sampled every few milliseconds: the kernel's own maximum is one of the whole life of the
    process.
    """

    def __init__(self) -> None:
        gc.collect()
        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.empty_cache()
        self._held = {"host": _resident(), **({"gpu": torch.cuda.memory_allocated()} if self._cuda else {})}
        self._peak = dict(self._held)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the peak while the block runs."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done,), daemon=True)
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            if self._cuda:
                self._peak["gpu"] = max(self._peak["gpu"], torch.cuda.max_memory_allocated())

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(0.005):
            self._peak["host"] = max(self._peak["host"], _resident())

    def peak_gib(self) -> dict[str, float]:
        """GiB in host memory and, where there is one, on the accelerator."""
        return {k: round((v - self._held[k]) / GIB, 4) for k, v in self._peak.items()}


def _resident() -> int:
    """Bytes of this process in memory, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
