"""A run in a few lines."""

from typing import Any

import torch

from wandistiller.config.adapter_files import start_lines
from wandistiller.config.identity import tuning
from wandistiller.config.job import Job
from wandistiller.data.dataset import MediaType
from wandistiller.distributed.device import emulates_bf16
from wandistiller.objectives.script import TEACHER
from wandistiller.teacher.teacher_json import quantized_facts


def precision_lines(job: Job) -> list[str]:
    """Describe what the CPU here has to do with the precision, if it emulates bf16."""
    if emulates_bf16() and torch.bfloat16 in (job.student_engine.dtype, job.teacher.engine.dtype):
        return [
            "precision bf16 is emulated by this CPU, 6 to 56 times slower than float32: leave `bf16` out of "
            "the JSONs, or give --mixed_precision no --teacher_dtype float32 with the default ones"
        ]
    return ["precision float32, as this CPU has no instructions for bf16"] * emulates_bf16()


def summary(job: Job) -> list[str]:
    """Describe the run in a few lines."""
    f, r, layers = job.folder, job.run, job.student_transformer.num_layers
    teacher = sum(c.numel for c in f.configs.values())
    student = job.student_transformer.numel * len(job.networks.student)
    guidance = f"{r.guidance_scale}"
    if len(f.configs) > 1:
        guidance += f" at high noise and {r.guidance_scale_2} at low noise"
    b, media = job.batch, (job.items.kinds != MediaType.PROMPT).sum()
    blocks = (f"with {weights} blocks" for weights in quantized_facts(job.teacher).values())
    precision = " ".join([job.teacher.engine.precision, *blocks])
    counts = {"duplicates": job.items.duplicates, "thumbnails of videos": job.items.thumbnails}
    left_out = "".join(f", {n} {what} left out" for what, n in counts.items() if n)
    tuned = tuning(job) | ({"lora": job.run.lora} if job.run.lora else {})  # with its files by their names
    sharing = f"groups of {n} ranks" if (n := r.context_parallel) > 1 else "rank(s)"
    return [
        *([f"stage     {job.stage}"] if job.stage else []),
        f"teacher   {f.name}: {teacher / 1e6:.1f}M parameters, {len(f.configs)} expert(s) of "
        f"{f.config.num_layers} layers, {job.teacher.describe()}, "
        f"{precision}, guidance {guidance}",
        *f.added_lines,
        f"student   {student / 1e6:.1f}M parameters, {len(job.networks.student)} expert(s) of "
        f"{layers} layers, from {job.student.init}, ZeRO stage {job.student_engine.stage}, "
        f"{job.student_engine.precision}",
        f"data      {len(job.items)} rows, {media} with an image or video, "
        f"{r.height}x{r.width}, {r.num_frames} frame(s){left_out}",
        *(f"{key:<9} {in_words(value)}" for key, value in tuned.items()),
        *start_lines(job),
        *_networks(job),
        f"objective {job.objective}",
        f"batch     {b.total} samples a step: {b.micro} at once, {b.accumulation} times, {b.ranks} {sharing}",
        *(f"setting   {line}" for line in job.student_engine.overridden + job.teacher.engine.overridden),
        *_after_schedule(job),
        f"run       {r.max_steps} steps{_high_noise(job)}, shift {r.shift:.4g}, seed {r.seed}, "
        f"into {job.output}",
    ]


def in_words(value: Any) -> str:
    """Write a setting without brackets and quotes: `rank 32, targets to_q to_k`."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {in_words(inner)}" for key, inner in value.items())
    return " ".join(map(in_words, value)) if isinstance(value, list) else str(value)


def _after_schedule(job: Job) -> list[str]:
    """Warn of steps after the end of a schedule, in which WarmupDecayLR's rate is 0."""
    steps = job.run.max_steps
    length = job.student_engine.section("scheduler.params").get("total_num_steps", steps)
    text = f"warning   the schedule ends at step {length} (`total_num_steps`) of {steps}; the later "
    text += 'steps have its last rate, which may be 0. Write a larger number, or "auto"'
    return [text] * (length < steps)


def _networks(job: Job) -> list[str]:
    """Show the run's networks: whose weights each has, what of it learns, and where it is."""
    networks, rows = job.networks, []
    for row in networks.rows:
        name = row.role if len(networks.by_role[row.role]) == 1 else f"{row.role}, {row.expert.key}"
        learns = f"{row.parameters.trained_numel / 1e6:.1f}M weights learn" if row.learns else "frozen"
        learns += f", {row.setting.updates} updates a step" if row.setting else ""
        engine = f"ZeRO stage {row.engine.stage}" if row.learns else ""
        place = job.teacher.describe() if row.role == TEACHER else engine
        weights = "its files" if row.role == TEACHER else row.weights
        rows.append((name, weights, learns, f"{place} {row.engine.precision}".strip()))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    why = networks.copies_because
    if job.run.lora and not networks.bases:
        why = "the student and the teacher are different networks"
    lines += [f"copies of the weights for each role, as {why}"] if why else []
    return [f"{'networks' * (number == 0):<9} {line}" for number, line in enumerate(lines)]


def _high_noise(job: Job) -> str:
    """Say how many of the steps are for the teacher's expert of high noise, if it has two."""
    if job.schedule.boundary is None:
        return ""
    if trained := job.schedule.trained:
        return f", all with the teacher's {trained.in_words}"
    percent = f"{100 * job.schedule.high_noise_share():.3g} %"
    return f", {percent} of them with the teacher's high-noise expert, the others with the low-noise one"
