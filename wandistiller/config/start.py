"""The end of a run, from whose student another run starts: an earlier stage, or any run's folder."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandistiller.checkpoint import manifest, resume
from wandistiller.checkpoint.facts import Facts
from wandistiller.checkpoint.loading import STATE, read_state
from wandistiller.utils.files import digest, read_json
from wandistiller.wan.transformer_config import TransformerConfig

DONE = "DONE"
"""File in the output folder of a finished run, for programs that wait for it."""


@dataclass(frozen=True, slots=True)
class Start:
    """The float32 weights, or their average where there is one, after all steps of a run."""

    folder: Path
    """The run's output folder, or one of its checkpoints."""
    transformer: TransformerConfig
    """The student's full config."""
    experts: str
    """`one` or `two`."""
    identity: str
    """Equal for two starts from the same weights."""
    history: list[str]
    """Objective and steps of that run and of those before it."""
    teacher: str = ""
    """Folder or hub id of that run's teacher."""
    lora: dict[str, Any] | None = None
    """The recipe key, if it trained adapters."""
    bases: list[str] = field(default_factory=list)
    """Folder names of the teacher's networks that these adapters are for; empty: of networks of its own."""
    teacher_lora: list[dict[str, Any]] = field(default_factory=list)
    """LoRA files that were added to that teacher."""

    @property
    def name(self) -> str:
        is_checkpoint = self.folder.parent.name == "checkpoints"
        return (self.folder.parents[1] if is_checkpoint else self.folder).name


def start_after(
    folder: Path, transformer: TransformerConfig, experts: str, identity: dict, facts: Facts, steps: int
) -> Start:
    """Describe the student after `steps` steps of a run of that identity, with these facts."""
    history = [*(facts.before or []), f"{facts.objective}: {steps} steps"]
    adapters = facts.lora, facts.bases or [], facts.teacher_lora or []
    return Start(
        folder, transformer, experts, digest(identity, steps), history, facts.teacher_path, *adapters
    )


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
    found = folder if (folder / STATE).is_file() else resume.find(folder, "auto")
    if not found:
        return None
    state = read_state(found)
    facts = Facts.of(state["facts"])
    experts = "two" if len(facts.experts) > 1 else "one"
    return start_after(folder, facts.config, experts, state["identity"], facts, state["step"])
