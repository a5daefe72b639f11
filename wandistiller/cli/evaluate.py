"""`wandistiller evaluate`: compare a student with its teacher in scores, velocity error, speed and size."""

from pathlib import Path
from typing import Any

import torch

from wandistiller.config.cross_checks import SHARED, division_problems
from wandistiller.config.validate import collecting
from wandistiller.distributed import collectives, device, sequence
from wandistiller.engine.ds_config import load
from wandistiller.engine.preflight import config_problems
from wandistiller.evaluation.clip import clip_problems
from wandistiller.evaluation.draw_samples import (
    STEPS,
    Sampling,
    number_problems,
    read_prompts,
    resolve_dtype,
    size_problems,
)
from wandistiller.evaluation.evaluator import Evaluation, Evaluator
from wandistiller.evaluation.report import summary, write
from wandistiller.export.source import FACTS, trained_steps
from wandistiller.teacher.placements.base import Placement
from wandistiller.teacher.quantized import missing_problems
from wandistiller.teacher.teacher_json import AUTO, read_placement
from wandistiller.utils.errors import ConfigError, folder_problems, inside_problems, problem, readable
from wandistiller.utils.files import read_json
from wandistiller.utils.validation import Count, NotNegative, Text, of_type, value_problems
from wandistiller.wan.defaults import WAN_NEGATIVE_PROMPT
from wandistiller.wan.pipeline import (
    TINY,
    WanFolder,
    open_wan,
    require_weights,
    run_problem,
    student_of,
    usual_for,
)
from wandistiller.wan.transformer import top_modules

FACT_TYPES = of_type(
    (Count, "height width num_frames steps teacher_steps"),
    (NotNegative, "guidance_scale guidance_scale_2 shift"),
    (Text, "teacher_path teacher_revision sampler"),
)
"""Keys that are read of an exported student's facts, and their types."""


def run(flags: dict[str, Any]) -> None:
    """Check everything on every rank, then compare."""
    with collectives.raise_on_all_ranks():
        evaluation = read_evaluation(flags, resolve_dtype(flags["dtype"]), collectives.world_size())
    collectives.init()
    sequence.share(flags[SHARED])
    evaluate(evaluation)
    collectives.destroy()


def evaluate(evaluation: Evaluation) -> dict[str, Any]:
    """Compare a student with its teacher; writes evaluation.json, .md and .png. Collective.

    The prompts are split over the ranks; prompt i is drawn from seed + i by both.
    """
    evaluator, number = Evaluator(evaluation), len(evaluation.prompts)

    def announce(who: str, sampling: Sampling) -> None:
        steps = ", ".join(map(str, dict.fromkeys([sampling.steps, *evaluation.numbers])))
        collectives.log0(f"{who}: {number} prompts, {steps} steps, guidance {sampling.guidance_scale}")

    announce("teacher", evaluation.teacher_sampling)
    teacher = evaluator.teacher()
    announce("student", evaluation.student_sampling)
    student, errors = evaluator.student()
    result, rows = summary(evaluation, collectives.gather_objects((teacher, student, errors)))
    if collectives.rank() == 0:
        for text in write(evaluation, result, rows):
            collectives.log0("%s", text)
    return result


