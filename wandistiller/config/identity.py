"""Identity, facts and settings of a run, by which a resumed run and the ranks of a run are compared."""

import dataclasses
import json
from typing import Any

from wandistiller.checkpoint import resume
from wandistiller.checkpoint.facts import Facts
from wandistiller.checkpoint.loading import ENGINE, network_name, read_state
from wandistiller.checkpoint.resume import NAMED
from wandistiller.config.adapter_files import start_bases, start_files
from wandistiller.config.job import Job
from wandistiller.config.run_config import JSON_FILES, ONLY_FLAGS
from wandistiller.config.start import Start, read_start, start_after
from wandistiller.data.colours import WHITE
from wandistiller.data.dataset import WITH_IMAGES, MediaType
from wandistiller.data.media import LETTERBOX
from wandistiller.distributed import collectives
from wandistiller.experts import Expert
from wandistiller.student.config import IMPORTANCE
from wandistiller.teacher.teacher_json import quantized_facts
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import digest, ends_of_files, fingerprint, read_json, write_json

STILLS = (MediaType.IMAGE, *WITH_IMAGES)


def recorded(job: Job) -> dict[str, Any]:
    """Return identity, facts and settings of a run, and its teacher's files, as every checkpoint has them."""
    # without folders, so that it stays true when the run is moved
    run = {key: value for key, value in settings_as_run(job).items() if not key.endswith("_dir")}
    if job.start:
        run["student_config"] = run["student_config"] | {"init": job.start.name}
    # none of a hub id, which has a commit
    folders = [] if job.folder.revision else [job.folder.path / e.value for e in job.folder.configs]
    files = {"teacher": {name: f"{size} {ends}" for name, size, ends in ends_of_files(folders)}}
    parts = {"identity": identity(job), "inputs": inputs(job), "facts": provenance(job).as_json()}
    return parts | {"run": run, "files": files}


def identity(job: Job) -> dict[str, Any]:
    """Return settings and data that a checkpoint must share with a run that resumes from it."""
    r, engine = job.run, job.student_engine
    student = dataclasses.asdict(job.student)
    if job.start:  # counts by its weights, wherever it lies
        student |= {"init": job.start.identity}
    params = {k: v for k, v in engine.section("optimizer.params").items() if k not in ("torch_adam", "fused")}
    return {
        "teacher": job.folder.identity,
        "student": digest(student, job.student_transformer.raw),
        "data": data_digest(job),
        "objective": str(job.objective),
        "guidance": [r.guidance_scale, r.guidance_scale_2, r.negative_prompt],
        "seed": r.seed,
        "shift": r.shift,
        "train_batch_size": job.batch.total,
        "expert_blocks": 1,  # once a setting; as in checkpoints of 0.1.0
        # but for keys that choose between equal implementations
        "optimizer": {"type": engine.section("optimizer")["type"], "params": params},
        "scheduler": engine.raw.get("scheduler"),
        "gradient_clipping": engine.raw["gradient_clipping"],
        "precision": engine.precision,
        **quantized_facts(job.teacher),
        **tuning(job),
    }


def inputs(job: Job) -> dict[str, Any]:
    """Return what a resumed run must share too, which checkpoints of before the first release do not have."""
    folder = job.folder
    known = {"teacher_dtype": job.teacher.engine.precision}
    # those of a hub id may not be here yet, but its commit is the teacher's
    parts = {} if folder.revision else folder.parts
    return known | {part: fingerprint(folders) for part, folders in parts.items()}


def data_digest(job: Job) -> str:
    """Hash the prompts, the names of media, and all settings that samples are made by.

    Later settings count where they are not the default and there are media that they change, so that the
    digests of earlier runs stay.
    """
    run, items, later = job.run, job.items, []
    if job.reader.background != WHITE and items.first(*STILLS):
        later.append(job.reader.background)
    if run.fit == LETTERBOX and items.first(*STILLS, MediaType.VIDEO):
        later += [run.fit, job.reader.background]
    if job.folder.config.takes_image:
        later.append("given frames")
    return digest(items.digest, *map(str, (job.rollouts, job.size, job.buckets)), run.video_fps, *later)


def tuning(job: Job) -> dict[str, Any]:
    """Return settings of trained parts and averages that are not the default."""
    keys = ("ema", "ema_start", "learning_rates", "frozen")
    settings = {key: value for key in keys if (value := getattr(job.run, key))}
    return settings | ({"lora": adapters(job)} if job.run.lora is not None else {})


def adapters(job: Job) -> dict[str, Any]:
    """Return the settings of adapters, with what they begin with by its content, wherever it lies."""
    lora, files = job.run.lora, start_files(job)
    starts: dict[str, Any] = {}
    for network, base in start_bases(job).items():
        if added := [file for file in files if file.is_for(base)]:
            is_plain = len(added) == 1 and added[0].strength == 1
            starts[network.value] = added[0].digest if is_plain else digest([file.identity for file in added])
    if isinstance(lora.get("start"), str) and starts:  # as in earlier versions one file counts for both
        starts = dict.fromkeys((e.value for e in Expert), next(iter(starts.values()))) | starts
    return {k: v for k, v in lora.items() if k != "start"} | ({"start": starts} if starts else {})


