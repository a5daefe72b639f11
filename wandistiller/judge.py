"""One pipeline after the other is loaded, asked the same, and freed: an evaluation never holds both."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wandistiller import distributed, shapes
from wandistiller.batch import Batch, Expert
from wandistiller.clip import Clip
from wandistiller.conditioning import TextCache
from wandistiller.contenders import Contender, Meter, PlacedTeacher, StockPipeline
from wandistiller.latents import Vae
from wandistiller.metrics import Progress
from wandistiller.noise import expert_at, keyed_generator, keyed_normal, path
from wandistiller.sample import Sampling
from wandistiller.wan import WanFolder, count_parameters

EDGES = (0.0, 0.25, 0.5, 0.75, 0.875, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What is compared with what, checked."""

    teacher: WanFolder
    student: WanFolder
    prompts: list[str]
    output: Path
    guided: Sampling
    """How the teacher is asked."""
    plain: Sampling
    """How the student is asked: without guidance."""
    seed: int
    batch: int
    """Prompts drawn at once, and the unit that ranks share: so a sample never depends on the number of ranks."""
    dtype: torch.dtype
    quick: bool
    """Do not draw the teacher a second time, from other seeds."""
    clip: Path | None
    teacher_ds: dict[str, Any] | None
    """Where the teacher lives; None is a WanPipeline on every rank."""

    @property
    def has_shapes(self) -> bool:
        """Whether the prompts are those of the embedded teacher, whose pictures a program can judge."""
        side = shapes.IMAGE_SIZE
        return (self.plain.height, self.plain.width) == (side, side) and all(p in shapes.SPECS for p in self.prompts)

    @property
    def shown(self) -> list[int]:
        """The prompts of the picture, ten at most."""
        return list(range(0, len(self.prompts), -(-len(self.prompts) // 10)))


@dataclass(frozen=True, slots=True)
class Band:
    """A part of [0, 1] of sigma in which one expert of the teacher, and one of the student, serves."""

    start: float
    end: float
    expert: Expert
    student_expert: Expert


def bands(teacher_boundary: float | None, student_boundary: float | None) -> list[Band]:
    """[0, 1] cut at EDGES and where an expert takes over."""
    edges = sorted({*EDGES, *(b for b in (teacher_boundary, student_boundary) if b is not None)})
    return [Band(a, b, expert_at(a, teacher_boundary), expert_at(a, student_boundary))
            for a, b in zip(edges, edges[1:], strict=False)]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """What is kept of one drawn sample."""

    latent_D: Tensor
    """Mean and standard deviation over frames and pixels of each channel of its VAE latents."""
    right: bool | None
    clip_D: Tensor | None
    clip_score: float | None
    frame_CHW: Tensor | None
    """The middle one, of the prompts that are shown."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One pass over this rank's prompts."""

    samples: dict[int, Sample]
    """By the prompt's number."""
    x0: list[Tensor]
    """x0_BCFHW of each turn, on the CPU."""
    seconds: list[tuple[float, int]]
    """Of each batch, and its length."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one contender did with this rank's prompts, and what it cost."""

    parameters: int
    samples: dict[int, Sample]
    again: dict[int, Sample]
    """From other seeds."""
    seconds: list[tuple[float, int]]
    peak_gib: dict[str, float]


class Judge:
    """Asks one contender after the other; every method is collective, and all ranks ask equally often."""

    def __init__(self, wanted: Evaluation):
        self.wanted, self._device = wanted, distributed.device()
        negative = wanted.guided.negative_prompt or ""
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        self._text = TextCache(wanted.output / "cache", wanted.teacher.path, [*wanted.prompts, negative], dtype)
        self._text.fill(self._device)
        self._null_LD = self._text[negative]
        self._vae = Vae(wanted.teacher, self._device)
        self._clip = Clip(wanted.clip, self._device) if wanted.clip else None
        self._bands = bands(wanted.teacher.boundary, wanted.student.boundary)
        self._x0: list[Tensor] = []  # of the teacher, by turn
        self._targets: dict[tuple[int, Band], Tensor] = {}  # its velocities, on the CPU

    def teacher(self) -> Seen:
        """Let it draw once or twice; keep its guided velocities on what it drew."""
        w, meter = self.wanted, Meter()
        with meter.running():
            if w.teacher_ds is None:
                contender = StockPipeline(w.teacher, w.guided, self._null_LD, w.dtype)
            else:
                contender = PlacedTeacher(w.teacher, w.guided, self._text.__getitem__, w.teacher_ds, self._vae)
        drawn = self._draw("teacher", contender, meter, w.seed)
        again = {} if w.quick else self._draw("teacher, other seeds", contender, meter, w.seed + len(w.prompts)).samples
        self._x0 = drawn.x0
        for turn, chunk, _ in self._turns("teacher, velocities"):
            for band in self._bands:
                self._targets[turn, band] = contender.velocity(self._state(turn, chunk, band)).cpu()
        contender.close()
        return Seen(parameters(w.teacher), drawn.samples, again, drawn.seconds, meter.peak_gib())

    def student(self) -> tuple[Seen, dict[int, Tensor]]:
        """Let it draw, and compare its velocities: squares_S2 of error and target per band, by the prompt's number."""
        w, meter, errors = self.wanted, Meter(), {}
        with meter.running():
            contender = StockPipeline(w.student, w.plain, self._null_LD, w.dtype)
        drawn = self._draw("student", contender, meter, w.seed)
        for turn, chunk, mine in self._turns("student, velocities"):
            squares = []
            for band in self._bands:
                v_BCFHW = contender.velocity(self._state(turn, chunk, band).at(expert=band.student_expert)).cpu()
                target_BCFHW = self._targets.pop((turn, band))
                both = (v_BCFHW - target_BCFHW, target_BCFHW)
                squares.append(torch.stack([t.double().square().flatten(1).sum(1) for t in both], dim=1))
            if mine:
                errors |= dict(zip(chunk, torch.stack(squares, dim=1), strict=True))
        return Seen(parameters(w.student), drawn.samples, {}, drawn.seconds, meter.peak_gib()), errors

    def _turns(self, what: str) -> Iterator[tuple[int, list[int], bool]]:
        """(turn, prompt numbers, whether they are this rank's); a rank without work repeats the last: collectives match."""
        everything, batch = list(range(len(self.wanted.prompts))), self.wanted.batch
        chunks = [everything[i : i + batch] for i in range(0, len(everything), batch)]
        rounds = -(-len(chunks) // distributed.world_size())
        progress = Progress(what, rounds)
        for turn in range(rounds):
            place = turn * distributed.world_size() + distributed.rank()
            yield turn, chunks[min(place, len(chunks) - 1)], place < len(chunks)
            progress.advance()

    def _draw(self, what: str, contender: Contender, meter: Meter, seed: int) -> Drawn:
        """Prompt i from seed + i."""
        drawn = Drawn({}, [], [])
        for _, chunk, mine in self._turns(what):
            began = time.monotonic()
            with meter.running():
                pixels_BCFHW = contender.draw([self.wanted.prompts[i] for i in chunk], [seed + i for i in chunk])
            seconds = time.monotonic() - began
            x0_BCFHW = self._vae.encode(pixels_BCFHW.to(self._device) * 2 - 1).cpu()
            drawn.x0.append(x0_BCFHW)
            if mine:
                drawn.seconds.append((seconds, len(chunk)))
                drawn.samples.update(self._looked_at(chunk, pixels_BCFHW[:, :, pixels_BCFHW.shape[2] // 2], x0_BCFHW))
        return drawn

    def _looked_at(self, chunk: list[int], frame_BCHW: Tensor, x0_BCFHW: Tensor) -> dict[int, Sample]:
        w, prompts = self.wanted, [self.wanted.prompts[i] for i in chunk]
        latent_BD = torch.cat([x0_BCFHW.mean((2, 3, 4)), x0_BCFHW.std((2, 3, 4))], dim=1)
        right = shapes.fully_right(frame_BCHW, prompts) if w.has_shapes else [None] * len(chunk)
        clip_BD, score_B = self._clip.judge(frame_BCHW, prompts) if self._clip else ([None] * len(chunk),) * 2
        return {
            i: Sample(latent_BD[b], right[b], clip_BD[b], score_B[b], frame_BCHW[b].clone() if i in w.shown else None)
            for b, i in enumerate(chunk)
        }

    def _state(self, turn: int, chunk: list[int], band: Band) -> Batch:
        """The teacher's samples of a turn, noised to a sigma in the band; both keyed by seed, prompt number and band."""
        x0_BCFHW, width = self._x0[turn].to(self._device), band.end - band.start
        keys = [(self.wanted.seed, "evaluate", i, band.start) for i in chunk]
        sigma = [band.start + width * torch.rand((), generator=keyed_generator("sigma", *key)).item() for key in keys]
        sigma_B = torch.tensor(sigma, device=self._device)
        noise_BCFHW = torch.stack([keyed_normal(x0_BCFHW.shape[1:], *key) for key in keys]).to(self._device)
        text_BLD = torch.stack([self._text[self.wanted.prompts[i]] for i in chunk]).to(self._device)
        return Batch(x0_BCFHW, noise_BCFHW, path(x0_BCFHW, noise_BCFHW, sigma_B), sigma_B, text_BLD, band.expert)


def parameters(folder: WanFolder) -> int:
    """Parameters of all experts."""
    return sum(count_parameters(config) for config in folder.configs.values())
