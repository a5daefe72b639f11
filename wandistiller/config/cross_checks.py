"""Checks of a run whose parts are sound: settings that do not go together, or not with this machine."""

import json
from dataclasses import fields

from wandistiller.batch import PATH, STUDENT
from wandistiller.checkpoint.resume import CHANGEABLE
from wandistiller.config.adapter_files import changed_adapters, start_problems
from wandistiller.config.job import Job
from wandistiller.config.run_config import RunConfig
from wandistiller.data.colours import background_problems
from wandistiller.data.conditions import given_problems
from wandistiller.data.dataset import MADE, MediaType
from wandistiller.data.media import video_problem
from wandistiller.distributed import device
from wandistiller.engine.activation_checkpointing import SECTION, CheckpointPolicy
from wandistiller.engine.ds_schema import BLOCK, MUON_RATES, PEAKS
from wandistiller.engine.nvme import lock_problems, locked_bytes
from wandistiller.experts import Expert
from wandistiller.flow import RENOISE, FlowSchedule
from wandistiller.network.adapters import lora_value_problems
from wandistiller.student.trainable import tuning_problems
from wandistiller.teacher.placements.base import Placement
from wandistiller.utils.errors import RECIPE, Problem, folder_problems, inside_problems, problem
from wandistiller.wan.pipeline import WanFolder
from wandistiller.wan.sampling import AT_BOUNDARY, few_steps, path_sigmas
from wandistiller.wan.transformer import numels, top_modules

SHARED = "context_parallel"
"""Key of the ranks that compute each sample together."""


def own_problems(run: RunConfig, *, here: bool) -> list[str]:
    """List problems of single settings that need no other part of the run."""
    problems = _profile_problems(run, here) if run.profile_memory else []
    remedy = f"Write keys among: {', '.join(CHANGEABLE)}."
    unknown = [key for key in run.allow_changed or () if key not in CHANGEABLE]
    problems += [problem("command line", "allow_changed", key, remedy) for key in unknown]
    return problems + background_problems(run.background) + lora_value_problems(run.lora)


def combined_problems(job: Job, world: int, *, here: bool) -> list[str]:
    """List settings that do not fit each other, or this machine if the run is to be `here`."""
    run, folder, size = job.run, job.folder, job.size
    gpus = device.count() if here else world
    problems = job.teacher.teacher_problems(top_modules(folder.config), gpus)
    problems += folder.size_problems(size.height, size.width, size.num_frames)
    problems += objective_problems(job) + sequence_problems(job, world)
    problems += _media_problems(job) + _written_problems(job)
    problems += changed_adapters(job) + shared_base_problems(job) + added_problems(job.folder, job.teacher)
    problems += _nvme_problems(job, world) if here else []
    projects = bool(problems) or _projects(job)  # of an objective that is checked
    problems += tuning_problems(run, job.student_transformer, job.student_engine, projects=projects)
    return problems or start_problems(job)


def _projects(job: Job) -> bool:
    """Return whether hidden states of the student are projected to another width, the teacher's."""
    student = job.student_transformer  # whatever its blocks stand for, which may not be known yet
    matched = job.objective.for_student([*range(student.num_layers)]).student_blocks
    return bool(matched) and student.width != job.folder.config.width


def objective_problems(job: Job) -> list[str]:
    """List what the objective needs and the run does not have."""
    layers = job.student_transformer.num_layers, job.folder.config.num_layers
    problems = job.objective.block_problems(*layers)
    for term in job.objective.terms:
        problems += term.combined_problems(job)
    for role in job.objective.others.values():
        problems += _follow_problems(job) if role.follows else []
        problems += _rate_problems(job, role.lr) if role.lr is not None else []
    return problems + _level_problems(job) + _path_problems(job)


def _level_problems(job: Job) -> list[str]:
    """Each expert of a student must serve one of its few noise levels."""
    number, boundary, shift = job.objective.sampling_steps, job.folder.boundary, job.run.shift
    if not number or job.student.experts != "two":
        return []
    last = min(few_steps(shift, number, boundary).sigmas)
    if last <= boundary:
        return _handover_problems(job)
    text = (
        f"`objective` is for {number} sampling step(s), whose last noise level at shift {shift} is "
        f"{last:.3f}. The student's low-noise expert serves those below {boundary}. Write more steps or a "
        "smaller shift."
    )
    return [Problem(text, RECIPE, "objective")]


def _handover_problems(job: Job) -> list[str]:
    """A high-noise expert that is led to the hand-over needs a sampler that comes by there too."""
    objective, boundary, shift = job.objective, job.folder.boundary, job.run.shift
    number = objective.sampling_steps
    is_led = any(term.ends_segments for term in objective.terms)
    if not (is_led or objective.trained_expert is Expert.HIGH_NOISE):
        return []
    if objective.few_step_sampler == RENOISE:
        text = (
            "`objective` has consistency with `steps`, whose every step leads to data, but the high-noise "
            f"expert of a student of two leads to the hand-over, {boundary}. Write `edges`."
        )
        return [Problem(text, RECIPE, "objective")]
    sigmas = few_steps(shift, number, boundary).sigmas
    if any(abs(sigma - boundary) <= AT_BOUNDARY for sigma in sigmas):
        return []
    # the shift that puts level k of n at the boundary b: s = b k / ((n - k) (1 - b))
    fitting = [boundary * k / ((number - k) * (1 - boundary)) for k in range(1, number)]
    listed = ", ".join(f"{one:.3g}" for one in fitting)
    text = (
        f"`objective` has {number} noise levels, and none at shift {shift} is the hand-over {boundary} of a "
        "student of two experts, to which its high-noise expert leads. "
    )
    text += f"Write one of the shifts {listed}." if fitting else "Write more steps."
    return [Problem(text, RECIPE, "objective")]


