"""A checked run and the values that the commands derive from it."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path

from wandistiller.batch import STUDENT
from wandistiller.config.networks import NetworkTable, TableMaker
from wandistiller.config.run_config import RunConfig
from wandistiller.config.start import Start
from wandistiller.data.buckets import make_buckets
from wandistiller.data.colours import background_of
from wandistiller.data.dataset import PromptDataset, PromptItem
from wandistiller.data.hub_prompts import HUB, prompts_file
from wandistiller.data.latent_cache import Rollouts
from wandistiller.data.media import MediaReader, Size
from wandistiller.engine.batch_size import BatchSize
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.flow import FlowSchedule
from wandistiller.network.config import NetworkConfig
from wandistiller.network.folder import Folder
from wandistiller.network.sampling import few_steps
from wandistiller.objectives.objective import Objective
from wandistiller.student.config import IMPORTANCE, WIDTH_KEYS, StudentConfig, lineage
from wandistiller.teacher.placements.base import Placement


@dataclass(frozen=True)
class Job:
    """A checked run, as all commands take it."""

    run: RunConfig
    """The recipe, with the teacher's own values in place of None."""
    folder: Folder
    items: PromptDataset
    student: StudentConfig
    student_transformer: NetworkConfig
    student_engine: EngineConfig
    teacher: Placement
    objective: Objective
    resume_from: Path | None
    keeps_path: bool = False
    """The states of the teacher's sampling path are cached too, for this stage or another."""
    start: Start | None = None
    """The run whose student this one trains on; None: the student is new, or of a pipeline's folder."""
    stage: str = ""
    """Its name, if it is a stage of a recipe."""
    previous: "Job | None" = None
    is_spent: bool = False
    """True if the stage after it has begun, and the checkpoints that would say that this one is done are
    gone: it is neither trained nor exported again."""

    @property
    def batch(self) -> BatchSize:
        return self.student_engine.batch

    @property
    def output(self) -> Path:
        return Path(self.run.output_dir)

    @property
    def cache(self) -> Path:
        return Path(self.run.cache_dir or self.output / "cache")

    @property
    def data(self) -> str:
        """Name of the data's file or folder; of a data set of the hub, of its prompts in the cache."""
        r = self.run
        if not r.data_path.startswith(HUB):
            return r.data_path
        return str(prompts_file(r.data_path, r.hub_column, r.hub_count, r.seed, self.cache))

    @property
    def samples(self) -> Path:
        return Path(self.run.sample_dir or self.output / "samples")

    def picture(self, step: int) -> Path:
        return self.samples / f"step_{step:08d}.png"

    @property
    def size(self) -> Size:
        return Size(self.run.height, self.run.width, self.run.num_frames)

    @property
    def buckets(self) -> list[Size]:
        """Sizes to which media are cut, each to the nearest in shape; if empty, all to the run's size."""
        r, sizes = self.run, self.run.buckets or []
        if sizes is True:
            sizes = make_buckets(r.height, r.width, self.folder.multiple)
        return [Size(height, width, r.num_frames) for height, width in sizes]

    @property
    def rollouts(self) -> Rollouts:
        r = self.run
        return Rollouts(r.rollout_steps, r.rollouts_per_prompt, self.keeps_path, r.seed, r.shift)

    @cached_property
    def reader(self) -> MediaReader:
        r = self.run
        return MediaReader(r.video_fps, background_of(r.background), r.fit)

    @cached_property
    def sample_items(self) -> list[PromptItem]:
        """Items that pictures are of: prompts; for an image-to-video Wan each with the image of its row."""
        prompts = self.run.sample_prompts
        if not self.folder.config.takes_image:
            return [PromptItem(prompt) for prompt in prompts]
        if prompts == [item.prompt for item in self.items.spread()]:
            return self.items.spread()
        rows = {item.prompt: item for item in self.items if item.prompt in prompts}
        return [rows[prompt] for prompt in prompts if prompt in rows]

    @property
    def epoch(self) -> int:
        """Samples of one pass over the data."""
        return self.items.samples(self.run.rollouts_per_prompt)

    @cached_property
    def schedule(self) -> FlowSchedule:
        r, boundary, objective = self.run, self.folder.boundary, self.objective
        handover = boundary if self.student.experts == "two" else None
        number = objective.sampling_steps
        few = few_steps(r.shift, number, handover, objective.few_step_sampler) if number else None
        trained = objective.trained_expert
        return FlowSchedule(r.shift, boundary, r.seed, handover, few, trained)

    @cached_property
    def networks(self) -> NetworkTable:
        return TableMaker(
            run=self.run,
            folder=self.folder,
            student=self.student,
            config=self.student_transformer,
            engine=self.student_engine,
            teacher=self.teacher,
            objective=self.objective,
            start=self.start,
            resumes=self.resume_from is not None,
        ).table()

    @property
    def is_cut(self) -> bool:
        """True if the student is narrower than the teacher that it is made of."""
        sizes = attrgetter(*WIDTH_KEYS)
        is_smaller = sizes(self.student_transformer) != sizes(self.folder.config)
        return self.student.init == "teacher" and is_smaller

    @property
    def needs_measuring(self) -> bool:
        """True if building the student needs the teacher; a resumed run's student is in its checkpoint."""
        return not self.resume_from and (self.student.keep_layers == IMPORTANCE or self.is_cut)

    @property
    def updates(self) -> int:
        """Updates of all roles in the whole run; each has a global batch of its own."""
        return self.objective.first_update(self.run.max_steps)

    @property
    def updates_with_latents(self) -> range:
        """Numbers of the updates whose samples need clean latents: all, the student's own, or none."""
        objective, every = self.objective, len(self.objective.updates)
        if self.needs_measuring or any(map(objective.needs_latents, objective.others)):
            return range(self.updates)
        return range(every - 1, self.updates if objective.needs_latents(STUDENT) else 0, every)

    @property
    def stands_for(self) -> list[int]:
        """The teacher's block that each of the student's is compared with: of a later run as of the first."""
        before, layers = self.start and self.start.facts.stands_for, self.folder.config.num_layers
        if before and before[-1] == layers - 1:  # else of a teacher of another depth
            return before
        return lineage(self.student, self.student_transformer, self.folder)

    def with_layers(self, layers: list[int]) -> "Job":
        """Replace the student's `importance` by the layers that were chosen by it."""
        return dataclasses.replace(self, student=dataclasses.replace(self.student, keep_layers=layers))


