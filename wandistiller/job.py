"""A run, read and checked as a whole before any weight is loaded: every problem at once, on every rank."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wandistiller import checkpoint, deepspeed_json, distributed
from wandistiller.batch import Expert
from wandistiller.conditioning import Item, read_items
from wandistiller.config import ConfigError, RunConfig, as_dict, problem, read_json, unknown_keys
from wandistiller.deepspeed_json import BatchSize
from wandistiller.engines import config_problems
from wandistiller.files import digest, fingerprint, write_json
from wandistiller.latents import Rollouts, Size
from wandistiller.noise import FlowSchedule
from wandistiller.objectives import OBJECTIVES, VelocityMatching, objective_keys
from wandistiller.placement import device_map_problems, read_placement, without_block
from wandistiller.student import StudentConfig, read_student_config
from wandistiller.student_json import Asked, fill_auto, fill_steps, write_in
from wandistiller.wan import WanFolder, count_parameters, open_wan, top_modules


@dataclass(frozen=True, slots=True)
class Usual:
    """How a teacher is usually sampled; what a run takes where it says nothing."""

    height: int
    width: int
    guidance: tuple[float, float]
    """High-noise and low-noise expert. Source: Wan's own configs, wan/configs/*.py; ours for the embedded teacher."""


WAN21 = Usual(480, 832, (5.0, 5.0))  # one expert
WAN22 = Usual(480, 832, (4.0, 3.0))
EMBEDDED = Usual(64, 64, (2.0, 2.0))


