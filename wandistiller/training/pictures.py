"""Pictures during a run: teacher above student, for fixed prompts and noise."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from wandistiller.batch import State
from wandistiller.config.job import Job
from wandistiller.data.cached_dataset import CachedData
from wandistiller.data.conditions import Conditions, still
from wandistiller.data.dataset import PromptItem
from wandistiller.data.media import MediaError
from wandistiller.data.tensor_cache import Sample
from wandistiller.distributed import collectives
from wandistiller.distributed.progress import LINE_SECONDS, Progress
from wandistiller.distributed.round_robin import batched
from wandistiller.experts import Expert
from wandistiller.flow import FewSteps
from wandistiller.monitoring.health_checks import SampleStats, picture_stats, sample_stats, write_stats
from wandistiller.monitoring.metrics import SAMPLES
from wandistiller.network.folder import Vae
from wandistiller.network.sampling import denoise
from wandistiller.student.learner import Learner
from wandistiller.teacher.base import Teacher
from wandistiller.tiny.blotches import are_scenes
from wandistiller.tiny.first_frames import scene_name
from wandistiller.utils.files import digest
from wandistiller.utils.images import (
    STILLS,
    WIDEST,
    can_write_mp4,
    evenly,
    save_clips,
    save_grid,
    tile_size,
    to_bytes,
)
from wandistiller.utils.keyed_random import keyed_normal

BEGINNING = "given"
"""The row of what clips begin with."""
Stats = dict[str, SampleStats]
"""Of pictures and their latents, by row."""


class Row(NamedTuple):
    """Pictures of one model, a sample for each prompt, on the CPU."""

    stills: Tensor
    """still_PCFHW: of images float32 in [0, 1], of clips STILLS frames of 8 bits."""
    clips: Tensor
    """clip_PCFHW of 8 bits, as large as in the MP4; empty of images."""

    @property
    def middle(self) -> list[Tensor]:
        """image_CHW of each prompt, in [0, 1]."""
        image_PCHW = self.stills[:, :, self.stills.shape[2] // 2]
        return list(image_PCHW if image_PCHW.is_floating_point() else image_PCHW / 255)


class PictureDrawer:
    """Draws pictures of teacher and student; every method is collective, and the ranks share the work.

    It takes the memory of a micro-step of training and of the VAE, which is loaded only while it draws.
    """

    def __init__(
        self, job: Job, data: CachedData, conditions: Conditions, teacher: Teacher | None, student: Learner
    ):
        self.job, self.data, self.conditions = job, data, conditions
        self.teacher, self.student = teacher, student
        self._items, self._prompts = data.sample_items, [item.prompt for item in data.sample_items]
        self._first: tuple[dict[str, Row], Stats] | None = None
        if job.run.num_frames > 1 and not can_write_mp4():
            collectives.log0("samples   as PNG alone; to see them move: pip install av")
        self._beginnings = self._row_of_beginnings() if collectives.rank() == 0 else {}

    def draw_teacher(self) -> None:
        """Draw the teacher's pictures, or decode cached ones, once for all of the student's."""
        if self._first is None:
            self._first = self._first_row(self.job.folder.load_vae(collectives.device()))

    def draw(self, done: int) -> Stats:
        """Write the grid of the student after `done` steps; return statistics of samples, by row."""
        self.draw_teacher()
        job, vae = self.job, self.job.folder.load_vae(collectives.device())
        calls = len(few.sigmas) if (few := _sampler(job)) else job.run.sample_steps
        row, stats = self._row(self._students, vae, "pictures of the student", calls)
        rows, of_rows = self._first[0] | {"student": row}, self._first[1] | {"student": stats}
        if collectives.rank() == 0:  # the grid last: it says that all is there
            write_stats(job.output / SAMPLES, done, of_rows)
            self._write(job.picture(done), self._beginnings | rows)
        return of_rows

    def _row_of_beginnings(self) -> dict[str, Row]:
        """Return the row of the frames that an image-to-video Wan is given, if it is one, read now."""
        job = self.job
        if not job.folder.config.takes_image:
            return {}
        samples = [Sample(item, job.size) for item in self._items]
        try:
            looks = [self._look(still(job.folder, job.reader, sample)) for sample in samples]
        except MediaError as error:  # it changed since it was encoded
            collectives.log0("samples   without the row `%s`: a file of the data %s", BEGINNING, error)
            return {}
        return {BEGINNING: Row(*map(torch.stack, zip(*looks, strict=True)))}

    def _write(self, file: Path, rows: dict[str, Row]) -> None:
        """Write the grid, and of clips their MP4 before it, where its libraries are installed."""
        prompts, frames = self._prompts, self.job.run.num_frames
        if frames == 1:
            save_grid(file, {name: row.middle for name, row in rows.items()}, prompts)
            return
        if can_write_mp4():
            clips = {name: list(row.clips) for name, row in rows.items()}
            save_clips(file.with_suffix(".mp4"), clips, prompts, self.job.folder.fps)
        stills = {  # frame by frame, so that the top of the picture is where the MP4 begins
            f"{name}\nframe {k + 1}": [still_CFHW[:, place] for still_CFHW in row.stills]
            for place, k in enumerate(evenly(frames, STILLS))
            for name, row in rows.items()
            if name != BEGINNING or k == 0
        }
        save_grid(file, stills, prompts)

    def _first_row(self, vae: Vae) -> tuple[dict[str, Row], Stats]:
        """Draw the teacher's pictures; without a teacher decode cached ones, if there are all."""
        if self.teacher and len(self.job.networks.teacher) == len(self.job.folder.configs):
            row, stats = self._row(self._teachers, vae, "pictures of the teacher", self.job.run.sample_steps)
        elif self.data.has_rollouts(self._items, self.job.size):
            row, stats = self._row(lambda items, *_: self.data.x0_of(items, self.job.size), vae, seeds=1)
        else:
            return {}, {}
        return {"teacher": row}, {"teacher": stats}

    def _row(
        self,
        make: Callable[[list[PromptItem], int, Progress], Tensor],
        vae: Vae,
        name: str = "pictures",
        calls: int = 0,
        seeds: int = 2,
    ) -> tuple[Row, SampleStats]:
        """Decode `make(items, seed, progress)` for each item, one after the other.

        Args:
            calls: of a network, that `make` counts in the progress called `name`.
            seeds: 2 to draw students of few steps, and their teachers, twice, for the distance of both.
        """
        ranks, items, micro = self.student.ranks, self._items, self.job.batch.micro
        # equal for all ranks, so that collectives match; the surplus is cut
        share = -(-len(items) // ranks.replicas)
        first = ranks.replica * share
        twice = seeds == 2 and self.job.schedule.few is not None
        run, names = self.job.run, [scene_name(item.prompt, item.image) for item in items]
        of_world = are_scenes(names, (run.num_frames, run.height, run.width))
        parts = batched([items[i % len(items)] for i in range(first, first + share)], micro)
        looks, stats = [], []
        progress = Progress(name, len(parts) * (1 + twice) * calls, "call", first_line=LINE_SECONDS)
        for part in parts:
            x0_BCFHW = make(part, 0, progress)
            again = make(part, 1, progress) if twice else None
            of_latents = sample_stats(x0_BCFHW, again, int(self.job.folder.config.takes_image))
            for item, x0_CFHW, numbers in zip(part, x0_BCFHW, of_latents, strict=True):
                collectives.raise_if_stop_requested()
                pixels_1CFHW = vae.decode(x0_CFHW[None])
                looks.append(self._look(pixels_1CFHW[0]))
                name = [scene_name(item.prompt, item.image)] if of_world else None
                stats.append(torch.cat([numbers, picture_stats(pixels_1CFHW, name)[0].to(numbers)]))
        *row, stats_PK = (
            ranks.of_each_replica(x_P)[: len(items)].cpu()
            for x_P in (*map(torch.stack, zip(*looks, strict=True)), torch.stack(stats))
        )
        return Row(*row), SampleStats(*stats_PK.mean(0).tolist())

    def _look(self, pixels_CFHW: Tensor) -> Row:
        """Take what is shown of a sample in [0, 1]: all of an image; stills and a small clip of a clip."""
        _, frames, height, width = pixels_CFHW.shape
        if frames == 1:
            return Row(pixels_CFHW, pixels_CFHW[:, :0].to(torch.uint8))
        stills_CFHW = to_bytes(pixels_CFHW[:, evenly(frames, STILLS)])
        tile = tile_size(height, width, len(self._items), WIDEST)
        if tile[1] < width:
            pixels_FCHW = interpolate(pixels_CFHW.transpose(0, 1), tile, mode="area")
            pixels_CFHW = pixels_FCHW.transpose(0, 1)
        return Row(stills_CFHW, to_bytes(pixels_CFHW))

    def _students(self, items: list[PromptItem], seed: int, progress: Progress) -> Tensor:
        return self._sampled(progress.counting(self.student.velocity), items, seed, _sampler(self.job))

    def _teachers(self, items: list[PromptItem], seed: int, progress: Progress) -> Tensor:
        """Sample with the teacher, or read what it drew before the run was stopped."""
        run = self.job.run
        settings = run.seed, seed, run.height, run.width, run.num_frames, run.sample_steps, run.shift
        # what the networks are given of an item's image or video, if they are
        frames = [self.conditions.key(Sample(item, self.job.size)).frames for item in items]
        keys = [(*item.key, *settings, *filter(None, [key])) for item, key in zip(items, frames, strict=True)]
        names = [digest("picture", *key) for key in keys]
        drawn = [self.data.measured.read(name) for name in names]
        if all(collectives.gather_objects(all(drawn))):  # a call may be collective
            progress.skip(run.sample_steps)
            return torch.stack([tensors["x0"] for tensors in drawn]).to(collectives.device())
        x0_BCFHW = self._sampled(progress.counting(self.teacher.velocity), items, seed)
        if self.student.ranks.place == 0:
            for name, x0_CFHW in zip(names, x0_BCFHW, strict=True):
                self.data.measured.write(name, {"x0": x0_CFHW})
        return x0_BCFHW

    def _sampled(
        self,
        velocity: Callable[[State], Tensor],
        items: list[PromptItem],
        seed: int,
        few: FewSteps | None = None,
    ) -> Tensor:
        """Sample x0_BCFHW; without a teacher from the noise of its cached rollouts.

        Args:
            seed: 0, or 1 for other samples of the same items.
            few: the sampler of a student of few steps.
        """
        job, run, device = self.job, self.job.run, collectives.device()
        shape = job.folder.latent_shape(run.height, run.width, run.num_frames)
        keys = [("picture", *i.key) if self.teacher else ("rollout", *i.key, 0) for i in items]
        keys = [(*key, "again") for key in keys] if seed else keys
        noise_BCFHW = torch.stack([keyed_normal(shape, run.seed, *key) for key in keys]).to(device)
        conditioning = self.conditions.of([Sample(item, self.job.size) for item in items]).to(device)

        def new_noise(call: int) -> Tensor:
            noise = [keyed_normal(shape, run.seed, *key, f"fresh {call}") for key in keys]
            return torch.stack(noise).to(device)

        start = noise_BCFHW, conditioning
        return denoise(velocity, job.folder, run.shift, *start, run.sample_steps, few, new_noise)[0]


def _sampler(job: Job) -> FewSteps | None:
    """Return the sampler of pictures in training: of a high-noise expert alone, its own part of the path."""
    few = job.schedule.few
    if not few or job.objective.trained_expert is not Expert.HIGH_NOISE:
        return few
    sigmas = (sigma for call, sigma in enumerate(few.sigmas) if few.expert(call) is Expert.HIGH_NOISE)
    return few._replace(sigmas=tuple(sigmas))
