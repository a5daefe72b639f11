"""The pipelines that are sampled and evaluated: a folder, or a run's student; LoRA files on them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from wandistiller.batch import Expert
from wandistiller.checkpoint.facts import Facts
from wandistiller.export.source import FACTS
from wandistiller.utils.errors import ConfigError, problem
from wandistiller.utils.files import read_json
from wandistiller.wan.added_lora import AddedLora, read_added
from wandistiller.wan.pipeline import TINY, WanFolder, open_wan, run_problem, student_of, with_loras


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A pipeline as the command line names it."""

    name: str | None
    """Its folder or hub id; None: the teacher that the LoRA files were made for."""
    files: list[tuple[str, str]]
    """The LoRA files: expert, if it is said, and name."""
    facts: Facts
    """Of the run that made it; defaults of a pipeline of others."""
    where: Path
    """The file that has these facts, or would have them."""
    strength: float = 1.0
    """Factor of what the LoRA files change."""

    @property
    def trained(self) -> Facts | None:
        """The facts of a student of few steps; None: it takes any number."""
        return self.facts if self.facts.few_steps else None

    @property
    def place(self) -> Path | None:
        """The folder beside which results are written; None: it is not on this machine."""
        given = Path(self.name) if self.name else self.where
        return given.parent if given.exists() else None

    def teacher(self, given: str | None = None) -> str:
        """Return the teacher's folder or hub id.

        Args:
            given: by the user.

        Raises:
            ConfigError: it is not known, or not where it was.
        """
        name = given or self.facts.teacher_path
        if not given and not self.where.is_file():
            raise ConfigError(
                f"{self.name}: no {FACTS} in it. Give a folder that `wandistiller export` or `train` "
                "wrote; of any other Wan pipeline say with --teacher_path what to compare it with."
            )
        if not name:
            remedy = "Say with --teacher_path what to compare it with; for `sample`, with --model."
            raise ConfigError(f"{self.where}: `teacher_path` is missing. {remedy}")
        if not given and "/" not in name and name not in TINY and not Path(name).exists():
            remedy = "Exports have only the folder's name; say with --teacher_path where it is."
            raise ConfigError(problem(self.where, "teacher_path", name, remedy))
        return name

    def folder(self, teacher: str | None = None) -> WanFolder:
        """Describe the pipeline with its LoRA files; no weight is read.

        Args:
            teacher: the name of the teacher, where it lies now.

        Raises:
            ConfigError: there is no such pipeline, or the files are not for it.
        """
        own = self.name or self.teacher(teacher)
        is_recorded = not self.name and own == self.facts.teacher_path
        folder = open_wan(own, revision=self.facts.teacher_revision if is_recorded else None)
        given = [
            {"file": file, "strength": self.strength} | _expert(said, file, folder)
            for said, file in self.files
        ]
        return with_loras(folder, read_added("command line", "lora", given))


def read_candidate(name: str | None, loras: Sequence[str] = (), strength: float = 1.0) -> Candidate:
    """Read what the command line names, and the facts of its run.

    Args:
        name: of a pipeline, or of a run's folder; None: what the LoRA files are for.
        loras: names of files or of runs' folders; `high_noise=` or `low_noise=` before it: for one expert.
        strength: of all of them.

    Raises:
        ConfigError: nothing is named, or a run that has no student yet.
    """
    if name and adapters_of(name):
        name, loras = None, [name, *loras]
    files = [file for word in loras for file in _files(word)]
    if not (name or files):
        raise ConfigError("command line: no pipeline is named. Give one, or a LoRA file with --lora.")
    if name:
        name = student_of(name)
        if of_run := run_problem(Path(name), name):
            raise ConfigError(of_run)
    made = [(Path(file), _facts_of_lora(Path(file))) for _, file in files]
    of_few_steps = [(file, facts) for file, facts in made if facts.few_steps]
    if name and not of_few_steps:
        where = Path(name) / FACTS
        facts = Facts.read(where)
    else:
        where, facts = (of_few_steps or made)[0]
    run = where.absolute().parents[1 if where.name == FACTS else 0] / "resolved" / "run.json"
    if facts.teacher_path and run.is_file():  # an export names only the last part of a folder
        recipe = read_json(run)
        kept = {key: recipe.get(key, getattr(facts, key)) for key in ("teacher_path", "teacher_lora")}
        facts = replace(facts, **kept)
    return Candidate(name=name, files=files, facts=facts, where=where, strength=strength)


def adapters_of(name: str) -> list[Path]:
    """List the LoRA files of a run of adapters, whose student is its teacher with them; else none."""
    folder = Path(name)
    if not (folder / "lora.card" / FACTS).is_file() or student_of(name) != name:
        return []
    return sorted(folder.glob("lora*.safetensors"))


def _files(word: str) -> list[tuple[str, str]]:
    """Return expert, if it is said, and name of the files that a word of --lora means."""
    expert, equals, name = word.rpartition("=")
    if equals and expert not in ("high_noise", "low_noise"):
        expert, name = "", word
    return [(expert, str(file)) for file in adapters_of(name) or [name]]


def _facts_of_lora(file: Path) -> Facts:
    """Return the facts in the header of a LoRA file; defaults of a file that others made."""
    try:
        with safe_open(file, "pt") as opened:
            return Facts.of(json.loads((opened.metadata() or {}).get("wandistiller", "{}")))
    except (OSError, SafetensorError, ValueError):
        return Facts()  # the reader of its weights has the message


def _expert(said: str, file: str, folder: WanFolder) -> dict[str, str]:
    """Return the expert of a LoRA: the one that is said, else the one in the file's name; of both none."""
    if said or len(folder.configs) == 1:
        return {"expert": said} if said else {}
    sides = {"high": "high_noise", "low": "low_noise"}
    named = [expert for side, expert in sides.items() if side in Path(file).stem.lower()]
    return {"expert": named[0]} if len(named) == 1 else {}


def lora_lines(added: Sequence[AddedLora]) -> list[str]:
    """Say which LoRA file is added to what."""
    where = {None: "each network"} | {e.name.lower(): f"the expert {e.name.lower()}" for e in Expert}
    return [f"lora      {one.file}, strength {one.strength:g}, on {where[one.expert]}" for one in added]
