"""`wandistiller evaluate`: teacher and student side by side: velocity error, samples, speed, size; with intervals."""

from pathlib import Path
from typing import Any

import torch

from wandistiller import deepspeed_json, distributed
from wandistiller.card import FACTS
from wandistiller.check import collecting, usual_for
from wandistiller.clip import clip_problems
from wandistiller.config import WAN_NEGATIVE_PROMPT, read_json
from wandistiller.engines import config_problems
from wandistiller.judge import Evaluation, Judge
from wandistiller.kinds import kind_problems
from wandistiller.placement import device_map_problems, read_placement, without_block
from wandistiller.problems import ConfigError, folder_problems, problem, readable
from wandistiller.report import summary, write
from wandistiller.sample import Sampling, number_problems, read_prompts
from wandistiller.wan import WanFolder, open_wan, require_weights, top_modules

FACT_KINDS = {
    "a positive integer": "height width num_frames steps", "a number, 0 or more": "guidance_scale guidance_scale_2",
    "text": "teacher_path teacher_revision",
}  # fmt: skip
"""What is read of an exported student's facts."""


def evaluate(wanted: Evaluation) -> dict[str, Any]:
    """Compare a student with its teacher; writes evaluation.json, .md and .png. Collective.

    The prompts are split over the ranks; prompt i is drawn from seed + i by both.
    """
    how = "%s: %d prompts, %d steps, guidance %s"
    judge = Judge(wanted)
    distributed.log0(how, "teacher", len(wanted.prompts), wanted.guided.steps, wanted.guided.guidance_scale)
    teacher = judge.teacher()
    distributed.log0(how, "student", len(wanted.prompts), wanted.plain.steps, wanted.plain.guidance_scale)
    student, errors = judge.student()
    result, rows = summary(wanted, distributed.gather_objects((teacher, student, errors)))
    if distributed.rank() == 0:
        for line in write(wanted, result, rows):
            distributed.log0("%s", line)
    return result


@readable()
def read_evaluation(flags: dict[str, Any], dtype: torch.dtype, world: int) -> Evaluation:
    """Check the command's flags and both folders; what is left out is as the student was made.

    Raises:
        ConfigError: with every problem found; no weights were read.
    """
    found = number_problems("evaluate", flags)
    parts: dict[str, Any] = {}
    with collecting(found):
        facts = _facts(flags)
        with collecting(found):
            parts["student"] = _folder(flags["student"], None)
        named = flags["teacher_path"] or facts["teacher_path"]
        # .get: checkpoints made before `teacher_revision` have no such fact
        with collecting(found):
            parts["teacher"] = _folder(named, facts.get("teacher_revision") if named == facts.get("teacher_path") else None)
            flags = _complete(flags, facts, parts["teacher"])
            parts["teacher_ds"] = _teacher_json(flags["teacher_deepspeed_config"], parts["teacher"], world)
    with collecting(found):
        prompts = read_prompts(flags["prompts"])
        number = max(1, min(flags["num_prompts"], len(prompts)))
        parts["prompts"] = [prompts[i * len(prompts) // number] for i in range(number)]  # spread over the list
    if {"teacher", "student"} <= parts.keys():
        found += _pair_problems(flags, parts["teacher"], parts["student"])
    beside = Path(flags["student"]).parent if Path(flags["student"]).is_dir() else Path("evaluation")
    output = flags["output"] or beside
    found += folder_problems("output", output)
    found += clip_problems(flags["clip_path"]) if flags["clip_path"] else []
    if found:
        raise ConfigError(*found)
    size = {k: flags[k] for k in ("height", "width", "num_frames", "steps")}
    guidance = {k: flags[k] for k in ("guidance_scale", "guidance_scale_2", "negative_prompt")}
    return Evaluation(**parts, output=output, guided=Sampling(**size, **guidance), plain=Sampling(**size), dtype=dtype,
                      clip=flags["clip_path"], **{k: flags[k] for k in ("seed", "batch", "quick")})  # fmt: skip


def _facts(flags: dict[str, Any]) -> dict[str, Any]:
    """What an exported student says of its making; nothing, for another pipeline whose teacher is named."""
    file = Path(flags["student"]) / FACTS
    if file.is_file():
        facts = read_json(file)
        found = kind_problems(file, {k: v for k, v in facts.items() if v is not None}, FACT_KINDS)
        if not (facts.get("teacher_path") or flags["teacher_path"]):
            found.append(f"{file}: `teacher_path` is missing. Say with --teacher_path what to compare it with.")
        if found:
            raise ConfigError(*found)
        return facts
    if not flags["teacher_path"]:
        raise ConfigError(f"{flags['student']}: no {FACTS} in it. Give a folder that `wandistiller export` or `train` wrote; "
                          "of any other Wan pipeline say with --teacher_path what to compare it with.")  # fmt: skip
    return {}


def _folder(name: str, revision: str | None) -> WanFolder:
    folder = open_wan(name, weights=True, revision=revision)
    require_weights(folder)
    return folder


def _complete(flags: dict[str, Any], facts: dict[str, Any], teacher: WanFolder) -> dict[str, Any]:
    """`flags`, with what the student was made with where nothing is said, or else what is usual for the teacher."""
    usual = usual_for(teacher)
    known = {"height": usual.height, "width": usual.width, "num_frames": 1, "steps": 40, "guidance_scale": usual.guidance[0],
             "guidance_scale_2": usual.guidance[1], "negative_prompt": WAN_NEGATIVE_PROMPT}  # fmt: skip
    known |= {k: facts[k] for k in known if k in facts}
    if flags["guidance_scale"] is not None:
        known["guidance_scale_2"] = flags["guidance_scale"]  # as diffusers does
    if teacher.boundary is None:
        known["guidance_scale_2"] = None  # diffusers refuses it for one expert
    return flags | {k: v for k, v in known.items() if flags[k] is None}


def _teacher_json(file: str | None, teacher: WanFolder, world: int) -> dict[str, Any] | None:
    """The checked DeepSpeed JSON of a teacher that is to be placed."""
    if not file:
        return None
    where, ds = deepspeed_json.load(file)
    ds = deepspeed_json.teacher_engine(where, ds, world)
    placement, found = read_placement(ds), config_problems(where, without_block(ds))
    if placement.placement == "auto":
        found.append(problem(where, "wandistiller.placement", "auto", "Only training chooses; name the file that it chose."))
    if distributed.local_rank() == placement.owner_rank:
        found += device_map_problems(where, ds, top_modules(teacher.config), distributed.number_of_gpus())
    if found:
        raise ConfigError(*found)
    return ds


def _pair_problems(flags: dict[str, Any], teacher: WanFolder, student: WanFolder) -> list[str]:
    """What keeps the two from being asked the same."""
    size = flags["height"], flags["width"], flags["num_frames"]
    found = list(dict.fromkeys(teacher.size_problems(*size) + student.size_problems(*size)))
    if flags["guidance_scale_2"] is not None and teacher.boundary is None:
        found.append(problem(teacher.name, "guidance_scale_2", flags["guidance_scale_2"], "It has one expert; leave it out."))
    if (theirs := teacher.latent_shape(*size)) != (its := student.latent_shape(*size)):
        found.append(f"{student.name}: its latents are {its}, those of {teacher.name} {theirs}. Give a student with its VAE.")
    return found
