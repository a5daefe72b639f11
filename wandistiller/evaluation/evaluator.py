"""Samples and velocities of teacher and student on the same prompts; only one is loaded at a time."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from wandistiller.batch import Batch, State
from wandistiller.checkpoint.facts import Facts
from wandistiller.data.conditions import Conditions
from wandistiller.data.dataset import PromptItem
from wandistiller.data.media import MediaReader, Size
from wandistiller.data.tensor_cache import Sample
from wandistiller.distributed import collectives
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.round_robin import batched, number_of_rounds, round_robin
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.evaluation.candidates import reader_of
from wandistiller.evaluation.clip import ENCODERS
from wandistiller.evaluation.metrics import FEATURES, METRICS, DrawnBatch, Features, Metric
from wandistiller.evaluation.pipelines import PeakMemory, PlacedPipeline, base_of
from wandistiller.evaluation.sampling import Sampling
from wandistiller.experts import Expert, expert_at
from wandistiller.flow import with_noise
from wandistiller.network.folder import Folder
from wandistiller.teacher.base import Teacher
from wandistiller.teacher.build import keeps_beside
from wandistiller.teacher.placements.base import Placement
from wandistiller.teacher.teacher_json import with_keys
from wandistiller.tiny import clips, first_frames, shapes
from wandistiller.tiny.blotches import are_scenes
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_generator

M = TypeVar("M", Metric, Features)
EDGES = (0.0, 0.25, 0.5, 0.75, 0.875, 1.0)


@dataclass(frozen=True, slots=True)
class Band:
    """An interval of sigma in [0, 1] with one expert of the teacher and one of the student."""

    start: float
    end: float
    expert: Expert
    student_expert: Expert


def bands(teacher_boundary: float | None, student_boundary: float | None) -> list[Band]:
    edges = sorted({*EDGES, *(b for b in (teacher_boundary, student_boundary) if b is not None)})
    return [
        Band(a, b, expert_at(a, teacher_boundary), expert_at(a, student_boundary))
        for a, b in zip(edges, edges[1:], strict=False)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Checked settings of an evaluation."""

    teacher: Folder
    student: Folder
    items: list[PromptItem]
    output: Path
    teacher_sampling: Sampling
    student_sampling: Sampling
    """Without guidance."""
    seed: int
    batch: int
    """Prompts sampled at once; ranks share whole batches, so a sample does not depend on their number."""
    quick: bool
    """Draw each prompt once, not twice from different seeds."""
    encoders: dict[str, Path]
    """Folders by their name in ENCODERS."""
    placement: Placement
    """Of both; a student that is not the teacher with LoRA files has unquantised weights."""
    numbers: tuple[int, ...] = ()
    """Numbers of sampling steps at which both are drawn beside their own."""
    facts: Facts
    """Of the student: one of few steps has noise levels for other numbers than its own too."""

    def computable(self, metrics: list[M]) -> list[M]:
        """Return those of METRICS or FEATURES that this evaluation has the inputs for."""
        s = self.student_sampling
        size, known = (s.num_frames, s.height, s.width), {name: None for name in self.scenes}.keys()
        # prompts of the embedded teachers, whose pictures and clips a program can score
        has = {
            "shapes": size == (1, *(shapes.IMAGE_SIZE,) * 2) and known <= shapes.SPECS.keys(),
            "moving shapes": size == (clips.FRAMES, *(clips.CLIP_SIZE,) * 2) and known <= clips.SPECS.keys(),
            "colours": are_scenes(self.scenes, size),
            "frames": s.num_frames > 1,
            "twice": not self.quick,
            **{name: name in self.encoders for name in ENCODERS},
        }
        return [m for m in metrics if all(has[need] for need in m.needs.split(", ") if need)]

    @property
    def prompts(self) -> list[str]:
        return [item.prompt for item in self.items]

    @property
    def scenes(self) -> list[str]:
        """Names of the embedded teachers' scenes; of others the prompts."""
        return [first_frames.scene_name(item.prompt, item.image) for item in self.items]

    @property
    def samples(self) -> list[Sample]:
        s = self.student_sampling
        return [Sample(item, Size(s.height, s.width, s.num_frames)) for item in self.items]

    @property
    def reader(self) -> MediaReader:
        """The reader of the given frames, with the settings of the student's run."""
        return reader_of(self.facts, self.teacher)

    @property
    def shown(self) -> list[int]:
        """Numbers of the prompts in the picture, ten at most."""
        return list(range(0, len(self.prompts), -(-len(self.prompts) // 10)))


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """Scores and features of one sample that a candidate drew."""

    scores: dict[str, Tensor]
    """Metric -> number; of first draws."""
    features: dict[str, Tensor]
    """Name -> feature_D."""
    pixels_CFHW: Tensor | None
    """In [0, 1], for prompts in the picture."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples of one candidate in one number of steps, for this rank's prompts, and their cost."""

    samples: dict[int, ScoredSample]
    """By the prompt's number."""
    second_draw: dict[int, ScoredSample]
    """Samples from other seeds; none if each prompt is drawn once."""
    seconds: list[tuple[float, float, int]]
    """Of each batch: seconds, those of them between text encoder and VAE, and length."""


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """Samples of one candidate on this rank, by the number of steps, its own first; and its memory."""

    by_steps: dict[int, Drawn]
    peak_gib: dict[str, float]

    @property
    def in_own_steps(self) -> Drawn:
        """Samples in the candidate's own number of steps."""
        return next(iter(self.by_steps.values()))


class Evaluator:
    """Runs one candidate after the other. Every method is collective."""

    def __init__(self, settings: Evaluation, ranks: Ranks = ALONE):
        self._ranks, self._device = ranks, collectives.device()
        negative = settings.teacher_sampling.negative_prompt or ""
        cache, reader = settings.output / "cache", settings.reader
        how = {"samples_per_file": 1, "dtype": settings.placement.engine.dtype}
        self._conditions = Conditions(cache, settings.teacher, self._device, reader, **how)
        self._conditions.text.fill([*settings.prompts, negative])
        unusable = self._conditions.fill_frames(settings.samples)
        usable = [s.item for s in settings.samples if self._conditions.key(s).frames not in unusable]
        if not usable:
            raise ConfigError(*sorted(unusable.values()))
        for why in sorted(unusable.values()):  # as training does
            collectives.log0("skipped   %s", why, level=logging.WARNING)
        self.settings = settings = replace(settings, items=usable)
        """Those given, without the items whose frames cannot be used."""
        self._samples = settings.samples
        self._scenes = settings.scenes
        self._vae = settings.teacher.load_vae(self._device)
        self._encoders = {n: ENCODERS[n][0](path, self._device) for n, path in settings.encoders.items()}
        self._batches = batched(list(range(len(settings.prompts))), settings.batch)
        """Numbers of the prompts."""
        self._bands = bands(settings.teacher.boundary, settings.student.boundary)
        self._base: Teacher | None = None  # the teacher, whose weights the student has too
        self._before: PeakMemory | None = None  # of that
        self._x0: list[Tensor] = []  # of the teacher, by batch
        self._targets: dict[tuple[int, Band], Tensor] = {}  # its velocities, on the CPU

    def teacher(self) -> CandidateResult:
        """Sample; store the guided velocities on the samples of its own number of steps."""
        s, memory = self.settings, PeakMemory()
        with memory.running():
            parts = self._conditions, s.placement, self._vae
            candidate = PlacedPipeline(s.teacher, s.teacher_sampling, *parts, ranks=self._ranks)
        drawn, self._x0 = self._draw("teacher", candidate, memory, s.teacher_sampling.steps)
        velocity = self._counted("teacher: velocity error", candidate)
        for index, chunk, _ in round_robin(self._batches, self._ranks):
            for band in self._bands:
                self._targets[index, band] = velocity(self._state(index, chunk, band)).cpu()
        is_same = s.student.path == s.teacher.path and not s.teacher.added
        if is_same and keeps_beside(s.student, s.placement):  # the student is it with LoRA files beside it
            self._base, self._before = candidate.network, memory
        else:
            candidate.close()
        return CandidateResult(drawn, memory.peak_gib())

    def student(self) -> tuple[CandidateResult, dict[int, Tensor]]:
        """Sample, and compare velocities: squares_S2 of error and target per band, by the prompt's number."""
        s, memory, errors = self.settings, PeakMemory(self._before), {}
        with memory.running():
            base = self._base or base_of(s.student, s.placement, self._ranks)
            # beside LoRA files weights are as in training; without a base in memory they are exact
            placement = s.placement if base else with_keys(s.placement, weights=None)
            # the text of that prompt is there, and unused without guidance
            sampling = replace(s.student_sampling, negative_prompt=s.teacher_sampling.negative_prompt)
            # both have the teacher's text encoder and VAE
            parts = self._conditions, placement, self._vae, s.facts, base
            candidate = PlacedPipeline(s.student, sampling, *parts, ranks=self._ranks)
        drawn, _ = self._draw("student", candidate, memory, s.student_sampling.steps)
        velocity = self._counted("student: velocity error", candidate)
        for index, chunk, counts in round_robin(self._batches, self._ranks):
            squares = []
            for band in self._bands:
                state = replace(self._state(index, chunk, band), expert=band.student_expert)
                v_BCFHW = velocity(state).cpu()
                target_BCFHW = self._targets.pop((index, band))
                both = (v_BCFHW - target_BCFHW, target_BCFHW)
                squares.append(torch.stack([t.double().square().flatten(1).sum(1) for t in both], dim=1))
            if counts:
                errors |= dict(zip(chunk, torch.stack(squares, dim=1), strict=True))
        candidate.close()
        return CandidateResult(drawn, memory.peak_gib()), errors

    def _counted(self, name: str, candidate: PlacedPipeline) -> Callable[[State], Tensor]:
        """Return the candidate's velocity, whose calls on the samples of all batches a bar counts."""
        calls = number_of_rounds(self._batches, self._ranks) * len(self._bands)
        return Progress(name, calls).counting(candidate.velocity)

    def _draw(
        self, what: str, candidate: PlacedPipeline, memory: PeakMemory, own_steps: int
    ) -> tuple[dict[int, Drawn], list[Tensor]]:
        """Sample in each number of steps, the candidate's own first.

        Returns:
            What was drawn; x0_BCFHW of its own number by batch, on the CPU.
        """
        name = f"{what}: samples"
        drawn, own_x0 = self._draw_in(own_steps, name, candidate, memory)
        others = [steps for steps in dict.fromkeys(self.settings.numbers) if steps != own_steps]
        in_others = {n: self._draw_in(n, f"{name} in {n} steps", candidate, memory)[0] for n in others}
        return {own_steps: drawn} | in_others, own_x0

    def _draw_in(
        self, steps: int, what: str, candidate: PlacedPipeline, memory: PeakMemory
    ) -> tuple[Drawn, list[Tensor]]:
        """Sample prompt i from seed + i and, unless it is to be quick, once more from another seed."""
        s, drawn, first_x0 = self.settings, Drawn({}, {}, []), []
        seeds = (s.seed, s.seed + len(s.prompts))[: 1 if s.quick else 2]
        progress = Progress(what, number_of_rounds(self._batches, self._ranks) * len(seeds) * steps)
        for _, chunk, counts in round_robin(self._batches, self._ranks):
            samples, pixels, x0 = [self._samples[i] for i in chunk], [], []
            prompts = [sample.item.prompt for sample in samples]
            for first in seeds:
                start = time.monotonic()
                with memory.running():
                    pixels_BCFHW = candidate.draw(samples, [first + i for i in chunk], steps, progress)
                if counts and first == seeds[-1]:  # of two draws the second: the first may load libraries
                    drawn.seconds.append((time.monotonic() - start, candidate.denoising, len(chunk)))
                x0.append(self._vae.encode(pixels_BCFHW.to(self._device) * 2 - 1).cpu())
                pixels.append(pixels_BCFHW.cpu())
            first_x0.append(x0[0])
            given_frames, scenes = int(s.teacher.config.takes_image), [self._scenes[i] for i in chunk]
            how, other = (self._encoders, given_frames, scenes), None
            for n in reversed(range(len(seeds) if counts else 0)):
                other = DrawnBatch(prompts, pixels[n], x0[n], *how, other)
                (drawn.second_draw if n else drawn.samples).update(self._score(chunk, other, not n))
        return drawn, first_x0

    def _score(self, chunk: list[int], batch: DrawnBatch, is_first: bool) -> dict[int, ScoredSample]:
        s = self.settings
        scores = {m.name: m.compute(batch) for m in (s.computable(METRICS) if is_first else ())}
        features = {f.name: f.compute(batch) for f in s.computable(FEATURES)}
        return {
            i: ScoredSample(
                {name: score_B[b] for name, score_B in scores.items()},
                {name: feature_BD[b] for name, feature_BD in features.items()},
                batch.pixels_BCFHW[b].clone() if i in s.shown else None,
            )
            for b, i in enumerate(chunk)
        }

    def _state(self, index: int, chunk: list[int], band: Band) -> Batch:
        """The teacher's samples of a batch, noised to a sigma in the band.

        Noise and sigma are keyed by seed, prompt number and band.
        """
        conditioning = self._conditions.of([self._samples[i] for i in chunk]).to(self._device)
        keys = [(self.settings.seed, "evaluate", i, band.start) for i in chunk]
        uniform = (torch.rand((), generator=keyed_generator("sigma", *key)).item() for key in keys)
        sigmas = [band.start + (band.end - band.start) * u for u in uniform]
        return with_noise(self._x0[index].to(self._device), conditioning, band.expert, sigmas, keys)
