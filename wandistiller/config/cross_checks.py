"""Checks of a run whose parts are sound: settings that do not go together, or not with this machine."""

import json
from dataclasses import astuple

from wandistiller.batch import PATH
from wandistiller.checkpoint.resume import CHANGEABLE
from wandistiller.config.adapter_files import changed_adapters, named_files, start_problems
from wandistiller.config.job import Job
from wandistiller.config.recipe import FOLDERS
from wandistiller.config.run_config import RunConfig
from wandistiller.data.colours import background_problems
from wandistiller.data.conditions import given_problems
from wandistiller.data.dataset import MADE, MediaType
from wandistiller.data.lines import prompt_problems
from wandistiller.data.media import video_problem
from wandistiller.distributed import device
from wandistiller.distributed.sequence_parallel import division_problems
from wandistiller.engine.ds_schema import BLOCK
from wandistiller.engine.nvme import lock_problems, locked_bytes
from wandistiller.experts import Expert
from wandistiller.flow import RENOISE, FlowSchedule
from wandistiller.network.adapters import lora_value_problems
from wandistiller.network.folder import Folder
from wandistiller.network.sampling import AT_BOUNDARY, few_steps, path_sigmas
from wandistiller.objectives.base import RunFacts
from wandistiller.student.trainable import tuning_problems
from wandistiller.teacher.placements.base import Placement
from wandistiller.utils.errors import RECIPE, Problem, collecting, folder_problems, inside_problems, problem


def own_problems(run: RunConfig) -> list[str]:
    """List problems of single settings that need no other part of the run."""
    remedy = f"Write keys among: {', '.join(CHANGEABLE)}."
    unknown = [key for key in run.allow_changed or () if key not in CHANGEABLE]
    problems = [problem("command line", "allow_changed", key, remedy) for key in unknown]
    problems += prompt_problems(RECIPE, "sample_prompts", run.sample_prompts or [])
    problems += prompt_problems(RECIPE, "negative_prompt", [run.negative_prompt], none=True)
    problems += background_problems(run.background)
    if wrong := lora_value_problems(run.lora):
        return problems + wrong
    with collecting(problems):
        named_files(run)
    return problems


def combined_problems(job: Job, world: int, *, here: bool) -> list[str]:
    """List settings that do not fit each other, or this machine if the run is to be `here`."""
    run, folder, size = job.run, job.folder, job.size
    gpus = device.count() if here else world
    problems = job.teacher.teacher_problems(folder.config.top_modules, gpus)
    problems += folder.size_problems(size.height, size.width, size.num_frames)
    problems += objective_problems(job) + sequence_problems(job, world)
    problems += _media_problems(job) + _written_problems(job)
    problems += changed_adapters(job) + added_problems(job.folder, job.teacher)
    problems += _nvme_problems(job, world) if here else []
    problems += tuning_problems(run, job.student_transformer, job.student_engine)
    return problems or start_problems(job)


def objective_problems(job: Job) -> list[str]:
    """List what the objective needs and the run does not have."""
    problems = job.objective.combined_problems(
        RunFacts(
            layers=job.student_transformer.num_layers,
            teacher_layers=job.folder.config.num_layers,
            has_two_experts=job.student.experts == "two",
            is_measured=job.needs_measuring,
            has_buckets=bool(job.run.buckets),
            adapts_teacher=bool(job.networks.bases),
            trains_part=bool(job.run.frozen or job.run.lora and not job.networks.bases),
            teaches_flow_map=job.folder.config.has_second_time,
            joins_frames="joined_BCFHW" in job.folder.config.given_fields and job.folder.config.takes_image,
        )
    )
    if any(role.follows for role in job.objective.others.values()):
        problems += _follow_problems(job)
    return problems + _level_problems(job) + _path_problems(job)


