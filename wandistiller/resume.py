"""Which checkpoint a run goes on from: the newest that is whole, of the same run."""

from pathlib import Path
from typing import Any

from wandistiller import distributed, manifest
from wandistiller.checkpoint import STATE, read_state
from wandistiller.data import CachedData
from wandistiller.phase import doing
from wandistiller.problems import ConfigError

CHANGEABLE = ("optimizer", "scheduler", "gradient_clipping", "precision", "learning_rates", "ema", "ema_start", "guidance",
              "objective", "data", "cache", "teacher", "seed", "shift", "train_batch_size", "expert_blocks")  # fmt: skip
"""Keys of a run's identity that a checkpoint may go on without; the others say what its weights are."""

NONE_GOOD = "{}: none of its checkpoints can be used. `--resume never` starts anew and keeps them."


def candidates(output: Path, resume: str) -> list[Path]:
    """The checkpoints that `resume` (auto, never, or a folder) could mean, the best first; none to start anew.

    Raises:
        ConfigError: a folder was named that is no checkpoint, or there are some and none can be used.
    """
    if resume == "never":
        return []
    if resume != "auto":
        if not (Path(resume) / STATE).is_file():
            raise ConfigError(f"--resume {resume}: no checkpoint there. Name a folder checkpoints/step_..., auto or never.")
        if found := manifest.faults(Path(resume)):
            raise ConfigError(f"--resume {resume}: {'; '.join(found)}. Name another checkpoint, or auto for the newest good one.")
        return [Path(resume)]
    there = manifest.steps(output / "checkpoints")
    good = [folder for folder in there if not manifest.faults(folder)]
    if there and not good:
        raise ConfigError(*(f"{f}: {'; '.join(manifest.faults(f))}." for f in there), NONE_GOOD.format(output))
    return good


def find(output: Path, resume: str) -> Path | None:
    """The first of `candidates`."""
    return next(iter(candidates(output, resume)), None)


def verified(output: Path, resume: str) -> Path | None:
    """The newest checkpoint whose every byte is as it was written; says which were skipped and why. Collective.

    Raises:
        ConfigError: on all ranks; none is.
    """
    doing("checking the checkpoint")
    share = (distributed.rank(), distributed.world_size())
    if resume == "auto" and distributed.rank() == 0:
        for folder in manifest.steps(output / "checkpoints"):
            if found := manifest.faults(folder):
                distributed.log0("skipped   %s: %s", folder, "; ".join(found))
    bad: list[str] = []
    for folder in distributed.from_rank_0(candidates(output, resume)):
        found = [f for theirs in distributed.gather_objects(manifest.faults(folder, share=share)) for f in theirs]
        if not found:
            return folder
        bad.append(f"{folder}: {'; '.join(found)}.")
        distributed.log0("skipped   %s", bad[-1])
    if bad:
        raise ConfigError(*bad, NONE_GOOD.format(output))
    return None


def changed_keys(folder: Path, identity: dict[str, Any], allowed: list[str]) -> set[str]:
    """The keys in which a checkpoint's run differs from this one.

    Args:
        allowed: keys that may differ.
    Raises:
        ConfigError: others do; names every difference.
    """
    saved = read_state(folder)["identity"]
    differ = {k for k in identity | saved if saved.get(k) != identity.get(k)}
    if wrong := sorted(differ - set(allowed)):
        raise ConfigError(*(_difference(folder, k, saved.get(k), identity.get(k)) for k in wrong))
    return differ


def check_cache(folder: Path, cache: Path, data: CachedData, allowed: list[str]) -> None:
    """Compare some samples with what the checkpoint's run learned from. Collective.

    Raises:
        ConfigError: on all ranks; they hold other numbers, and "cache" is not `allowed` to differ.
    """
    saved = read_state(folder).get("cache", {})
    now = data.stamps(saved)
    if "cache" not in allowed and (other := [name for name in now if now[name] != saved[name]]):
        raise ConfigError(f"{cache}: {len(other)} of {len(now)} samples looked at hold other numbers than those that {folder} "
                          "learned from: the cache was changed, or made anew where numbers come out otherwise. Bring the old "
                          "one back, --allow_changed cache to go on all the same, or --resume never to start anew.")  # fmt: skip


def _difference(folder: Path, key: str, saved: object, now: object) -> str:
    remedy = f", or --allow_changed {key} to go on all the same" if key in CHANGEABLE else ""
    return (f"{folder}: holds a run with another {key}: {saved!r}, now {now!r}. Give another --output_dir, --resume never to "
            f"start anew{remedy}.")  # fmt: skip
