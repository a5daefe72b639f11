"""Misfits of the objective with the student, the data and the other settings of a run."""

from typing import Any

from wandistiller.batch import PATH
from wandistiller.config.run_config import RunConfig
from wandistiller.data.dataset import MediaType
from wandistiller.flow import FlowSchedule
from wandistiller.student.config import IMPORTANCE, WIDTH_KEYS
from wandistiller.wan.sampling import few_steps, path_sigmas


def objective_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """List what the objective needs and the run does not have.

    Args:
        parts: fields of Job that could be read, folder and objective among them.
    """
    objective, folder, problems = parts["objective"], parts["folder"], []
    if "student_transformer" in parts:
        layers = parts["student_transformer"]["num_layers"], folder.config["num_layers"]
        problems += objective.block_problems(*layers)
    problems += _critic_problems(run, parts) if objective.critic else []
    return problems + _level_problems(run, parts) + _path_problems(run, parts)


def _level_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """Each expert of a student must serve one of its few noise levels."""
    number, boundary = parts["objective"].sampling_steps, parts["folder"].boundary
    if not number or "student" not in parts or parts["student"].experts != "two":
        return []
    last = min(few_steps(run.shift, number, boundary).sigmas)
    if last <= boundary:
        return []
    return [
        f"`objective` is for {number} sampling step(s), whose last noise level at shift {run.shift} is "
        f"{last:.3f}. The student's low-noise expert serves those below {boundary}. Write more steps or a "
        "smaller shift."
    ]


def _critic_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """List settings beside which a critic cannot train."""
    problems, objective = [], parts["objective"]
    one, networks = objective.trained_expert, parts["student"].experts if "student" in parts else None
    if networks == "two" and not one:
        problems.append(
            '`experts` is "two", and dmd2 trains one network in a run. Write "one", or give dmd2 the key '
            '`expert`: "high_noise" in one stage and "low_noise" in the next.'
        )
    if one and networks == "two" and _is_made_of_measurements(parts):
        problems.append(
            "dmd2 has `expert`, which loads one expert of the teacher, but making this student measures "
            "both. Train it in a stage before, or name its folder as `init`."
        )
    if networks == "one" and one:
        problems.append("dmd2 has `expert`, but the student is one network. Leave `expert` out.")
    own, student = parts.get("own_critic_ds"), parts.get("student_ds")
    if objective.critic.follows and own and student:
        if own["zero_optimization"] != student["zero_optimization"]:
            problems.append(
                "`critic_follows` moves each rank's part of the critic's weights, but the JSON of "
                "`critic_deepspeed_config` has another `zero_optimization` than the student's. Write the "
                "same, or leave one of the two keys out."
            )
    if run.buckets and objective.needs_latents:
        problems.append(
            "`buckets` makes samples of several sizes, and dmd2 draws its own at one size. Leave `buckets` "
            "out, or the other terms of `objective`."
        )
    if objective.critic.start == "teacher" and (run.lora or run.frozen):
        problems.append(
            '`critic_start` is "teacher", whose critic is trained as a whole, but `lora` or `frozen` trains '
            'a part of the student. Write `critic_start` "student".'
        )
    return problems


def _is_made_of_measurements(parts: dict[str, Any]) -> bool:
    """Return whether the teacher is measured to choose the student's layers or its cut."""
    student, own, whole = parts["student"], parts["student_transformer"], parts["folder"].config
    is_cut = any(own[key] != whole[key] for key in WIDTH_KEYS)
    return student.init == "teacher" and (student.keep_layers == IMPORTANCE or is_cut)


def _path_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """A term on the teacher's path needs paths in the data, and a segment for each expert."""
    folder, problems = parts["folder"], []
    on_path = ", ".join(term.name for term in parts["objective"].terms if term.states == PATH)
    if not on_path:
        return []
    media = (MediaType.IMAGE, MediaType.VIDEO, MediaType.GIF)
    if "items" in parts and (given := parts["items"].first(*media)):
        problems.append(
            f"`objective` has {on_path}, which follows the teacher's own path, but {given.media} "
            f"has none. Take the media out of the data, or {on_path} out of the objective."
        )
    schedule = FlowSchedule(run.shift, folder.boundary, run.seed, global_batch=1)
    sigmas = path_sigmas(folder, run.shift, run.rollout_steps)
    if any(not schedule.segments(expert, sigmas) for expert in folder.configs):
        problems.append(
            f"`rollout_steps` is {run.rollout_steps}: no step of the teacher's path begins below its "
            f"boundary {folder.boundary}, so {on_path} cannot train there. Write a larger number."
        )
    return problems