def branches(job: Job) -> int:
    """Return the branches of classifier-free guidance in one call of the teacher: text and null, or text."""
    return 2 if {job.run.guidance_scale, job.run.guidance_scale_2} != {1} else 1


def swept(job: Job) -> int:
    """Return how many micro-steps' samples go through the teacher together, which may stream its blocks."""
    samples = job.batch.micro * max(1, branches(job) // job.teacher.guidance_passes)
    tokens = max(job.folder.tokens(s.height, s.width, s.num_frames) for s in (job.size, *job.buckets))
    nbytes = samples * tokens * job.folder.config.width * job.teacher.engine.dtype.itemsize
    return job.teacher.sweep(job.batch.accumulation, nbytes)


def rolled_out(job: Job) -> int:
    """Return how many micro-steps' samples the student draws together, on the teacher's weights.

    They may be of several updates of a step, between which the student does not change. ZeRO-3 gathers
    adapters in the order of one call after the other.
    """
    if not job.networks.share_base or job.student_engine.stage == 3:
        return 1
    tokens = job.folder.tokens(job.size.height, job.size.width, job.size.num_frames)
    nbytes = job.batch.micro * tokens * job.folder.config.width * job.student_engine.dtype.itemsize
    return job.teacher.sweep(len(job.objective.updates) * job.batch.accumulation, nbytes)
