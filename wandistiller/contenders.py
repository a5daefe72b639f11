"""A pipeline under judgement: it draws what it is asked and answers with velocities; what that costs is measured."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from wandistiller import distributed
from wandistiller.batch import Batch, Expert
from wandistiller.engines import forget
from wandistiller.latents import Vae, denoise
from wandistiller.probes import networks, unguided
from wandistiller.sample import Sampling, draw, open_pipeline
from wandistiller.teacher import Guidance, GuidedTeacher, LocalTeacher, build_teacher
from wandistiller.wan import WanFolder

GIB = 2**30


class Contender(Protocol):
    """Whatever draws and has a velocity."""

    def draw(self, prompts: list[str], seeds: list[int]) -> Tensor:
        """pixels_BCFHW in [0, 1]; sample i starts from what `torch.Generator().manual_seed(seeds[i])` gives."""
        ...

    def velocity(self, batch: Batch) -> Tensor:
        """v_BCFHW, float32, guidance included."""
        ...

    def close(self) -> None:
        """It is asked no more; what it holds goes with it."""
        ...


class StockPipeline:
    """diffusers' own WanPipeline, as users run it."""

    def __init__(self, folder: WanFolder, how: Sampling, null_text_LD: Tensor, dtype: torch.dtype):
        self._pipeline, self._how = open_pipeline(folder.path, dtype), how
        high, low = self._pipeline.transformer, self._pipeline.transformer_2 or self._pipeline.transformer
        experts = LocalTeacher({Expert.HIGH_NOISE: high, Expert.LOW_NOISE: low})
        self._network, self._asked = GuidedTeacher(experts, Guidance(null_text_LD, scales(how))), Expert.HIGH_NOISE

    def draw(self, prompts: list[str], seeds: list[int]) -> Tensor:
        return draw(self._pipeline, prompts, seeds, self._how)

    def velocity(self, batch: Batch) -> Tensor:
        if batch.expert is not self._asked:  # where networks are offloaded, the other expert would stay on the GPU
            self._pipeline.maybe_free_model_hooks()
            self._asked = batch.expert
        return self._network.velocity(batch)

    def close(self) -> None:
        """Nothing but this object holds its networks."""


class PlacedTeacher:
    """A teacher that lives where its DeepSpeed JSON says; collective, like all it is asked."""

    def __init__(self, folder: WanFolder, how: Sampling, text: Callable[[str], Tensor], ds: dict[str, Any], vae: Vae):
        """`text` gives a prompt's states text_LD, and the negative prompt's."""
        self._folder, self._how, self._text, self._vae = folder, how, text, vae
        self._network = build_teacher(folder, ds, Guidance(text(how.negative_prompt or ""), scales(how)))

    def draw(self, prompts: list[str], seeds: list[int]) -> Tensor:
        shape = self._folder.latent_shape(self._how.height, self._how.width, self._how.num_frames)
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
        noise_BCFHW = torch.stack(noise).to(distributed.device())
        text_BLD = torch.stack([self._text(p) for p in prompts]).to(distributed.device())
        x0_BCFHW, _ = denoise(self.velocity, self._folder, self._folder.shift, noise_BCFHW, text_BLD, self._how.steps)
        return self._vae.decode(x0_BCFHW).cpu()

    def velocity(self, batch: Batch) -> Tensor:
        return self._network.velocity(batch)

    def close(self) -> None:
        forget(networks(unguided(self._network)).values())


def scales(how: Sampling) -> dict[Expert, float]:
    """The guidance of each expert; one number is for both, as in WanPipeline."""
    second = how.guidance_scale if how.guidance_scale_2 is None else how.guidance_scale_2
    return {Expert.HIGH_NOISE: how.guidance_scale, Expert.LOW_NOISE: second}


class Meter:
    """Peak memory of what is done under `running`, above what this process held when the meter was made.

    Host memory is sampled every few milliseconds: the kernel's own maximum is one of the whole life of the process.
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
        """Watch what happens inside."""
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
