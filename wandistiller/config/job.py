"""A checked run and the values that the commands derive from it."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wandistiller.batch import Expert
from wandistiller.checkpoint.facts import Facts
from wandistiller.config.data_identity import data_digest
from wandistiller.config.others import KEY, OtherNetwork, derived
from wandistiller.config.run_config import JSON_FILES, RunConfig
from wandistiller.config.start import Start, start_after
from wandistiller.data.buckets import make_buckets
from wandistiller.data.colours import RGB, background_of
from wandistiller.data.dataset import PromptDataset
from wandistiller.data.latent_cache import Rollouts
from wandistiller.data.media import Size
from wandistiller.engine.ds_config import BatchSize, dtype_name
from wandistiller.engine.ds_schema import BATCH_KEYS
from wandistiller.flow import FewSteps, FlowSchedule
from wandistiller.objectives.objective import Objective
from wandistiller.student.config import IMPORTANCE, WIDTH_KEYS, StudentConfig, lineage
from wandistiller.teacher.teacher_json import quantized_facts
from wandistiller.utils.files import digest, ends_of_files, fingerprint, write_json
from wandistiller.wan.pipeline import WanFolder
from wandistiller.wan.sampling import few_steps


@dataclass(frozen=True)
class Job:
    """A checked run, as all commands take it."""

    run: RunConfig
    """The recipe, with the teacher's own values in place of None."""
    folder: WanFolder
    items: PromptDataset
    student: StudentConfig
    student_transformer: dict[str, Any]
    student_ds: dict[str, Any]
    teacher_ds: dict[str, Any]
    batch: BatchSize
    objective: Objective
    resume_from: Path | None
    others_ds: dict[str, Any] | None = None
    """DeepSpeed JSON of the networks that are trained beside the student, if the run names one."""
    start: Start | None = None
    """The run whose student this one trains on; None: the student is new, or of a pipeline's folder."""
    stage: str = ""
    """Its name, if it is a stage of a recipe."""
    previous: "Job | None" = None
    """The stage before this one."""
    is_spent: bool = False
    """True if the stage after it has begun, and the checkpoints that would say that this one is done are
    gone: it is neither trained nor exported again."""

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
        """Return the file of the sample grid after `step` steps."""
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
        return Rollouts(r.rollout_steps, r.rollouts_per_prompt, r.rollout_path, r.seed, r.shift)

    @property
    def epoch(self) -> int:
        """Samples of one pass over the data."""
        return self.items.samples(self.run.rollouts_per_prompt, self.run.clips_per_video)

    @property
    def guidance(self) -> dict[Expert, float]:
        return {Expert.HIGH_NOISE: self.run.guidance_scale, Expert.LOW_NOISE: self.run.guidance_scale_2}

    @cached_property
    def schedule(self) -> FlowSchedule:
        r, boundary = self.run, self.folder.boundary
        handover = boundary if self.student.experts == "two" else None
        number = self.objective.sampling_steps
        objective = self.objective
        few = few_steps(r.shift, number, handover, objective.few_step_sampler) if number else None
        trained = objective.trained_expert
        return FlowSchedule(
            r.shift, boundary, r.seed, self.batch.total, r.expert_blocks, handover, few, trained
        )

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
        own, student, found = self.others_ds, self.student_ds, {}
        for name, role in self.objective.others.items():
            ds = own | {key: student[key] for key in BATCH_KEYS} if own else derived(student, role)
            found[name] = OtherNetwork(role, role.origin(self.student_transformer, self.folder.config), ds)
        return found

    @property
    def student_experts(self) -> list[Expert]:
        """The student's networks."""
        return list(Expert) if self.student.experts == "two" else [Expert.HIGH_NOISE]

    @property
    def trained_experts(self) -> list[Expert]:
        """The student's networks that are trained; all but with an objective of one expert."""
        return [e for e in self.student_experts if self.objective.trained_expert in (None, e)]

    @property
    def teachers_folder(self) -> WanFolder:
        """The teacher, with the expert alone that an objective of one expert needs."""
        if not (one := self.objective.trained_expert):
            return self.folder
        return dataclasses.replace(self.folder, configs={one: self.folder.configs[one]})

    @property
    def is_cut(self) -> bool:
        """True if the student is narrower than the teacher that it is made of."""
        own, whole = self.student_transformer, self.folder.config
        return self.student.init == "teacher" and any(own[key] != whole[key] for key in WIDTH_KEYS)

    @property
    def needs_measuring(self) -> bool:
        """True if building the student needs the teacher; a resumed run's student is in its checkpoint."""
        return not self.resume_from and (self.student.keep_layers == IMPORTANCE or self.is_cut)

    @property
    def needs_latents(self) -> bool:
        """True if clean latents are used: for the losses, or to measure the teacher."""
        return self.objective.needs_latents or self.needs_measuring

    @property
    def updates(self) -> int:
        """Updates of all roles in the whole run; each has a global batch of its own."""
        return self.run.max_steps * len(self.objective.updates)

    @property
    def matched_objective(self) -> Objective:
        """The objective with the teacher's blocks for the student's own."""
        return self.objective.for_student(lineage(self.student, self.student_transformer, self.folder))

    def with_layers(self, kept: list[int]) -> "Job":
        """Replace the student's `importance` by the layers that were chosen by it."""
        return dataclasses.replace(self, student=dataclasses.replace(self.student, keep_layers=kept))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Settings and data that a checkpoint must share with a run that resumes from it."""
        r = self.run
        return {
            # a hub id's weights may not be here yet, but its commit identifies them
            "teacher": self.folder.revision
            or fingerprint(self.folder.path / e.value for e in self.folder.configs),
            "student": digest(self._start, self.student_transformer),
            "data": data_digest(self.items, r, self.rollouts, self.size, self.buckets),
            "objective": str(self.objective),
            "guidance": [r.guidance_scale, r.guidance_scale_2, r.negative_prompt],
            "seed": r.seed,
            "shift": r.shift,
            "train_batch_size": self.batch.total,
            "expert_blocks": r.expert_blocks,
            "optimizer": _learning(self.student_ds["optimizer"]),
            "scheduler": self.student_ds.get("scheduler"),
            "gradient_clipping": self.student_ds["gradient_clipping"],
            "precision": dtype_name(self.student_ds),
            **self._of_others,
            **quantized_facts(self.teacher_ds),
            **self.tuning,
        }

    @property
    def recorded(self) -> dict[str, Any]:
        """Identity, facts and settings of the run, and its teacher's files, as every checkpoint has them."""
        # without folders, so that it stays true when the run is moved
        run = {key: value for key, value in self.resolved.items() if not key.endswith("_dir")}
        if self.start:
            run["student_config"] = run["student_config"] | {"init": self.start.name}
        files = {"teacher": self._teacher_files}
        return {"identity": self.identity, "facts": self.provenance.as_json(), "run": run, "files": files}

    @cached_property
    def _teacher_files(self) -> dict[str, str]:
        """Digest of each file that the teacher's identity is made of; {} of a hub id, which has a commit."""
        folders = () if self.folder.revision else (self.folder.path / e.value for e in self.folder.configs)
        return {name: f"{size} {ends}" for name, size, ends in ends_of_files(folders)}

    @property
    def _of_others(self) -> dict[str, Any]:
        """Learning settings of the JSON of other networks than the student; {} if there is none."""
        if not (ds := self.others_ds):
            return {}
        keys = ("scheduler", "gradient_clipping")
        learning = _learning(ds["optimizer"]), dtype_name(ds), *(ds.get(key) for key in keys)
        return {name: list(learning) for name in self.objective.others}

    @property
    def _start(self) -> dict[str, Any]:
        """The student's settings; a run that it starts from counts by its weights, wherever it lies."""
        settings = dataclasses.asdict(self.student)
        return settings | {"init": self.start.identity} if self.start else settings

    @property
    def end(self) -> Start:
        """The start of a run that follows this one."""
        r, student = self.run, self.student
        return start_after(
            self.output,
            self.student_transformer,
            student.experts,
            self.identity,
            self.provenance,
            r.max_steps,
        )

    @property
    def background(self) -> RGB:
        return background_of(self.run.background)

    @property
    def tuning(self) -> dict[str, Any]:
        """Settings of trained parts and averages that are not the default."""
        keys = ("ema", "ema_start", "learning_rates", "frozen", "lora")
        return {key: value for key in keys if (value := getattr(self.run, key))}

    @property
    def provenance(self) -> Facts:
        """Origin of the student for its export, stored as `facts` in every checkpoint."""
        r, few = self.run, self.schedule.few
        return Facts(
            teacher_path=r.teacher_path,
            teacher_revision=self.folder.revision,
            transformer=self.student_transformer,
            init=self.start.name if self.start else self.student.init,
            keep_layers=self.student.keep_layers,
            shift=r.shift,
            experts=[e.value for e in self.student_experts],
            boundary=few.boundary if few else self.folder.boundary,
            height=r.height,
            width=r.width,
            num_frames=r.num_frames,
            steps=len(few.sigmas) if few else r.sample_steps,
            few_steps=few and list(few.sigmas),
            sampler=few and few.sampler,
            teacher_steps=r.sample_steps,
            guidance_scale=r.guidance_scale,
            guidance_scale_2=r.guidance_scale_2,
            negative_prompt=r.negative_prompt,
            objective=str(self.objective),
            max_steps=r.max_steps,
            before=self.start.history if self.start else None,
            **quantized_facts(self.teacher_ds),
            **self.tuning,
        )

    @property
    def resolved(self) -> dict[str, Any]:
        """The settings as they run, as one recipe that needs no other file."""
        student = {k: v for k, v in dataclasses.asdict(self.student).items() if v is not None}
        given = dataclasses.asdict(self.run) | {
            "deepspeed_config": self.student_ds,
            "teacher_deepspeed_config": self.teacher_ds,
            "student_config": student,
            KEY: self.others_ds,
        }
        return {k: v for k, v in given.items() if v is not None and k not in ("dry_run", "despite_plan")}

    def write_resolved(self) -> None:
        """Write the settings as they run to OUTPUT/resolved; each file can be passed back in."""
        folder, recipe = self.output / "resolved", self.resolved
        for key, name in JSON_FILES.items():
            if recipe.get(key):
                write_json(folder / f"{name}.json", recipe[key])
                recipe[key] = str(folder / f"{name}.json")
        write_json(folder / "run.json", recipe)


def _learning(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of an optimizer section but those that choose between equal implementations."""
    params = {k: v for k, v in optimizer.get("params", {}).items() if k not in ("torch_adam", "fused")}
    return {"type": optimizer["type"], "params": params}
