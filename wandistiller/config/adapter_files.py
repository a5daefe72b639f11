"""The LoRA files, or the earlier run, that the adapters of a student's networks begin with."""

import json

from wandistiller.config.job import Job
from wandistiller.config.networks import without_start
from wandistiller.config.run_config import RunConfig
from wandistiller.experts import Expert
from wandistiller.network.adapters import Lora, LowRank, target_layers
from wandistiller.network.weight_reader import WeightReader
from wandistiller.utils.errors import RECIPE, ConfigError, Place, Problem
from wandistiller.wan import added_lora
from wandistiller.wan.added_lora import AddedLora
from wandistiller.wan.lora_experts import require_files, require_no_full_model

WHERE = Place(RECIPE, "lora.start")


def start_bases(job: Job) -> dict[Expert, Expert]:
    """Return the teacher's network that each of the student's is made of."""
    return job.networks.bases or {expert: expert for expert in job.networks.student}


def named_files(run: RunConfig) -> list[AddedLora]:
    """Return what `lora.start` names; raises ConfigError with every file that is not here."""
    start = (run.lora or {}).get("start")
    added = [] if start is None else added_lora.read_added("recipe", "lora.start", start)
    require_files(file.file for file in added)
    return added


def start_files(job: Job) -> list[AddedLora]:
    """Return the files of `lora.start`; of two experts those alone that a network is made of, if any is.

    Raises:
        ConfigError: one is no LoRA file, or nothing says for which expert it is.
    """
    lora, bases = Lora(**job.run.lora or {}), start_bases(job).values()
    if not (files := named_files(job.run)):
        return []
    ranks = [lora.rank_of(layer) for layer in target_layers(lora, job.student_transformer)]
    flags = ["--targets", *lora.targets, "--rank", min(ranks, default=lora.rank)]
    for added in files:
        require_no_full_model(added.file, job.run.teacher_path, flags)
    files = added_lora.with_experts(WHERE, files, job.folder.configs if job.networks.bases else bases)
    return [added for added in files if any(map(added.is_for, bases))] or files


def start_changes(job: Job, network: Expert, *, weights: bool = True) -> dict[str, LowRank]:
    """Return what the adapters of a network begin as, by layer; without `weights` on the meta device."""
    base = start_bases(job)[network]
    return added_lora.added_changes(start_files(job), job.student_transformer, base, weights=weights)


def start_reader(job: Job, network: Expert) -> WeightReader:
    """Return the weights, `lora.start` in them, of the teacher's network that one is but for adapters."""
    return job.folder.with_loras(start_files(job)).reader(start_bases(job)[network])


def start_problems(job: Job) -> list[str]:
    """List the problems of `lora.start`; the files are read."""
    lora, config = Lora(**job.run.lora or {}), job.student_transformer
    configs = dict.fromkeys(start_bases(job).values(), config)
    try:
        problems = added_lora.added_problems(WHERE, start_files(job), configs)
    except ConfigError as error:
        return error.problems
    targets = target_layers(lora, config)
    for network in start_bases(job) if not problems else ():
        changes = start_changes(job, network, weights=False)
        ranks = {name: change.rank for name, change in changes.items() if change.rank > lora.rank_of(name)}
        higher = {layer.split(".", 2)[-1]: rank for layer, rank in ranks.items()}
        if without := sorted({layer.split(".", 2)[-1] for layer in changes if layer not in targets}):
            text = "changes layers that have no adapter here. Add to `lora.targets`"
            problems.append(WHERE.problem(f"{text}: {', '.join(without)}."))
        if higher:
            text = f"its rank is {max(higher.values())}. Write that as `lora.rank`, or as `lora.ranks`"
            problems.append(WHERE.problem(f"{text} {json.dumps(higher)}."))
    return problems


def start_lines(job: Job) -> list[str]:
    """Say which file begins the adapters of which network, and which of its keys do not."""
    files = [] if job.start or job.resume_from else start_files(job)
    configs = dict.fromkeys(start_bases(job).values(), job.student_transformer)
    return added_lora.added_lines(files, configs, "start")


def changed_adapters(job: Job) -> list[str]:
    """List the adapters that differ from those of the run that they begin with.

    That run's would be merged into a copy of the teacher's weights for every role.
    """
    before, lora = job.start and job.start.facts, job.run.lora
    if not before or not before.bases or lora is None:
        return []
    if lora.get("start") and not job.previous:  # of an earlier stage's it was the beginning
        whose = f"but the student begins with the adapters of {job.start.folder}. Keep one."
        return [Problem(f"`lora.start` is {lora['start']}, {whose}", RECIPE, "lora.start")]
    if (old := without_start(before.lora)) == (new := without_start(lora)):
        return []
    changed = {key: value for key, value in old.items() if new[key] != value}
    if "rank" in changed and before.lora.get("alpha") is None and lora.get("alpha") is None:
        changed.pop("alpha", None)  # it follows from the rank
    keys = ", ".join(changed)
    text = (
        f"`lora` has another {keys} than the run {job.start.folder}, whose adapters it begins with: "
        "they would be merged, and each role need a copy of the whole network. Write that run's "
        f"{json.dumps(changed)}, or begin anew with its exported file as `lora.start`."
    )
    return [Problem(text, RECIPE, "lora")]
