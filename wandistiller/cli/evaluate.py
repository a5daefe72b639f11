"""`wandistiller evaluate`: compare a student with its teacher in scores, velocity error, speed and size."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from wandistiller.checkpoint.facts import Facts
from wandistiller.cli.flags import EvaluateFlags
from wandistiller.distributed import collectives
from wandistiller.distributed.sequence_parallel import ALONE, Ranks, division_problems
from wandistiller.evaluation.candidates import image_problems, read_candidate, read_items
from wandistiller.evaluation.clip import ENCODERS, encoder_problems
from wandistiller.evaluation.evaluator import Evaluation, Evaluator
from wandistiller.evaluation.report import summary, write
from wandistiller.evaluation.sampling import STEPS, Sampling, flag_problems, size_problems
from wandistiller.monitoring.headline import Evaluated
from wandistiller.network.folder import Folder
from wandistiller.planner.sampling import Drawing, choose, read_placed
from wandistiller.utils.errors import ConfigError, collecting, folder_problems, inside_problems, readable
from wandistiller.wan.added_lora import each_file, read_added
from wandistiller.wan.defaults import WAN_NEGATIVE_PROMPT
from wandistiller.wan.pipeline import open_wan

INPUTS = ("takes_image", "joined_channels", "text_dim", "image_dim", "pos_embed_seq_len")
"""Of a config, what the networks are given beside the latents."""


def run(flags: EvaluateFlags) -> None:
    with collectives.raise_on_all_ranks():
        evaluation = read_evaluation(flags, collectives.world_size())
    collectives.init()
    evaluate(evaluation, Ranks.in_groups_of(flags.context_parallel))
    collectives.destroy()


def evaluate(evaluation: Evaluation, ranks: Ranks = ALONE) -> Evaluated:
    """Compare a student with its teacher; writes evaluation.json, .md and .png. Collective.

    The prompts are split over the ranks; prompt i is drawn from seed + i by both.
    """
    e = evaluation
    drawing = Drawing([e.teacher, e.student], e.teacher_sampling, e.batch, ranks.degree)
    placement, batch = choose(e.placement, drawing)
    evaluator = Evaluator(replace(e, placement=placement, batch=batch), ranks)
    evaluation = evaluator.settings
    for line in evaluation.facts.changed_teacher(evaluation.teacher):
        collectives.log0("%s", line)
    number = len(evaluation.items)

    def announce(who: str, sampling: Sampling) -> None:
        steps = ", ".join(map(str, dict.fromkeys([sampling.steps, *evaluation.numbers])))
        collectives.log0(f"{who}: {number} prompts, {steps} steps, guidance {sampling.guidance_scale}")

    announce("teacher", evaluation.teacher_sampling)
    teacher = evaluator.teacher()
    announce("student", evaluation.student_sampling)
    for line in evaluation.student.added_lines:
        collectives.log0("%s", line)
    student, errors = evaluator.student()
    result, rows = summary(evaluation, collectives.gather_objects((teacher, student, errors)))
    if collectives.rank() == 0:
        collectives.show(*write(evaluation, result, rows))
    return result


@readable()
def read_evaluation(flags: EvaluateFlags, world: int) -> Evaluation:
    """Check the command's flags and both folders; defaults are the student's training settings.

    Raises:
        ConfigError: with every problem of a part alone, or else of parts that do not go together; no weights
            were read.
    """
    problems = flag_problems("evaluate", flags)
    output = flags.output or Path("evaluation")
    read: dict[str, str | Path] = {}
    sides: list[Folder] = []
    with collecting(problems):
        candidate = read_candidate(flags.student, flags.lora or [], flags.strength, flags.teacher_path)
        output = flags.output or candidate.place or output
        facts, teachers = candidate.facts, candidate.teacher
        with collecting(problems):
            student = candidate.folder
            read["student_path"] = student.path
            student.require_weights()
            sides.append(student)
        teacher = open_wan(teachers, weights=True, revision=candidate.teacher_revision)
        teacher.require_weights()
        teacher = teacher.with_first_frames() if facts.image_to_video else teacher
        teacher = _as_trained(teacher, facts, str(candidate.where))
        how = flags.teacher_deepspeed_config, flags.dtype
        placement = read_placed(*how, [*sides, teacher], world, candidate.weights)
    with collecting(problems):
        items = read_items(flags.prompts)
    problems += folder_problems("output", output) or inside_problems("output", output, read)
    encoders = {name: path for name in ENCODERS if (path := getattr(flags, f"{name}_path"))}
    problems += [p for name, path in encoders.items() for p in encoder_problems(name, path)]
    if problems:
        raise ConfigError(*problems)
    number, steps = min(flags.num_prompts, len(items)), flags.steps or []
    for_teacher, for_student = _samplings(flags, facts, teacher)
    evaluation = Evaluation(
        teacher=teacher,
        student=student,
        placement=placement,
        items=[items[i * len(items) // number] for i in range(number)],
        output=output,
        teacher_sampling=for_teacher,
        student_sampling=for_student,
        encoders=encoders,
        facts=facts,
        seed=flags.seed,
        batch=flags.batch,
        quick=flags.quick,
        numbers=tuple(dict.fromkeys(steps)) if len(steps) > 1 else (),
    )
    if problems := _pair_problems(evaluation, flags.context_parallel, world):
        raise ConfigError(*problems)
    return evaluation


def _as_trained(teacher: Folder, facts: Facts, where: str) -> Folder:
    """Return the teacher with the LoRA files that it had in training; raises ConfigError without them."""
    teacher = teacher.with_loras(each_file(read_added(where, "teacher_lora", facts.teacher_lora or [])))
    for added, digest in zip(teacher.added, facts.teacher_lora_digests or (), strict=False):
        if added.digest != digest:
            text = "was added to the teacher, and is not as it was when the student was trained"
            raise ConfigError(f"{added.file}: {text}. Put the file back that the run had.")
    return teacher


def _samplings(flags: EvaluateFlags, facts: Facts, teacher: Folder) -> tuple[Sampling, Sampling]:
    """Return how teacher and student sample: by the flags, else as the student was trained, else as usual."""
    usual, (high, low) = teacher.usual, teacher.usual.guidance
    chosen = flags.steps[0] if flags.steps and len(flags.steps) == 1 else None
    size = {
        "height": flags.height or facts.height or usual.height,
        "width": flags.width or facts.width or usual.width,
        "num_frames": flags.num_frames or facts.num_frames or teacher.shortest,
    }
    steps, second = chosen or facts.steps or STEPS, flags.guidance_scale_2
    if teacher.boundary is not None:  # diffusers refuses it for one expert, and without it takes the first
        second = _first_known(second, flags.guidance_scale, facts.guidance_scale_2, low)
    return Sampling(
        **size,
        # a student of few steps is compared with its teacher in many
        steps=chosen or facts.teacher_steps or steps,
        guidance_scale=_first_known(flags.guidance_scale, facts.guidance_scale, high),
        guidance_scale_2=second,
        negative_prompt=_first_known(flags.negative_prompt, facts.negative_prompt, WAN_NEGATIVE_PROMPT),
        shift=facts.shift,
    ), Sampling(**size, steps=steps)


def _first_known(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _pair_problems(evaluation: Evaluation, sharers: int, world: int) -> list[str]:
    """List what keeps the two from the same settings on `world` ranks, `sharers` of which share a sample."""
    teacher, student, guided = evaluation.teacher, evaluation.student, evaluation.teacher_sampling
    if other := [key for key in INPUTS if getattr(student.config, key) != getattr(teacher.config, key)]:
        its, theirs = (getattr(folder.config, other[0]) for folder in (student, teacher))
        text = f"takes other inputs than {teacher.name}: `{other[0]}` is {its}, not {theirs}"
        kinds = "both of text-to-video or both of image-to-video"
        return [f"{student.name}: {text}. Give two of one kind, {kinds}."]
    size = guided.height, guided.width, guided.num_frames
    of_student = size_problems(student, *size)
    problems = list(dict.fromkeys(size_problems(teacher, *size) + of_student))
    problems += image_problems(teacher, evaluation.items)
    if (theirs := teacher.latent_shape(*size)) != (its := student.latent_shape(*size)):
        problems.append(
            f"{student.name}: its latents are {its}, those of {teacher.name} {theirs}. "
            "Give a student with its VAE."
        )
    folders = {"The student": student, "The teacher": teacher}
    if evaluation.placement.on_one_rank:
        folders = {}
    heads = {name: folder.config.num_attention_heads for name, folder in folders.items()}
    patches = {} if of_student else {size: student.tokens(*size)}
    return problems + division_problems("evaluate", sharers, world, heads, patches)
