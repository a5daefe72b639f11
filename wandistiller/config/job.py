"""A checked run and the values that the commands derive from it."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from wandistiller.batch import STUDENT
from wandistiller.config.run_config import RunConfig
from wandistiller.config.start import Start
from wandistiller.data.buckets import make_buckets
from wandistiller.data.colours import RGB, background_of
from wandistiller.data.dataset import PromptDataset, PromptItem
from wandistiller.data.latent_cache import Rollouts
from wandistiller.data.media import MediaReader, Size
from wandistiller.engine.batch_size import BatchSize
from wandistiller.engine.ds_overrides import EngineOverrides, apply_overrides
from wandistiller.engine.ds_schema import LENGTHS, LOWEST, PEAKS, STEP_SIZE
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.experts import Expert
from wandistiller.flow import FewSteps, FlowSchedule
from wandistiller.objectives.base import Role
from wandistiller.objectives.objective import Objective
from wandistiller.student.config import IMPORTANCE, WIDTH_KEYS, StudentConfig, lineage
from wandistiller.student.shared_base import obstacle, teacher_bases
from wandistiller.teacher.placements.base import Placement
from wandistiller.wan.pipeline import WanFolder
from wandistiller.wan.sampling import few_steps
from wandistiller.wan.transformer_config import TransformerConfig


class OtherNetwork(NamedTuple):
    """A network that is trained beside the student."""

    role: Role
    transformer: TransformerConfig
    engine: EngineConfig


def _derived(engine: EngineConfig, role: Role) -> EngineConfig:
    """Return the student's JSON with the role's learning rate and, in a schedule, number of updates.

    The schedule has the student's shape: its lowest rate is the same share of its highest, and its parts end
    at the same steps of the run, but for `warmup_num_steps`, which count the role's own updates.
    """
    rates, engine = engine.section("scheduler.params"), apply_overrides(engine, EngineOverrides(lr=role.lr))
    schedule, kind = engine.section("scheduler.params"), engine.schedule
    if role.lr is not None and (highest := rates.get(PEAKS.get(kind))):
        schedule |= {key: rates[key] * role.lr / highest for key in LOWEST & rates.keys()}
    if kind == "onecycle":
        first = schedule.setdefault("cycle_first_step_size", STEP_SIZE)
        schedule.setdefault("cycle_second_step_size", first)
    if kind == "lrrangetest":
        schedule.setdefault("lr_range_test_step_size", STEP_SIZE)
    for key in LENGTHS & schedule.keys():
        schedule[key] *= role.updates
    for key in {"total_num_steps", "cycle_first_step_size"} & schedule.keys():
        schedule[key] += role.warmup
    return engine


@dataclass(frozen=True)
class Job:
    """A checked run, as all commands take it."""

    run: RunConfig
    """The recipe, with the teacher's own values in place of None."""
    folder: WanFolder
    items: PromptDataset
    student: StudentConfig
    student_transformer: TransformerConfig
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
        return MediaReader(r.video_fps, self.background, r.fit, r.clips_per_video)

    @property
    def picks_samples(self) -> bool:
        """True if pictures are of items picked from the data."""
        return self.run.sample_prompts == [item.prompt for item in self.items.spread()]

    @cached_property
    def sample_items(self) -> list[PromptItem]:
        """Items that pictures are of: prompts; for an image-to-video Wan each with the image of its row."""
        prompts = self.run.sample_prompts
        if not self.folder.config.takes_image:
            return [PromptItem(prompt) for prompt in prompts]
        if self.picks_samples:
            return self.items.spread()
        rows = {item.prompt: item for item in self.items if item.prompt in prompts}
        return [rows[prompt] for prompt in prompts if prompt in rows]

    @property
    def epoch(self) -> int:
        """Samples of one pass over the data."""
        return self.items.samples(self.run.rollouts_per_prompt, self.run.clips_per_video)

    @property
    def guidance(self) -> dict[Expert, float]:
        return {Expert.HIGH_NOISE: self.run.guidance_scale, Expert.LOW_NOISE: self.run.guidance_scale_2}

    @cached_property
    def schedule(self) -> FlowSchedule:
        r, boundary, objective = self.run, self.folder.boundary, self.objective
        handover = boundary if self.student.experts == "two" else None
        number = objective.sampling_steps
        few = few_steps(r.shift, number, handover, objective.few_step_sampler) if number else None
        trained = objective.trained_expert
        return FlowSchedule(r.shift, boundary, r.seed, handover, few, trained)

    @property
    def drawn(self) -> FewSteps | None:
        """The sampler of pictures in training: of a high-noise expert alone, its own part of the path."""
        few = self.schedule.few
        if not few or self.objective.trained_expert is not Expert.HIGH_NOISE:
            return few
        own = tuple(s for call, s in enumerate(few.sigmas) if few.expert(call) is Expert.HIGH_NOISE)
        return few._replace(sigmas=own)

    @cached_property
    def others(self) -> dict[str, OtherNetwork]:
        """The networks that the objective trains beside the student, by role."""
        configs, engine = (self.student_transformer, self.folder.config), self.student_engine
        roles = self.objective.others.items()
        return {name: OtherNetwork(r, r.origin(*configs), _derived(engine, r)) for name, r in roles}

    @property
    def student_experts(self) -> list[Expert]:
        return list(Expert) if self.student.experts == "two" else [Expert.HIGH_NOISE]

    @property
    def trained_experts(self) -> list[Expert]:
        """The student's networks that are trained; all but with an objective of one expert."""
        return [e for e in self.student_experts if self.objective.trained_expert in (None, e)]

    @property
    def called_experts(self) -> list[Expert]:
        """The student's networks that are called: the trained ones, and one that samples begin with."""
        return [e for e in self.student_experts if e in self.trained_experts or e is Expert.HIGH_NOISE]

    @cached_property
    def bases(self) -> dict[Expert, Expert]:
        """The teacher's network that each of the student's is, but for its adapters; empty if it is not."""
        return teacher_bases(self)

    @property
    def shares_base(self) -> bool:
        """True if the teacher, the student and networks beside it are one base with adapters for each."""
        return bool(self.bases) and not obstacle(self)

    @property
    def is_teachers_lora(self) -> bool:
        """True if the student is the teacher, network for network, with its adapters."""
        return self.bases == {expert: expert for expert in self.folder.configs}

    @property
    def teachers_folder(self) -> WanFolder:
        """The teacher, with the experts alone that an objective of one expert needs."""
        if not (one := self.objective.trained_expert):
            return self.folder
        shared = self.bases.items() if self.shares_base else ()
        needed = {one, *(base for expert, base in shared if expert in self.called_experts)}
        configs = {e: config for e, config in self.folder.configs.items() if e in needed}
        return dataclasses.replace(self.folder, configs=configs)

    @property
    def has_whole_teacher(self) -> bool:
        """True if all of the teacher's experts are there, as its pictures need."""
        return len(self.teachers_folder.configs) == len(self.folder.configs)

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
    def needs_latents(self) -> bool:
        """True if clean latents are used: for the losses, or to measure the teacher."""
        return bool(self.updates_with_latents)

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
        first = objective.first_update(0) + every - 1
        return range(first, self.updates if objective.needs_latents(STUDENT) else first, every)

    @property
    def branches(self) -> int:
        """Branches of classifier-free guidance in one call of the teacher: text and null, or text alone."""
        return 2 if {self.run.guidance_scale, self.run.guidance_scale_2} != {1} else 1

    @property
    def swept(self) -> int:
        """Micro-steps whose samples go through the teacher together."""
        tokens = max(self.folder.tokens(s.height, s.width, s.num_frames) for s in (self.size, *self.buckets))
        samples = self.batch.micro * max(1, self.branches // self.teacher.guidance_passes)
        nbytes = samples * tokens * self.folder.config.width * self.teacher.engine.dtype.itemsize
        return self.teacher.sweep(self.batch.accumulation, nbytes)

    @property
    def rolled_out(self) -> int:
        """Micro-steps whose samples the student draws together, through weights that arrive block by block.

        They may be of several updates of a step, between which the student does not change. ZeRO-3 gathers
        adapters in the order of one call after the other.
        """
        if not self.shares_base or self.student_engine.stage == 3:
            return 1
        tokens = self.folder.tokens(self.size.height, self.size.width, self.size.num_frames)
        nbytes = self.batch.micro * tokens * self.folder.config.width * self.student_engine.dtype.itemsize
        return self.teacher.sweep(len(self.objective.updates) * self.batch.accumulation, nbytes)

    @property
    def matched_objective(self) -> Objective:
        """The objective with the teacher's blocks for the student's own."""
        return self.objective.for_student(self.stands_for)

    @property
    def stands_for(self) -> list[int]:
        """The teacher's block that each of the student's is compared with: of a later run as of the first."""
        before, layers = self.start and self.start.facts.stands_for, self.folder.config.num_layers
        if before and before[-1] == layers - 1:  # else of a teacher of another depth
            return before
        return lineage(self.student, self.student_transformer, self.folder)

    def with_layers(self, kept: list[int]) -> "Job":
        """Replace the student's `importance` by the layers that were chosen by it."""
        return dataclasses.replace(self, student=dataclasses.replace(self.student, keep_layers=kept))

    @property
    def background(self) -> RGB:
        """The colour below transparent parts of media, and of bars."""
        return background_of(self.run.background)