@dataclass(frozen=True)
class Job:
    """Everything that the commands need to know of a run."""

    run: RunConfig
    """With the teacher's own values in place of None."""
    folder: WanFolder
    items: list[Item]
    student: StudentConfig
    student_transformer: dict[str, Any]
    student_ds: dict[str, Any]
    teacher_ds: dict[str, Any]
    batch: BatchSize
    objective: VelocityMatching
    resume_from: Path | None

    @property
    def output(self) -> Path:
        return Path(self.run.output_dir)

    @property
    def cache(self) -> Path:
        return Path(self.run.cache_dir or self.output / "cache")

    @property
    def size(self) -> Size:
        return Size(self.run.height, self.run.width, self.run.num_frames)

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

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must share with a run that goes on from it."""
        r = self.run
        return {
            # a hub id's weights may not be here yet, but its commit says which they are
            "teacher": self.folder.revision or fingerprint(self.folder.path / e.value for e in self.folder.configs),
            "student": digest(dataclasses.asdict(self.student), self.student_transformer),
            "data": digest([(i.prompt, str(i.media)) for i in self.items], str(self.rollouts), str(self.size)),
            "objective": str(self.objective),
            "guidance": [r.guidance_scale, r.guidance_scale_2, r.negative_prompt],
            "seed": r.seed, "shift": r.shift, "train_batch_size": self.batch.total, "expert_blocks": r.expert_blocks,
        }  # fmt: skip

    @property
    def facts(self) -> dict[str, Any]:
        """What an exported student must know of its making; kept in every checkpoint."""
        r = self.run
        return {
            "teacher_path": r.teacher_path, "teacher_revision": self.folder.revision,
            "transformer": self.student_transformer, "shift": r.shift,
            "experts": [e.value for e in self.student_experts], "boundary": self.folder.boundary,
            "height": r.height, "width": r.width, "num_frames": r.num_frames, "steps": r.sample_steps,
            "guidance_scale": r.guidance_scale, "guidance_scale_2": r.guidance_scale_2,
            "negative_prompt": r.negative_prompt, "objective": str(self.objective), "max_steps": r.max_steps,
        }  # fmt: skip

    def write_resolved(self) -> None:
        """Write what really runs to OUTPUT/resolved; each file can be passed back in."""
        folder = self.output / "resolved"
        files = {"student_deepspeed": self.student_ds, "teacher_deepspeed": self.teacher_ds,
                 "student": {k: v for k, v in dataclasses.asdict(self.student).items() if v is not None}}  # fmt: skip
        for name, content in files.items():
            write_json(folder / f"{name}.json", content)
        paths = {"deepspeed_config": "student_deepspeed", "teacher_deepspeed_config": "teacher_deepspeed",
                 "student_config": "student"}  # fmt: skip
        recipe = as_dict(self.run) | {key: str(folder / f"{name}.json") for key, name in paths.items()}
        write_json(folder / "run.json", {k: v for k, v in recipe.items() if v is not None and k != "dry_run"})

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
            f"data      {len(self.items)} prompts, {sum(i.media is not None for i in self.items)} with media, "
            f"{r.height}x{r.width}, {r.num_frames} frame(s)",
            f"batch     {b.total} a step = {b.micro} x {b.accumulation} micro-steps x {b.ranks} ranks",
            f"run       {r.max_steps} steps, shift {r.shift}, seed {r.seed}, high-noise share "
            f"{self.schedule.high_noise_share():.3f}, into {self.output}",
        ]


def placement_name(ds: dict[str, Any]) -> str:
    """Where a teacher JSON puts the weights, in a few words."""
    placement = read_placement(ds)
    if placement.on_one_rank:
        return f"{placement.placement} rank {placement.owner_rank}"
    if placement.placement != "engine":
        return placement.placement
    offload = deepspeed_json.offload_device(ds)
    return "replicated" if deepspeed_json.stage(ds) == 0 else "sharded" if offload == "none" else f"sharded on {offload}"


@contextmanager
def _collecting(found: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        found += error.problems


def read_job(run: RunConfig, world: int) -> Job:
    """Check a run against its teacher, data, student and engines. Reads JSON and text files, no weights.

    Raises:
        ConfigError: with every problem found.
    """
    found: list[str] = []
    parts: dict[str, Any] = {}
    with _collecting(found):
        parts["folder"] = open_wan(run.teacher_path, revision=run.teacher_revision)
    with _collecting(found):
        parts["items"] = read_items(run.data_path)
    if "folder" in parts:
        with _collecting(found):
            where, values = ("recipe", run.student_config) if isinstance(run.student_config, dict) else (
                run.student_config, read_json(run.student_config))  # fmt: skip
            parts["student"], parts["student_transformer"] = read_student_config(where, values, parts["folder"])
    with _collecting(found):
        where, ds = _student_json(run, parts, world)
        parts["student_ds"], parts["batch"] = deepspeed_json.student_engine(where, ds, world)
        found += config_problems(where, parts["student_ds"])
    with _collecting(found):
        where, ds = deepspeed_json.load(run.teacher_deepspeed_config)
        parts["teacher_ds"] = deepspeed_json.teacher_engine(where, deepspeed_json.with_dtype(ds, run.teacher_dtype), world)
        found += config_problems(where, without_block(parts["teacher_ds"]))
    with _collecting(found):
        parts["objective"] = _read_objective(run.objective)
    if "folder" in parts:
        folder = parts["folder"]
        run = _complete(run, folder, parts.get("items", []), parts.get("batch"))
        found += _device_map_problems(run, parts)
        found += folder.size_problems(run.height, run.width, run.num_frames)
    found += _block_problems(run, parts) + _folder_problems(run)
    if found:
        raise ConfigError(*found)
    job = Job(run=run, resume_from=checkpoint.find(Path(run.output_dir), run.resume), **parts)
    if job.resume_from:
        checkpoint.check_identity(job.resume_from, job.identity)
    return job


def _student_json(run: RunConfig, parts: dict[str, Any], world: int) -> tuple[str, dict[str, Any]]:
    """The student's DeepSpeed JSON with short flags written in and "auto" filled: (name for messages, content)."""
    where, ds = deepspeed_json.load(run.deepspeed_config)
    asked = Asked(**{f.name: getattr(run, f.name) for f in dataclasses.fields(Asked)})
    config = parts.get("student_transformer") or {"num_attention_heads": 1, "attention_head_dim": 1}  # its fault is said
    ds = fill_auto(write_in(ds, asked), config["num_attention_heads"] * config["attention_head_dim"])
    try:
        total = deepspeed_json.batch_size(where, ds, world).total
    except ConfigError:
        return where, ds  # said when the engine is checked
    return where, fill_steps(ds, _max_steps(run, parts.get("items", []), total))


