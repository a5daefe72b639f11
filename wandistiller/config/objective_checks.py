"""Misfits of the objective with the student, the data and the other settings of a run."""

from typing import Any

from wandistiller.batch import PATH
from wandistiller.config.run_config import AUTO, RunConfig
from wandistiller.data.dataset import MediaType
from wandistiller.engine.activation_checkpointing import SECTION
from wandistiller.engine.ds_config import dtype_name
from wandistiller.flow import RENOISE, FlowSchedule
from wandistiller.objectives.base import Role, Surroundings
from wandistiller.objectives.objective import Objective
from wandistiller.student.config import IMPORTANCE, WIDTH_KEYS
from wandistiller.wan.sampling import AT_BOUNDARY, few_steps, path_sigmas
from wandistiller.wan.transformer import width


def objective_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """List what the objective needs and the run does not have.

    Args:
        parts: fields of Job that could be read, folder and objective among them.
    """
    objective, folder, problems = parts["objective"], parts["folder"], []
    if "student_transformer" in parts:
        layers = parts["student_transformer"]["num_layers"], folder.config["num_layers"]
        problems += objective.block_problems(*layers)
    for term in objective.terms:
        problems += term.combined_problems(_surroundings(run, parts))
    for role in objective.others.values():
        problems += _role_problems(run, parts, role)
    return problems + _level_problems(run, parts) + _path_problems(run, parts)


def _level_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """Each expert of a student must serve one of its few noise levels."""
    number, boundary = parts["objective"].sampling_steps, parts["folder"].boundary
    if not number or "student" not in parts or parts["student"].experts != "two":
        return []
    last = min(few_steps(run.shift, number, boundary).sigmas)
    if last <= boundary:
        return _handover_problems(run, parts["objective"], boundary)
    return [
        f"`objective` is for {number} sampling step(s), whose last noise level at shift {run.shift} is "
        f"{last:.3f}. The student's low-noise expert serves those below {boundary}. Write more steps or a "
        "smaller shift."
    ]


def _handover_problems(run: RunConfig, objective: Objective, boundary: float) -> list[str]:
    """Consistency leads a high-noise expert to the hand-over, where the sampler must come by too."""
    number = objective.sampling_steps
    if not any(term.ends_segments for term in objective.terms):
        return []
    if objective.few_step_sampler == RENOISE:
        return [
            "`objective` has consistency with `steps`, whose every step leads to data, but the high-noise "
            f"expert of a student of two leads to the hand-over, {boundary}. Write `edges`."
        ]
    sigmas = few_steps(run.shift, number, boundary).sigmas
    if any(abs(sigma - boundary) <= AT_BOUNDARY for sigma in sigmas):
        return []
    # the shift that puts level k of n at the boundary b: s = b k / ((n - k) (1 - b))
    fitting = [boundary * k / ((number - k) * (1 - boundary)) for k in range(1, number)]
    listed = ", ".join(f"{shift:.3g}" for shift in fitting)
    return [
        f"`objective` has consistency with {number} noise levels, and none at shift {run.shift} is the "
        f"hand-over {boundary} of a student of two experts, to which its high-noise expert leads. "
        + (f"Write one of the shifts {listed}." if fitting else "Write more steps.")
    ]


def _surroundings(run: RunConfig, parts: dict[str, Any]) -> Surroundings:
    """Return what a term may check of the rest of the run."""
    student, objective = parts.get("student"), parts["objective"]
    return Surroundings(
        student_experts=student.experts if student else None,
        measures_teacher=bool(student) and _is_made_of_measurements(parts),
        has_buckets=bool(run.buckets),
        needs_latents=objective.needs_latents,
        trains_a_part=bool(run.lora or run.frozen),
    )


def _role_problems(run: RunConfig, parts: dict[str, Any], role: Role) -> list[str]:
    """List settings beside which a network cannot train beside the student."""
    problems = _own_json_problems(run, parts)
    return problems + (_follow_problems(run, parts) if role.follows else [])


def _own_json_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """List sections of a critic's own JSON that two engines of a process cannot have apart."""
    own, student = parts.get("others_ds"), parts.get("student_ds")
    sections = [ds.get(SECTION) for ds in (own, student) if ds]
    if len(sections) < 2 or None in sections or sections[0] == sections[1]:
        return []
    return [
        "`critic_deepspeed_config` has another `activation_checkpointing` than the student's JSON, but "
        "DeepSpeed has one for all engines of a process (0.19.8). Write the same, or leave one out."
    ]


def _follow_problems(run: RunConfig, parts: dict[str, Any]) -> list[str]:
    """List settings with which the critic's weights do not lie as the student's, which it follows."""
    own, student, reasons = parts.get("others_ds"), parts.get("student_ds"), []
    if own and run.deepspeed_config == AUTO:
        reasons.append("`deepspeed_config` is auto and `critic_deepspeed_config` is given")
    elif own and student:
        of_own, of_student = (
            [ds["zero_optimization"], dtype_name(ds), ds["optimizer"]["type"]] for ds in (own, student)
        )
        if of_own != of_student:
            reasons.append(
                "the JSON of `critic_deepspeed_config` has another `zero_optimization`, precision or "
                "optimizer than the student's"
            )
    if run.learning_rates:
        reasons.append("`learning_rates` sorts the student's weights into groups, which the critic has not")
    own_width, whole = parts.get("student_transformer"), parts["folder"].config
    if own_width and parts["objective"].student_blocks and width(own_width) != width(whole):
        reasons.append("`feature` gives the student projections, which the critic has not")
    if not reasons:
        return []
    moves = "`critic_follows` moves each rank's part of the critic's weights to the student's, but "
    return [f"{moves}{'; '.join(reasons)}. Leave one of them out."]


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
