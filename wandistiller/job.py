"""A checked run, and what the commands derive from it."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wandistiller import deepspeed_json
from wandistiller.batch import Expert
from wandistiller.config import RunConfig, as_dict
from wandistiller.deepspeed_json import BatchSize
from wandistiller.files import digest, fingerprint, write_json
from wandistiller.items import Items, Kind
from wandistiller.latents import Rollouts
from wandistiller.media import Size, make_buckets
from wandistiller.noise import FlowSchedule
from wandistiller.objectives import Objective
from wandistiller.placement import read_placement
from wandistiller.student_config import StudentConfig, lineage
from wandistiller.wan import WanFolder, count_parameters


@dataclass(frozen=True)
class Job:
    """Everything that the commands need to know of a run."""

    run: RunConfig
    """With the teacher's own values in place of None."""
    folder: WanFolder
    items: Items
    student: StudentConfig
    student_transformer: dict[str, Any]
    student_ds: dict[str, Any]
    teacher_ds: dict[str, Any]
    batch: BatchSize
    objective: Objective
    resume_from: Path | None

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
        """Of the student after so many steps."""
        return self.samples / f"step_{step:08d}.png"

    @property
    def size(self) -> Size:
        return Size(self.run.height, self.run.width, self.run.num_frames)

    @property
    def buckets(self) -> list[Size]:
        """What media are cut to, each to the nearest in shape; empty: all to the run's size."""
        r, patch = self.run, self.folder.config["patch_size"]
        multiple = (self.folder.spatial * patch[1], self.folder.spatial * patch[2])
        sizes = make_buckets(r.height, r.width, multiple) if r.buckets is True else r.buckets or []
        return [Size(height, width, r.num_frames) for height, width in sizes]

    @property
    def rollouts(self) -> Rollouts:
        r = self.run
        return Rollouts(r.rollout_steps, r.rollouts_per_prompt, r.rollout_path, r.seed, r.shift)

    @property
    def guidance(self) -> dict[Expert, float]:
        return {Expert.HIGH_NOISE: self.run.guidance_scale, Expert.LOW_NOISE: self.run.guidance_scale_2}

    @property
    def schedule(self) -> FlowSchedule:
        return FlowSchedule(self.run.shift, self.folder.boundary, self.run.seed, self.batch.total, self.run.expert_blocks)

    @property
    def student_experts(self) -> list[Expert]:
        return list(Expert) if self.student.experts == "two" else [Expert.HIGH_NOISE]

    @property
    def objectives(self) -> dict[Expert, Objective]:
        """The objective of the network that learns from each expert, with the teacher's blocks that its own stand for."""
        blocks = lineage(self.student, self.student_transformer, self.folder)
        return {e: self.objective.for_student(blocks.get(e, blocks[Expert.HIGH_NOISE])) for e in Expert}

    def with_layers(self, kept: list[int]) -> "Job":
        """The run whose student keeps these layers, where it had said `importance`."""
        return dataclasses.replace(self, student=dataclasses.replace(self.student, keep_layers=kept))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must share with a run that goes on from it."""
        r = self.run
        return {
            # a hub id's weights may not be here yet, but its commit says which they are
            "teacher": self.folder.revision or fingerprint(self.folder.path / e.value for e in self.folder.configs),
            "student": digest(dataclasses.asdict(self.student), self.student_transformer),
            "data": digest(self.items.digest, str(self.rollouts), str(self.size), str(self.buckets), r.video_fps),
            "objective": str(self.objective),
            "guidance": [r.guidance_scale, r.guidance_scale_2, r.negative_prompt],
            "seed": r.seed, "shift": r.shift, "train_batch_size": self.batch.total, "expert_blocks": r.expert_blocks,
            "optimizer": _learning(self.student_ds["optimizer"]), "scheduler": self.student_ds.get("scheduler"),
            "gradient_clipping": self.student_ds["gradient_clipping"], "precision": deepspeed_json.dtype_name(self.student_ds),
            **self._tuning,
        }  # fmt: skip

    @property
    def _tuning(self) -> dict[str, Any]:
        """What is trained and averaged, where that was asked for."""
        keys = ("ema", "ema_start", "learning_rates", "frozen", "lora")
        return {key: value for key in keys if (value := getattr(self.run, key))}

    @property
    def facts(self) -> dict[str, Any]:
        """What an exported student must know of its making; kept in every checkpoint."""
        r = self.run
        return {
            "teacher_path": r.teacher_path, "teacher_revision": self.folder.revision,
            "transformer": self.student_transformer, "init": self.student.init, "keep_layers": self.student.keep_layers,
            "shift": r.shift,
            "experts": [e.value for e in self.student_experts], "boundary": self.folder.boundary,
            "height": r.height, "width": r.width, "num_frames": r.num_frames, "steps": r.sample_steps,
            "guidance_scale": r.guidance_scale, "guidance_scale_2": r.guidance_scale_2,
            "negative_prompt": r.negative_prompt, "objective": str(self.objective), "max_steps": r.max_steps,
            **self._tuning,
        }  # fmt: skip

    @property
    def resolved(self) -> dict[str, Any]:
        """What really runs, as one recipe that needs no other file of settings."""
        student = {k: v for k, v in dataclasses.asdict(self.student).items() if v is not None}
        given = as_dict(self.run) | {"deepspeed_config": self.student_ds, "teacher_deepspeed_config": self.teacher_ds,
                                     "student_config": student}  # fmt: skip
        return {k: v for k, v in given.items() if v is not None and k != "dry_run"}

    def write_resolved(self) -> None:
        """Write what really runs to OUTPUT/resolved; each file can be passed back in."""
        folder, recipe = self.output / "resolved", self.resolved
        paths = {"deepspeed_config": "student_deepspeed", "teacher_deepspeed_config": "teacher_deepspeed",
                 "student_config": "student"}  # fmt: skip
        for key, name in paths.items():
            write_json(folder / f"{name}.json", recipe[key])
            recipe[key] = str(folder / f"{name}.json")
        write_json(folder / "run.json", recipe)

    @property
    def largest_network(self) -> int:
        """Parameters of it: one expert of the teacher, as a rule."""
        return max(count_parameters(config) for config in (self.folder.config, self.student_transformer))

    def summary(self) -> list[str]:
        """The run in a few lines, for people."""
        f, r, layers = self.folder, self.run, self.student_transformer["num_layers"]
        teacher = sum(count_parameters(c) for c in f.configs.values())
        student = count_parameters(self.student_transformer) * len(self.student_experts)
        b = self.batch
        return [
            f"teacher   {f.name}: {teacher / 1e6:.1f}M parameters, {len(f.configs)} expert(s) of "
            f"{f.config['num_layers']} layers, {placement_name(self.teacher_ds)}, "
            f"{deepspeed_json.dtype_name(self.teacher_ds)}, guidance {r.guidance_scale}/{r.guidance_scale_2}",
            f"student   {student / 1e6:.1f}M parameters, {len(self.student_experts)} expert(s) of {layers} layers, "
            f"from {self.student.init}, ZeRO stage {deepspeed_json.stage(self.student_ds)}, "
            f"{deepspeed_json.dtype_name(self.student_ds)}",
            f"data      {len(self.items)} prompts, {(self.items.kinds != Kind.PROMPT).sum()} with media, "
            f"{r.height}x{r.width}, {r.num_frames} frame(s)",
            *(f"{key:<14} {value}" for key, value in self._tuning.items()),
            f"batch     {b.total} a step = {b.micro} x {b.accumulation} micro-steps x {b.ranks} ranks",
            f"run       {r.max_steps} steps, shift {r.shift}, seed {r.seed}, high-noise share "
            f"{self.schedule.high_noise_share():.3f}, into {self.output}",
        ]


def _learning(optimizer: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer section says of learning; the other keys choose between implementations of the same."""
    params = {k: v for k, v in optimizer.get("params", {}).items() if k not in ("torch_adam", "fused")}
    return {"type": optimizer["type"], "params": params}


def placement_name(ds: dict[str, Any]) -> str:
    """Where a teacher JSON puts the weights, in a few words."""
    placement = read_placement(ds)
    if placement.on_one_rank:
        return f"{placement.placement} rank {placement.owner_rank} of a node"
    if placement.placement != "engine":
        return placement.placement
    offload = deepspeed_json.offload_device(ds)
    if deepspeed_json.stage(ds) == 0:
        return "replicated"
    return f"sharded{' in each node' * (placement.shards == 'node')}{'' if offload == 'none' else f' on {offload}'}"