def _max_steps(run: RunConfig, items: list[Item], global_batch: int) -> int:
    if run.num_epochs:
        return -(-run.num_epochs * len(items) * run.rollouts_per_prompt // global_batch)
    return run.max_steps or 1000


def _read_objective(given: str | dict[str, Any]) -> VelocityMatching:
    settings = {"name": given} if isinstance(given, str) else dict(given)
    name = settings.pop("name", "velocity")
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise ConfigError(problem("recipe", "objective", name, f"Write one of: {', '.join(OBJECTIVES)}."))
    if found := unknown_keys("recipe", settings, objective_keys(name), "objective."):
        raise ConfigError(*found)
    objective = OBJECTIVES[name](**settings)
    if found := objective.problems():
        raise ConfigError(*found)
    return objective


def _complete(run: RunConfig, folder: WanFolder, items: list[Item], batch: BatchSize | None) -> RunConfig:
    """Put the teacher's own values where the run says nothing."""
    usual = EMBEDDED if folder.is_tiny else WAN21 if folder.boundary is None else WAN22
    scale = usual.guidance[0] if run.guidance_scale is None else run.guidance_scale
    default_2 = usual.guidance[1] if run.guidance_scale is None else scale  # as diffusers does
    return dataclasses.replace(
        run,
        guidance_scale=scale,
        guidance_scale_2=run.guidance_scale_2 if run.guidance_scale_2 is not None else default_2,
        shift=run.shift or folder.shift,
        height=run.height or usual.height,
        width=run.width or usual.width,
        max_steps=_max_steps(run, items, batch.total if batch else 1),
        num_epochs=None,
        teacher_dtype=None, batch_size=None, lr=None, mixed_precision=None, gradient_checkpointing=False,  # in the JSONs now
        sample_prompts=run.sample_prompts or [i.prompt for i in items[:: max(1, len(items) // 8)][:8]],
    )


def _device_map_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    ds = parts.get("teacher_ds", {})
    if not ds or distributed.rank() != read_placement(ds).owner_rank:
        return []
    where, _ = deepspeed_json.load(run.teacher_deepspeed_config)
    return device_map_problems(where, ds, top_modules(parts["folder"].config), distributed.number_of_gpus())


def _folder_problems(run: RunConfig) -> list[str]:
    """Folders to write to that cannot be made because a file is in the way."""
    found = []
    for key in ("output_dir", "cache_dir"):
        path = Path(getattr(run, key) or ".").absolute()
        if blocking := next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None):
            found.append(f"`{key}` is {getattr(run, key)}, but {blocking} is a file. Name a folder.")
    return found


def _block_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """Micro-steps must fit into expert blocks, or ranks would need different experts at once."""
    batch, found = parts.get("batch"), []
    if batch and batch.total % (run.expert_blocks * batch.micro * batch.ranks):
        found.append(f"`expert_blocks` is {run.expert_blocks}, but a step has {batch.accumulation} micro-step(s). "
                     "Write a divisor of that, so that a micro-step needs one expert.")  # fmt: skip
    if "student" in parts and parts["student"].experts == "two" and run.expert_blocks != 1:
        found.append(f"`expert_blocks` is {run.expert_blocks}. A student with two experts trains one in a step; write 1.")
    if run.num_frames > 1 and (still := [i for i in parts.get("items", []) if i.media and i.media.suffix.lower() in
                                         (".png", ".jpg", ".jpeg", ".webp", ".bmp")]):  # fmt: skip
        found.append(f"`num_frames` is {run.num_frames}, but {still[0].media} is an image. Write 1, or give videos.")
    return found