def provenance(job: Job) -> Facts:
    """Return the origin of the student for its export, stored as `facts` in every checkpoint."""
    r, few = job.run, job.schedule.few
    media = ("video_fps", "fit", "background") if job.folder.config.takes_image else ()
    return Facts(
        teacher_path=r.teacher_path,
        teacher_revision=job.folder.revision,
        transformer=job.student_transformer.raw,
        init=job.start.name if job.start else job.student.init,
        keep_layers=job.student.keep_layers,
        shift=r.shift,
        experts=[e.value for e in job.networks.student],
        boundary=few.boundary if few else job.folder.boundary,
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
        objective=str(job.objective),
        max_steps=r.max_steps,
        before=job.start.history if job.start else None,
        bases=[base.value for base in job.networks.bases.values()] or None,
        trained_expert=only.key if (only := job.objective.trained_expert) else None,
        stands_for=None if job.student.keep_layers == IMPORTANCE else job.stands_for,
        teacher_lora=job.folder.added_settings or None,
        teacher_lora_digests=[added.digest for added in job.folder.added] or None,
        teacher_identity=job.folder.weights_identity,
        teacher_hub_id=job.folder.hub_id,
        image_to_video=job.folder.config.takes_image or None,
        **{key: getattr(r, key) for key in media},
        **quantized_facts(job.teacher),
        **tuning(job),
    )


def settings_as_run(job: Job) -> dict[str, Any]:
    """Return the settings as they run, as one recipe that needs no other file."""
    student = {k: v for k, v in dataclasses.asdict(job.student).items() if v is not None}
    settings = dataclasses.asdict(job.run) | {
        "deepspeed_config": job.student_engine.raw,
        "teacher_deepspeed_config": job.teacher.engine.raw,
        "student_config": student,
    }
    return {k: v for k, v in settings.items() if v is not None and k not in ONLY_FLAGS}


def write_settings(job: Job) -> None:
    """Write the settings as they run to OUTPUT/resolved; each file can be passed back in."""
    folder, recipe = job.output / "resolved", settings_as_run(job)
    for key, name in JSON_FILES.items():
        write_json(folder / f"{name}.json", recipe[key])
        recipe[key] = str(folder / f"{name}.json")
    write_json(folder / "run.json", recipe)


def resumed(job: Job) -> Job:
    """Return the job with its checkpoint's measured layers; raises ConfigError if that is of another run."""
    job = _measured(job, read_state(job.resume_from)["facts"].get("keep_layers"))
    resume.changed_keys(job.resume_from, recorded(job), job.run.allow_changed or [])
    if problems := _network_problems(job):
        raise ConfigError(*problems)
    return job


def _network_problems(job: Job) -> list[str]:
    """List trained networks that are not in the checkpoint, or of another shape there."""
    networks = {network_name(row.role, row.expert): row.config for row in job.networks.rows if row.learns}
    problems = []
    for name, config in networks.items():
        file = job.resume_from / name / ENGINE
        saved = json.loads(file.read_text())["shapes"] if file.is_file() else {}
        # adapters and heads are in one alone
        if not saved or any(config.shapes.get(name, shape) != shape for name, shape in saved.items()):
            problems.append(
                f"{job.resume_from}: holds {'another' if saved else 'no'} network `{name}`, which "
                f"{job.objective} trains. Give another --output_dir, whose student begins with this one: "
                f'"student_config": {{"init": "{job.output}"}}.'
            )
    return problems


def end_of(job: Job) -> Start:
    """Return the start of a run that follows `job`: what a finished one left, or what another will."""
    is_done = job.resume_from and read_state(job.resume_from)["step"] >= job.run.max_steps
    if is_done and (start := read_start(str(job.output))):
        return start
    if (file := job.output / "lineage.json").is_file():  # of checkpoints that are gone
        job = _measured(job, next(iter(read_json(file).values())).get("kept_layers"))
    return start_after(job.output, identity(job), provenance(job), job.run.max_steps)


def _measured(job: Job, layers: Any) -> Job:
    """Return the job with these layers in place of `importance`, if they are known."""
    is_known = job.student.keep_layers == IMPORTANCE and isinstance(layers, list)
    return job.with_layers(layers) if is_known else job


def require_same(stages: list[Job], *, weights: bool = True) -> None:
    """Compare what the ranks have read, of all stages, and the checkpoints that they go on from. Collective.

    Args:
        weights: compare the teachers' too, which are checked then.
    Raises:
        ConfigError: on all ranks; it names what differs, and the ranks that have other settings than rank 0.
    """
    if collectives.world_size() == 1:
        return
    settings = {
        f"{job.stage}.{key}".lstrip("."): digest(value)
        for job in stages
        for key, value in _read(job).items()
        if weights or key != "teacher"
    }
    first, *others = collectives.gather_objects(settings)
    differ = [[f"`{k}`" for k in first | theirs if first.get(k) != theirs.get(k)] for theirs in others]
    if ranks := [rank for rank, keys in enumerate(differ, start=1) if keys]:
        keys = [*dict.fromkeys(key for of_rank in differ for key in of_rank)]
        raise ConfigError(
            f"The ranks read different settings or data: {_some(keys)}, on rank {_some(ranks)} other than on "
            "rank 0. A file changed while the run started, or the nodes do not see the same files, or were "
            "given other flags. Give all the same, and start again."
        )


def _read(job: Job) -> dict[str, Any]:
    settings = dataclasses.asdict(job.run) | settings_as_run(job) | identity(job)
    settings |= {"resume": job.resume_from and job.resume_from.name, "is_spent": job.is_spent}
    # what is in a folder is compared, not where it lies, which may differ between nodes
    return {k: v for k, v in settings.items() if not k.endswith(("_dir", "_path")) and k != "log_level"}


def _some(items: list[Any]) -> str:
    return ", ".join(map(str, items[:NAMED])) + ", ..." * (len(items) > NAMED)
