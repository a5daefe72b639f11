"""The end of a run, from whose student another run starts: an earlier stage, or any run's folder."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandistiller.checkpoint import manifest, resume
from wandistiller.checkpoint.facts import Facts
from wandistiller.checkpoint.loading import STATE, read_state
from wandistiller.utils.files import digest, read_json

DONE = "DONE"
"""File in the output folder of a finished run, for programs that wait for it."""


@dataclass(frozen=True, slots=True)
class Start:
    """The float32 weights, or their average where there is one, after all steps of a run."""

    folder: Path
    """The run's output folder, or one of its checkpoints."""
    facts: Facts
    identity: str
    """Equal for two starts from the same weights."""
    history: list[str]
    """Objective and steps of that run and of those before it."""
    teacher: str = ""
    """Identity of its teacher's networks."""

    @property
    def experts(self) -> str:
        """`one` or `two`, as in a student JSON."""
        return "two" if len(self.facts.experts) > 1 else "one"

    @property
    def name(self) -> str:
        is_checkpoint = self.folder.parent.name == "checkpoints"
        return (self.folder.parents[1] if is_checkpoint else self.folder).name


def start_after(folder: Path, identity: dict[str, Any], facts: Facts, steps: int) -> Start:
    """Describe the student after `steps` steps of a run of that identity, with these facts."""
    history = [*(facts.before or []), f"{facts.objective}: {steps} steps"]
    return Start(folder, facts, digest(identity, steps), history, identity.get("teacher", ""))


def recorded_stages(output: Path) -> list[Path]:
    """List the folders of a recipe's stages, begun or not, in order; none if `output` is of one run."""
    file = output / "resolved" / "run.json"
    # not Path.is_file, which raises OSError of a long name (Python 3.11)
    stages = read_json(file).get("stages", []) if os.path.isfile(file) else []
    return [output / f"{number}_{stage['name']}" for number, stage in enumerate(stages, 1)]


def stage_folders(output: Path) -> list[Path]:
    """List the folders of a recipe's stages that are done or have a checkpoint, in order.

    None if `output` is of one run. One that is done may have lost its checkpoints: it is not passed over.
    """
    return [
        folder
        for folder in recorded_stages(output)
        if manifest.steps(folder / "checkpoints") or (folder / DONE).is_file()
    ]


def read_start(init: Any) -> Start | None:
    """Return the end of the run that `init` of a student JSON names; None if it names no run.

    Raises:
        ConfigError: the run has no checkpoint that can be used.
    """
    if not isinstance(init, str):
        return None
    folder = (stage_folders(Path(init)) or [Path(init)])[-1]
    if not any((folder / name).exists() for name in (STATE, "checkpoints")):
        return None
    checkpoint = folder if (folder / STATE).is_file() else resume.find(folder, "auto")
    if not checkpoint:
        return None
    state = read_state(checkpoint)
    return start_after(folder, state["identity"], Facts.of(state["facts"]), state["step"])