def _level_problems(job: Job) -> list[Problem]:
    """Each expert of a student must serve one of its few noise levels.

    A high-noise expert that is led to the hand-over needs a sampler that comes by there too.
    """
    objective, boundary, shift = job.objective, job.folder.boundary, job.run.shift
    number = objective.sampling_steps
    if not number or job.student.experts != "two":
        return []
    sigmas = few_steps(shift, number, boundary).sigmas
    ends_there = any(term.aim.ends_segments for term in objective.terms)
    is_led = ends_there or objective.trained_expert is Expert.HIGH_NOISE
    if (last := min(sigmas)) > boundary:
        text = (
            f"is for {number} sampling step(s), whose last noise level at shift {shift} is {last:.3f}. The "
            f"student's low-noise expert serves those below {boundary}. Write more steps or a smaller shift."
        )
    elif is_led and objective.few_step_sampler == RENOISE:
        text = (
            "has consistency with `steps`, whose every step leads to data, but the high-noise expert of a "
            f"student of two leads to the hand-over, {boundary}. Write `edges`."
        )
    elif is_led and all(abs(sigma - boundary) > AT_BOUNDARY for sigma in sigmas):
        # the shift that puts level k of n at the boundary b: s = b k / ((n - k) (1 - b))
        fitting = [boundary * k / ((number - k) * (1 - boundary)) for k in range(1, number)]
        text = (
            f"has {number} noise levels, and none at shift {shift} is the hand-over {boundary} of a student "
            "of two experts, to which its high-noise expert leads. "
        )
        listed = ", ".join(f"{shift:.3g}" for shift in fitting)
        text += f"Write one of the shifts {listed}." if fitting else "Write more steps."
    else:
        return []
    return [Problem(f"`objective` {text}", RECIPE, "objective")]


def _follow_problems(job: Job) -> list[str]:
    """List settings with which the critic's weights do not lie as the student's, which it follows."""
    moves = "`critic_follows` moves each rank's part of the critic's weights to the student's, but {}, which "
    moves += "the critic does not have. Leave one of them out."
    projects = job.objective.student_blocks and job.student_transformer.width != job.folder.config.width
    problems = [moves.format("`feature` gives the student projections")] if projects else []
    if job.run.learning_rates:
        problems.append(moves.format("`learning_rates` sorts the student's weights into groups"))
    return problems


def _path_problems(job: Job) -> list[str]:
    """A term on the teacher's path needs paths in the data, and a segment for each expert."""
    run, folder, problems = job.run, job.folder, []
    on_path = ", ".join(term.name for term in job.objective.terms if term.states == PATH)
    if not on_path:
        return []
    if item := job.items.first(MediaType.IMAGE, MediaType.VIDEO):
        text = f"`objective` has {on_path}, which follows the teacher's own path, but {item.media} has none. "
        text += f"Take the media out of the data, or {on_path} out of the objective."
        problems.append(Problem(text, RECIPE, "objective"))
    schedule = FlowSchedule(run.shift, folder.boundary, run.seed)
    sigmas = path_sigmas(folder, run.shift, run.rollout_steps)
    if any(not schedule.segments(expert, sigmas) for expert in folder.configs):
        text = f"`rollout_steps` is {run.rollout_steps}: no step of the teacher's path begins below its "
        text += f"boundary {folder.boundary}, so {on_path} cannot train there. Write a larger number."
        problems.append(Problem(text, RECIPE, "rollout_steps"))
    return problems


def sequence_problems(job: Job, world: int) -> list[str]:
    """List what does not divide by the ranks that share a sequence: ranks, heads, tokens."""
    networks = {} if job.teacher.on_one_rank else {"The teacher": job.folder.config}
    networks["The student"] = job.student_transformer
    networks |= {f"The {role}": row.config for role, row in job.networks.others.items()}
    heads = {name: config.num_attention_heads for name, config in networks.items()}
    patches = {size: job.folder.tokens(*size) for size in map(astuple, (job.size, *job.buckets))}
    return division_problems(RECIPE, job.run.context_parallel, world, heads, patches)