def _follow_problems(job: Job) -> list[str]:
    """List settings with which the critic's weights do not lie as the student's, which it follows."""
    reasons = []
    if job.run.learning_rates:
        reasons.append("`learning_rates` sorts the student's weights into groups, which the critic has not")
    if job.objective.student_blocks and job.student_transformer.width != job.folder.config.width:
        reasons.append("`feature` gives the student projections, which the critic has not")
    if not reasons:
        return []
    moves = "`critic_follows` moves each rank's part of the critic's weights to the student's, but "
    return [f"{moves}{'; '.join(reasons)}. Leave one of them out."]


def _rate_problems(job: Job, lr: float) -> list[str]:
    """List the rates of the student's Muon, by which a critic's own would be without effect."""
    engine = job.student_engine
    given = {k: rate for k, rate in engine.section("optimizer.params").items() if k in MUON_RATES}
    if engine.schedule in PEAKS or all(rate == lr for rate in given.values()):
        return []
    listed = " and ".join(f"`optimizer.params.{key}` is {rate}" for key, rate in given.items())
    return [
        f"`critic_lr` is {lr}, but in {engine.where} {listed}, which Muon takes for the critic too. Write "
        "`optimizer.params.lr` in place of them, or leave `critic_lr` out."
    ]


def _path_problems(job: Job) -> list[str]:
    """A term on the teacher's path needs paths in the data, and a segment for each expert."""
    run, folder, problems = job.run, job.folder, []
    on_path = ", ".join(term.name for term in job.objective.terms if term.states == PATH)
    if not on_path:
        return []
    media = (MediaType.IMAGE, MediaType.VIDEO, MediaType.GIF)
    if given := job.items.first(*media):
        text = (
            f"`objective` has {on_path}, which follows the teacher's own path, but {given.media} "
            f"has none. Take the media out of the data, or {on_path} out of the objective."
        )
        problems.append(Problem(text, RECIPE, "objective"))
    schedule = FlowSchedule(run.shift, folder.boundary, run.seed)
    sigmas = path_sigmas(folder, run.shift, run.rollout_steps)
    if any(not schedule.segments(expert, sigmas) for expert in folder.configs):
        problems.append(
            f"`rollout_steps` is {run.rollout_steps}: no step of the teacher's path begins below its "
            f"boundary {folder.boundary}, so {on_path} cannot train there. Write a larger number."
        )
    return problems


