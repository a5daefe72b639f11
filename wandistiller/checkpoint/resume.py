"""Choice of the checkpoint to resume from: the newest whole one of the same run; how another run differs."""

import json
from pathlib import Path
from typing import Any

from wandistiller.checkpoint import manifest
from wandistiller.checkpoint.loading import STATE, read_state
from wandistiller.distributed import collectives
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.logging import set_activity

CHANGEABLE = """
    optimizer scheduler gradient_clipping precision learning_rates ema ema_start
    guidance objective data teacher teacher_weights seed shift train_batch_size
    teacher_dtype vae text_encoder image_encoder
""".split()
"""Keys of a run's identity that may differ at resume; all others fix the shapes of its weights."""
NONE_GOOD = "{}: no checkpoint of it can be used. `--resume never` begins from step 0 and keeps them."


def candidates(output: Path, resume: str) -> list[Path]:
    """List the checkpoints for `resume` (auto, never, or a folder), the best first; empty to start anew.

    Raises:
        ConfigError: the named folder is not a checkpoint, or none of the existing ones can be used.
    """
    if resume == "never":
        return []
    if resume != "auto":
        if not (Path(resume) / STATE).is_file():
            remedy = "Name a folder checkpoints/step_..., auto or never."
            raise ConfigError(f"--resume {resume}: no checkpoint there. {remedy}")
        if problems := manifest.verify(Path(resume)):
            remedy = "Name another checkpoint, or auto for the newest good one."
            raise ConfigError(f"--resume {resume}: {'; '.join(problems)}. {remedy}")
        return [Path(resume)]
    problems = {folder: manifest.verify(folder) for folder in manifest.steps(output / "checkpoints")}
    if problems and all(problems.values()):
        raise ConfigError(*(f"{f}: {'; '.join(p)}." for f, p in problems.items()), NONE_GOOD.format(output))
    return [folder for folder, wrong in problems.items() if not wrong]


def find(output: Path, resume: str) -> Path | None:
    return next(iter(candidates(output, resume)), None)


def latest_valid(output: Path, resume: str) -> Path | None:
    """Return the newest checkpoint with all checksums right; log the skipped ones. Collective.

    Raises:
        ConfigError: on all ranks; no checkpoint is whole.
    """
    set_activity("checking the checkpoint")
    share = (collectives.rank(), collectives.world_size())
    if resume == "auto" and collectives.rank() == 0:
        for folder in manifest.steps(output / "checkpoints"):
            if problems := manifest.verify(folder):
                collectives.log0("skipped   %s: %s", folder, "; ".join(problems))
    bad: list[str] = []
    with collectives.raise_on_all_ranks():
        folders = candidates(output, resume) if collectives.rank() == 0 else []
    for folder in collectives.broadcast_object(folders):
        problems = collectives.gather_problems(manifest.verify(folder, share=share))
        if not problems:
            return folder
        bad.append(f"{folder}: {'; '.join(problems)}.")
        collectives.log0("skipped   %s", bad[-1])
    if bad:
        raise ConfigError(*bad, NONE_GOOD.format(output))
    return None


def set_newer_aside(output: Path, folder: Path) -> None:
    """Rename the checkpoints of a run that are newer than that from which it goes on."""
    for newer in manifest.set_aside_newer(output / "checkpoints", read_state(folder)["step"]):
        collectives.log0("set aside %s, which is newer", newer)


def going_on(output: Path, resume: str) -> str:
    """Say what goes on with a run that was stopped: `never`, or a folder, is for its start alone."""
    has_begun = resume == "never" or resume != "auto" and manifest.steps(output / "checkpoints")
    return f"the same command{' with --resume auto' if has_begun else ''} goes on from there"


def changed_keys(folder: Path, recorded: dict[str, Any], allowed: list[str]) -> set[str]:
    """Return the keys of the identity in which a checkpoint's run differs from this one.

    Args:
        recorded: what this run records in its checkpoints: {"identity", "inputs", "facts", "run", "files"}.
        allowed: keys that may differ.

    Raises:
        ConfigError: with every other difference.
    """
    state = read_state(folder)
    saved = state["identity"] | state.get("inputs", recorded["inputs"])
    identity = recorded["identity"] | recorded["inputs"]
    differ = {k for k in identity | saved if saved.get(k) != identity.get(k)}
    if not (wrong := sorted(differ - set(allowed))):
        return differ
    remedy = "Give another --output_dir, --resume never to begin from step 0"
    if differ <= {*CHANGEABLE}:  # the flag that allows all of them
        remedy += f", or --allow_changed {' '.join(sorted(differ))} to go on all the same"
    both = state | {"identity": saved}, recorded | {"identity": identity}
    words = {key: in_words(key, *both) for key in wrong}
    raise ConfigError(
        *(f"{folder}: holds a run with another {key}: {text}. {remedy}." for key, text in words.items())
    )


MADE_OF = {
    "teacher": ("teacher_path", "teacher_revision", "teacher_lora"),
    "student": ("student_config",),
    "guidance": ("guidance_scale", "guidance_scale_2", "negative_prompt"),
    **dict.fromkeys(("vae", "text_encoder", "image_encoder"), ("teacher_path", "teacher_revision")),
    "data": (
        *("data_path", "height", "width", "num_frames", "buckets", "rollout_steps", "rollouts_per_prompt"),
        *("hub_column", "hub_count", "seed", "shift", "video_fps", "fit", "background"),
    ),
}
"""Keys of the identity that are hashes or lists -> the settings behind them."""
NAMED = 5


def in_words(key: str, saved: dict[str, Any], now: dict[str, Any]) -> str:
    """Say what of a key of the identity was other.

    Args:
        saved, now: {"identity", "run", "files"} of the checkpoint and of this run.
    """
    if key not in MADE_OF:
        return _changes(*({key: state["identity"].get(key)} for state in (saved, now)), key)
    words = [_changes(*({name: state["run"].get(name) for name in MADE_OF[key]} for state in (saved, now)))]
    files = [state.get("files", {}).get(key) for state in (saved, now)]
    if all(files) and (other := sorted(f for f in files[0] | files[1] if files[0].get(f) != files[1].get(f))):
        beyond = f" and {len(other) - NAMED} more" if len(other) > NAMED else ""
        words.append(f"not as they were: {', '.join(other[:NAMED])}{beyond}")
    return "; ".join(filter(None, words)) or "what it was made of is not as it was"


def _changes(before: dict[str, Any], after: dict[str, Any], known: str = "") -> str:
    """Return the settings that differ; of a nested object, the innermost.

    Args:
        known: one whose name the reader has already.
    """
    first, second = _leaves(before), _leaves(after)
    listed = []
    for name in first | second:
        if first.get(name) != second.get(name):
            was, now = (
                json.dumps(leaves[name], ensure_ascii=False, default=str) if name in leaves else "not given"
                for leaves in (first, second)
            )
            listed.append(f"{was}, now {now}" if name == known else f"`{name}` was {was}, now {now}")
    if len(listed) > NAMED:
        listed[NAMED:] = [f"and {len(listed) - NAMED} more"]
    return ", ".join(listed)


def _leaves(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested objects: {"params.lr": 0.1}; what is null is not given."""
    leaves: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            leaves |= _leaves(inner, f"{prefix}{key}.")
        elif inner is not None:
            leaves[f"{prefix}{key}"] = inner
    return leaves