@readable()
def read_evaluation(flags: dict[str, Any], dtype: torch.dtype, world: int) -> Evaluation:
    """Check the command's flags and both folders; defaults are the student's training settings.

    Raises:
        ConfigError: with every problem; no weights were read.
    """
    problems, flags = _steps(flags | {"student": student_of(flags["student"])})
    parts: dict[str, Any] = {}
    with collecting(problems):
        facts = _facts(flags)
        with collecting(problems):
            parts["student"] = _folder(flags["student"])
        name = flags["teacher_path"] or facts["teacher_path"]
        # .get: checkpoints made before `teacher_revision` have no such fact
        revision = facts.get("teacher_revision") if name == facts.get("teacher_path") else None
        with collecting(problems):
            parts["teacher"] = _folder(name, revision)
            flags = _complete(flags, facts, parts["teacher"])
            parts["placement"] = _placement(flags["teacher_deepspeed_config"], parts["teacher"], world)
    with collecting(problems):
        prompts = read_prompts(flags["prompts"])
        number = max(1, min(flags["num_prompts"], len(prompts)))
        parts["prompts"] = [prompts[i * len(prompts) // number] for i in range(number)]
    if {"teacher", "student"} <= parts.keys():
        problems += _pair_problems(flags, parts, world)
    student = Path(flags["student"])
    output = flags["output"] or (student.parent if student.is_dir() else Path("evaluation"))
    problems += folder_problems("output", output) or inside_problems(
        "output", output, {"student_path": student}
    )
    problems += clip_problems(flags["clip_path"]) if flags["clip_path"] else []
    if problems:
        raise ConfigError(*problems)
    size = {k: flags[k] for k in ("height", "width", "num_frames")}
    guidance = {k: flags[k] for k in ("guidance_scale", "guidance_scale_2", "negative_prompt")}
    return Evaluation(
        **parts,
        output=output,
        dtype=dtype,
        teacher_sampling=Sampling(**size, steps=flags["teacher_steps"], **guidance),
        student_sampling=Sampling(**size, steps=flags["steps"]),
        clip=flags["clip_path"],
        trained=trained_steps(Path(flags["student"])),
        **{k: flags[k] for k in ("seed", "batch", "quick", "numbers")},
    )


def _steps(flags: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Problems with the numbers in `flags`; `flags` with several numbers of steps apart, in `numbers`."""
    given = flags["steps"] or []
    problems = [p for n in given or [None] for p in number_problems("evaluate", flags | {"steps": n})]
    one, several = (given[0], ()) if len(given) == 1 else (None, tuple(dict.fromkeys(given)))
    return list(dict.fromkeys(problems)), flags | {"steps": one, "numbers": several}


def _facts(flags: dict[str, Any]) -> dict[str, Any]:
    """Training settings stored in an exported student; empty for another pipeline with --teacher_path."""
    file, teacher = Path(flags["student"]) / FACTS, flags["teacher_path"]
    if of_run := run_problem(file.parent, flags["student"]):
        raise ConfigError(of_run)
    if not file.is_file() and not teacher:
        raise ConfigError(
            f"{flags['student']}: no {FACTS} in it. Give a folder that `wandistiller export` or `train` "
            "wrote; of any other Wan pipeline say with --teacher_path what to compare it with."
        )
    facts = read_json(file) if file.is_file() else {}
    run = Path(flags["student"]).absolute().parent / "resolved" / "run.json"
    if "teacher_path" in facts and run.is_file():  # an export names only the last part of a folder
        facts |= {k: v for k, v in read_json(run).items() if k == "teacher_path"}
    problems = value_problems(file, {k: v for k, v in facts.items() if v is not None}, FACT_TYPES)
    if not (facts.get("teacher_path") or teacher):
        remedy = "Say with --teacher_path what to compare it with."
        problems.append(f"{file}: `teacher_path` is missing. {remedy}")
    elif isinstance(name := facts.get("teacher_path"), str) and not teacher:
        if "/" not in name and name not in TINY and not Path(name).exists():
            remedy = "Exports have only the folder's name; say with --teacher_path where it is."
            problems.append(problem(file, "teacher_path", name, remedy))
    if problems:
        raise ConfigError(*problems)
    return facts


def _folder(name: str, revision: str | None = None) -> WanFolder:
    folder = open_wan(name, weights=True, revision=revision)
    require_weights(folder)
    return folder


def _complete(flags: dict[str, Any], facts: dict[str, Any], teacher: WanFolder) -> dict[str, Any]:
    """Complete `flags` from the student's training settings, or else from the teacher's usual ones."""
    usual = usual_for(teacher)
    high, low = usual.guidance
    defaults = {"height": usual.height, "width": usual.width, "num_frames": 1, "steps": STEPS}
    defaults |= {"guidance_scale": high, "guidance_scale_2": low, "negative_prompt": WAN_NEGATIVE_PROMPT}
    defaults |= {k: facts[k] for k in defaults if k in facts}
    # a student of few steps is compared with its teacher in many
    defaults["teacher_steps"] = flags["steps"] or facts.get("teacher_steps") or defaults["steps"]
    if flags["guidance_scale"] is not None:
        defaults["guidance_scale_2"] = flags["guidance_scale"]  # as diffusers does
    if teacher.boundary is None:
        defaults["guidance_scale_2"] = None  # diffusers refuses it for one expert
    return flags | {k: v for k, v in defaults.items() if flags.get(k) is None}


def _placement(file: str | None, teacher: WanFolder, world: int) -> Placement | None:
    """Read the teacher's placement, if a JSON names one."""
    if not file:
        return None
    placement = read_placement(load(file), world)
    problems = config_problems(placement.engine) + missing_problems(placement.engine, placement.weights)
    if placement.name == AUTO:
        remedy = "Only training chooses; name the file that it chose."
        problems.append(placement.engine.problem("wandistiller.placement", AUTO, remedy))
    problems += placement.teacher_problems(top_modules(teacher.config), device.count())
    if problems:
        raise ConfigError(*problems)
    return placement


def _shared_problems(flags: dict[str, Any], parts: dict[str, Any], world: int) -> list[str]:
    """Problems of sequences that ranks share."""
    placed, size = parts.get("placement"), (flags["height"], flags["width"], flags["num_frames"])
    folders = {"The student": parts["student"]}
    if not placed or not placed.on_one_rank:
        folders["The teacher"] = parts["teacher"]
    heads = {name: folder.config["num_attention_heads"] for name, folder in folders.items()}
    patches = {} if size_problems(parts["student"], *size) else {size: parts["student"].tokens(*size)}
    return division_problems("evaluate", flags[SHARED] or 1, world, heads, patches)


def _pair_problems(flags: dict[str, Any], parts: dict[str, Any], world: int) -> list[str]:
    """Problems that keep the two from being run at the same settings on `world` ranks."""
    teacher, student = parts["teacher"], parts["student"]
    size = flags["height"], flags["width"], flags["num_frames"]
    problems = list(dict.fromkeys(size_problems(teacher, *size) + size_problems(student, *size)))
    if (second := flags["guidance_scale_2"]) is not None and teacher.boundary is None:
        problems.append(problem(teacher.name, "guidance_scale_2", second, "It has one expert; leave it out."))
    if (theirs := teacher.latent_shape(*size)) != (its := student.latent_shape(*size)):
        problems.append(
            f"{student.name}: its latents are {its}, those of {teacher.name} {theirs}. "
            "Give a student with its VAE."
        )
    return problems + _shared_problems(flags, parts, world)