def replicas(run: RunConfig, world: int) -> int:
    """Return how many groups of ranks work on different samples, of `world` ranks."""
    return max(1, world // run.context_parallel)


def sequence_problems(job: Job, world: int) -> list[str]:
    """List what does not divide by the ranks that share a sequence: ranks, heads, tokens."""
    networks = {} if job.teacher.on_one_rank else {"The teacher": job.folder.config}
    networks["The student"] = job.student_transformer
    networks |= {f"The {role}": row.config for role, row in job.networks.others.items()}
    heads = {name: config.num_attention_heads for name, config in networks.items()}
    sizes = {(s.height, s.width, s.num_frames): 0 for s in (job.size, *job.buckets)}
    sizes = {size: job.folder.tokens(*size) for size in sizes}
    return division_problems("recipe", job.run.context_parallel, world, heads, sizes)


def division_problems(
    where: str, number: int, world: int, heads: dict[str, int], patches: dict[tuple[int, int, int], int]
) -> list[str]:
    """List what does not divide by `number`, the ranks that share a sequence.

    Args:
        patches: of a sample of (height, width, frames).
    """
    if number <= 1:  # what is no positive number is reported elsewhere
        return []
    rules = [(f"There are {world} rank(s)", world)]
    rules += [(f"{name} has {value} attention heads", value) for name, value in heads.items()]
    for (height, wide, frames), value in patches.items():
        rules.append((f"A sample of {height}x{wide} pixels and {frames} frame(s) has {value} patches", value))
    remedy = "Write a divisor of that, or 1."
    return [problem(where, SHARED, number, f"{what}. {remedy}") for what, value in rules if value % number]


def shared_base_problems(job: Job) -> list[str]:
    """List what keeps adapters from learning on weights that arrive block by block, forward and backward."""
    engine = job.student_engine
    if not (job.networks.share_base and job.teacher.sweeps) or engine.recompute == CheckpointPolicy():
        return []
    why = (
        f"The teacher is {job.teacher.describe()}, and the adapters learn on its weights, of which two or "
        "three blocks are there at a time: backward must recompute every block."
    )
    if not engine.recompute:
        remedy = "Add it, {} will do, or give the flag --gradient_checkpointing."
        return [f"{engine.where}: `{SECTION}` is missing. {why} {remedy}"]
    keys = [f.name for f in fields(CheckpointPolicy) if f.name in engine.block]
    return [engine.problem(f"{BLOCK}.{key}", engine.block[key], f"{why} Leave it out.") for key in keys]


def added_problems(folder: WanFolder, teacher: Placement) -> list[str]:
    """List the placement that does not add LoRA files to the teacher's weights."""
    if not folder.added or teacher.reads_all():
        return []
    remedy = "Name a device_map without it, or another placement."
    text = f"It may leave modules on disk, from where they are read without `teacher_lora`. {remedy}"
    return [teacher.engine.problem(f"{BLOCK}.placement", teacher.name, text)]


def _media_problems(job: Job) -> list[str]:
    """List media that do not fit the run's frames or this machine, and buckets not fit for the teacher."""
    run, items, problems = job.run, job.items, []
    if run.strict and (unknown := items.unknown):
        problems.append(
            f"`strict` is true, and {len(unknown)} file(s) with a prompt beside them have an ending that is "
            f"not known: {', '.join(map(str, unknown[:3]))}. Convert them, or take them out."
        )
    if job.folder.config.takes_image:
        problems += _frame_problems(job)
    if run.num_frames > 1 and (still := items.first(MediaType.IMAGE)):
        remedy = "Write 1, or give videos."
        problems.append(f"`num_frames` is {run.num_frames}, but {still.media} is an image. {remedy}")
    if video := items.first(MediaType.VIDEO):
        problems += filter(None, [video_problem(video.media)])
    for size in run.buckets if isinstance(run.buckets, list) else []:
        problems += job.folder.size_problems(*size, run.num_frames)
    return problems


def _frame_problems(job: Job) -> list[str]:
    """List what an image-to-video teacher needs and the data or the settings do not have."""
    run, items, config = job.run, job.items, job.folder.config
    problems = given_problems(job.folder, [*filter(None, map(items.first, MADE))])
    if config.image_dim and run.merge_text_padding:
        remedy = (
            "Its attention divides text from image by the 512 rows of text (diffusers 0.42.1). Write false."
        )
        problems.append(problem("recipe", "merge_text_padding", True, remedy))
    if run.buckets and job.objective.rolls_out(STUDENT):
        remedy = "The objective draws samples of one size, and each begins with its image. Leave it out."
        problems.append(problem("recipe", "buckets", run.buckets, remedy))
    rows = {item.prompt for item in job.sample_items}
    if missing := [prompt for prompt in run.sample_prompts if prompt not in rows]:
        remedy = (
            "An image-to-video teacher needs its first frame too. Write prompts of the data, or leave it out."
        )
        text = f"`sample_prompts` has {json.dumps(missing[0])}, which no row has. {remedy}"
        problems.append(Problem(text, RECIPE, "sample_prompts"))
    return problems


def _written_problems(job: Job) -> list[str]:
    """List folders that cannot be written to, or whose files would be mixed with the data or the teacher."""
    run, out, problems = job.run, job.output, []
    inputs = {"data_path": run.data_path, "teacher_path": job.folder.path}
    given = {key: getattr(run, key) for key in ("output_dir", "cache_dir", "sample_dir")}
    for key, folder in given.items():
        if folder:
            problems += folder_problems(key, folder) or inside_problems(key, folder, inputs)
    own = {"student": True, "checkpoints": True, "cache": not run.cache_dir, "samples": not run.sample_dir}
    own = [out / name for name, is_used in own.items() if is_used]
    return problems or [p for folder in own for p in inside_problems("output_dir", folder, inputs)]


def _profile_problems(run: RunConfig, here: bool) -> list[str]:
    """List the problems of `profile_memory`: no such step, or no GPU if the run is to be `here`."""
    problems = []
    if run.max_steps and run.profile_memory > run.max_steps:
        problems.append(
            f"`profile_memory` is {run.profile_memory}, but the run ends with step {run.max_steps}. "
            "Write a step of it."
        )
    if here and not device.can_record_allocations():
        problems.append(
            "`profile_memory` records the memory of a GPU, and there is none here. Leave it out; "
            "OUTPUT/memory.json has the peaks of CPU memory by phase."
        )
    return problems


def _nvme_problems(job: Job, world: int) -> list[str]:
    """List folders that cannot be written to, and more locked memory than this user may have."""
    engines = [(job.teacher.engine, job.folder.config), (job.student_engine, job.student_transformer)]
    engines += [(row.engine, row.config) for row in job.networks.others.values()]
    swaps = [engine.offload(target) for engine, _ in engines for target in ("param", "optimizer")]
    folders = dict.fromkeys(swap["nvme_path"] for swap in swaps if swap["device"] == "nvme")
    problems = [p for folder in folders for p in folder_problems("nvme_path", folder)]
    locked = sum(locked_bytes(engine, numels(config).values(), world) for engine, config in engines)
    return problems + lock_problems(locked)