def added_problems(folder: Folder, teacher: Placement) -> list[str]:
    """List the placement that does not add LoRA files to the teacher's weights."""
    if not folder.added or teacher.reads_all():
        return []
    text = "It may leave modules on disk, from where they are read without `teacher_lora`. Name a device_map "
    return [teacher.engine.problem(f"{BLOCK}.placement", teacher.name, f"{text}without it, or another one.")]


def _media_problems(job: Job) -> list[str]:
    """List media that do not fit the run's frames or this machine, and buckets not fit for the teacher."""
    run, items, problems = job.run, job.items, []
    if run.strict and (unknown := items.unknown):
        text = f"`strict` is true, and {len(unknown)} file(s) with a prompt have an unknown ending: "
        text += f"{', '.join(map(str, unknown[:3]))}. Convert them, or take them out."
        problems.append(Problem(text, RECIPE, "strict"))
    if job.folder.config.takes_image:
        problems += _given_frame_problems(job)
    if run.num_frames > 1 and (still := items.first(MediaType.IMAGE)):
        text = f"`num_frames` is {run.num_frames}, but {still.media} is an image. Write 1, or give videos."
        problems.append(Problem(text, RECIPE, "num_frames"))
    if video := items.first(MediaType.VIDEO):
        problems += filter(None, [video_problem(video.media)])
    for size in run.buckets if isinstance(run.buckets, list) else []:
        problems += job.folder.size_problems(*size, run.num_frames)
    return problems


def _given_frame_problems(job: Job) -> list[str]:
    """List what an image-to-video teacher needs and the data or the settings do not have."""
    run, items, config = job.run, job.items, job.folder.config
    problems = given_problems(job.folder, [*filter(None, map(items.first, MADE))])
    if config.image_dim and run.merge_text_padding:
        why = "Its attention divides text from image by the 512 rows of text (diffusers 0.42.1)."
        problems.append(problem(RECIPE, "merge_text_padding", True, f"{why} Write false."))
    rows = {item.prompt for item in job.sample_items}
    if missing := [prompt for prompt in run.sample_prompts if prompt not in rows]:
        text = f"`sample_prompts` has {json.dumps(missing[0])}, which no row has. An image-to-video teacher "
        text += "needs its first frame too. Write prompts of the data, or leave it out."
        problems.append(Problem(text, RECIPE, "sample_prompts"))
    return problems


def _written_problems(job: Job) -> list[str]:
    """List folders that cannot be written to, or whose files would be mixed with the data or the teacher."""
    run, out, problems = job.run, job.output, []
    inputs = {"data_path": run.data_path, "teacher_path": job.folder.path}
    for key in FOLDERS:
        if folder := getattr(run, key):
            texts = folder_problems(key, folder) or inside_problems(key, folder, inputs)
            problems += [Problem(text, RECIPE, key) for text in texts]
    names = ["student", "checkpoints", *["cache"] * (not run.cache_dir), *["samples"] * (not run.sample_dir)]
    texts = [p for name in names for p in inside_problems("output_dir", out / name, inputs)]
    return problems or [Problem(text, RECIPE, "output_dir") for text in texts]


def _nvme_problems(job: Job, world: int) -> list[str]:
    """List folders that cannot be written to, and more locked memory than this user may have."""
    engines = [(job.teacher.engine, job.folder.config), (job.student_engine, job.student_transformer)]
    engines += [(row.engine, row.config) for row in job.networks.others.values()]
    swaps = [engine.offload(target) for engine, _ in engines for target in ("param", "optimizer")]
    folders = dict.fromkeys(swap["nvme_path"] for swap in swaps if swap["device"] == "nvme")
    problems = [p for folder in folders for p in folder_problems("nvme_path", folder)]
    locked = sum(locked_bytes(engine, config.numels.values(), world) for engine, config in engines)
    return problems + lock_problems(locked)
