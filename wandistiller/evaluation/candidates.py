"""Inputs of `sample` and `evaluate`: a pipeline or a run's student, with LoRA files; the items it draws."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from wandistiller.checkpoint.facts import Facts
from wandistiller.data.colours import WHITE, background_of
from wandistiller.data.conditions import given_frames, given_problems
from wandistiller.data.dataset import EMBEDDED, FIRST_FRAMES, PromptItem, read_dataset
from wandistiller.data.lines import LISTS, prompt_problems
from wandistiller.data.media import CROP, MediaError, MediaReader, Size
from wandistiller.data.tensor_cache import Sample
from wandistiller.experts import Expert
from wandistiller.network.folder import Folder
from wandistiller.network.names import SECOND_TIME
from wandistiller.utils.errors import ConfigError, Place, problem
from wandistiller.utils.files import FACTS, read_json
from wandistiller.wan import added_lora
from wandistiller.wan.lora_experts import adapters_of, facts_beside, facts_of
from wandistiller.wan.pipeline import open_wan, run_problem, student_of


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A pipeline as the command line names it."""

    name: str | None
    """Its folder or hub id; None: the teacher that the LoRA files were made for."""
    added: list[added_lora.AddedLora]
    """The LoRA files, as they are named."""
    facts: Facts
    """Of the run that made it; defaults of a pipeline of others."""
    where: Path
    """The file that has these facts, or would have them."""
    named_teacher: str | None
    """The teacher's folder or hub id, where the user says where it is."""

    @property
    def weights(self) -> str | None:
        """The format of the teacher's weights beside which LoRA files were trained; None: not quantised."""
        return self.facts.teacher_weights if self.added and self.facts.bases else None

    @property
    def place(self) -> Path | None:
        """The folder beside which results are written; None: it is not on this machine."""
        path = Path(self.name) if self.name else self.where
        return path.parent if path.exists() else None

    @property
    def teacher(self) -> str:
        """The teacher's folder or hub id.

        Raises:
            ConfigError: it is not known, or not where it was.
        """
        if self.named_teacher:
            return self.named_teacher
        name = self.facts.teacher_path
        if not name:
            remedy = "Say with --teacher_path what to compare it with; for `sample`, with --model."
            raise ConfigError(f"{self.where}: `teacher_path` is missing. {remedy}")
        if self.facts.teacher_is_away:
            remedy = (
                "No such folder is here: say with --teacher_path where it is (`sample`: --model), or start "
                "in the folder that the run was started in."
            )
            raise ConfigError(problem(self.where, "teacher_path", name, remedy))
        return name

    @property
    def teacher_revision(self) -> str | None:
        """The commit of the teacher; None: it is a folder, or another than the recorded one."""
        return self.facts.teacher_revision if self.teacher == self.facts.teacher_path else None

    @cached_property
    def folder(self) -> Folder:
        """The pipeline with its LoRA files; no weight is read.

        Raises:
            ConfigError: there is no such pipeline, or the files are not for it.
        """
        folder = open_wan(self.name) if self.name else open_wan(self.teacher, revision=self.teacher_revision)
        folder = folder.with_first_frames() if self.facts.image_to_video else folder
        if alone := self._alone(folder):
            folder = replace(folder, configs={alone: folder.configs[alone]}, boundary=None)
        where = Place("command line", "lora")
        folder = folder.with_loras(added_lora.with_experts(where, self.added, folder.configs))
        if self.facts.is_flow_map and not folder.config.has_second_time:
            remedy = "A step would not know where it ends. Export the run again, and give the file as it is."
            raise ConfigError(f"{self.where}: is of a flow map, and lacks its `{SECOND_TIME}`. {remedy}")
        return folder

    @property
    def lines(self) -> list[str]:
        """Say what is added to the pipeline, and if that is a teacher that has changed since."""
        changed = self.facts.changed_teacher(self.folder) if self.added else []
        return [*changed, *self.folder.added_lines]

    def _alone(self, folder: Folder) -> Expert | None:
        """Return the only one of the teacher's two networks that a LoRA file's student uses; None: both."""
        for lora in self.added if len(folder.configs) == 2 else ():
            made = Facts.of(facts_of(Path(lora.file)))
            is_its_teacher = not self.name or Path(self.name).name == Path(made.teacher_path).name
            bases = made.bases or []
            is_clear = is_its_teacher or bases == [Expert.LOW_NOISE.value]
            if is_clear and not lora.expert and len(bases) == 1:
                return Expert(bases[0])
        return None


def read_candidate(
    name: str | None, loras: Sequence[str] = (), strength: float = 1.0, teacher: str | None = None
) -> Candidate:
    """Read what the command line names, and the facts of its run.

    Args:
        name: of a pipeline, or of a run's folder; None: what the LoRA files are for.
        loras: names of files, or of folders; `high_noise=`, `low_noise=` or `both=` before it: for that.
        strength: of all of them.
        teacher: the teacher's folder or hub id, where the user says where it is.

    Raises:
        ConfigError: nothing is named, one file, or a run that has no student yet.
    """
    if name and name.endswith(".safetensors") and os.path.isfile(name):
        raise ConfigError(
            f"{name}: is one file, not a pipeline. Give a LoRA by --lora; of a whole network give "
            "the folder that `wandistiller export` writes with --format diffusers."
        )
    if name and adapters_of(Path(name)):
        name, loras = None, [name, *loras]
    added = added_lora.each_file(
        added_lora.read_added("command line", "lora", [{"file": f, "strength": strength} for f in loras])
    )
    if not (name or added):
        raise ConfigError("command line: no pipeline is named. Give one, or a LoRA file with --lora.")
    if name:
        name = student_of(name)
        if of_run := run_problem(Path(name), name):
            raise ConfigError(of_run)
    made = [(facts_beside(file), Facts.of(facts_of(file))) for file in (Path(lora.file) for lora in added)]
    for file, facts in () if name else made:  # on its teacher, which is taken
        if facts.lora and not facts.bases:
            base = facts.lora_base or f"a student of {facts.config.num_layers} layers"
            raise ConfigError(
                f"{file}: its adapters are for {base}, not for {facts.teacher_path}, and no pipeline is "
                "named. Give that one: `sample` with --model, `evaluate` with --student."
            )
    of_few_steps = [(file, facts) for file, facts in made if facts.few_steps]
    if name and not of_few_steps:
        where = (Path(name) if Path(name).exists() else open_wan(name).path) / FACTS
        facts = Facts.read(where)
    else:
        where, facts = (of_few_steps or made)[0]
    facts = _with_places(facts, where.absolute().parents[1 if where.name == FACTS else 0])
    return Candidate(name=name, added=added, facts=facts, where=where, named_teacher=teacher)


def _with_places(facts: Facts, output: Path) -> Facts:
    """Return the facts of an export with the places that its run's output folder has.

    An export names only the last part of a folder or file.
    """
    run = output / "resolved" / "run.json"
    recipe = read_json(run) if run.is_file() else {}
    if not facts.teacher_path or Path(recipe.get("teacher_path", "")).name != Path(facts.teacher_path).name:
        return facts
    added = added_lora.read_added(f"{run}", "teacher_lora", recipe.get("teacher_lora") or [])
    return replace(
        facts, teacher_path=recipe["teacher_path"], teacher_lora=added_lora.as_settings(added) or None
    )


def read_items(
    words: list[str], images: Sequence[str] = (), last_images: Sequence[str] = ()
) -> list[PromptItem]:
    """Return texts as they are, or the rows of one file, folder or embedded set.

    Args:
        images: the first frame of each clip, or of all.
        last_images: the same of the last frame.
    """
    first = os.path.expanduser(words[0])  # no shell does it in `--prompts=~/x`
    is_path = "/" in first and not any(letter.isspace() for letter in first)  # be it there or not
    # not Path.exists, which raises OSError of a long text (Python 3.11)
    is_path = is_path or first.lower().endswith(LISTS) or os.path.lexists(first)
    if len(words) == 1 and (is_path or first in {*EMBEDDED, *FIRST_FRAMES}):
        items = list(read_dataset(first, first_frames=True))
    elif problems := prompt_problems("command line", "prompts", words):
        raise ConfigError(*problems)
    else:
        items = [PromptItem(word) for word in words]
    first = _of_each("image", images, len(items))
    last = _of_each("last_image", last_images, len(items))
    if any(last) and not any(first):
        raise ConfigError(problem("command line", "last_image", last_images[0], "Give `image` too."))
    if not any(first):
        return items
    if there := next((item.begins_with for item in items if item.begins_with), None):
        remedy = f"{words[0]} has images of its own, such as {there}. Leave this out, or give prompts alone."
        raise ConfigError(problem("command line", "image", images[0], remedy))
    return [PromptItem(i.prompt, None, *ends) for i, *ends in zip(items, first, last, strict=True)]


def _of_each(key: str, images: Sequence[str], number: int) -> list[Path | None]:
    """Return the files of a flag for a number of prompts; None for each if there are none."""
    files = [Path(os.path.expanduser(image)) for image in images]
    if missing := [file for file in files if not file.is_file()]:
        raise ConfigError(f"command line: `{key}`: no such file: {missing[0]}. Fix the name.")
    if files and len(files) not in (1, number):
        numbers = f"{len(files)} images for {number} prompts"
        raise ConfigError(problem("command line", key, numbers, "Give one of each, or one of all."))
    return files if len(files) == number else (files or [None]) * number


def image_problems(folder: Folder, items: list[PromptItem], *, by_flag: bool = False) -> list[str]:
    """List the problem of first frames that a pipeline needs, or does not take where given `by_flag`."""
    if not folder.config.takes_image:
        remedy = "It makes clips of text alone; leave it out."
        return [problem(folder.name, "image", "given", remedy)] if by_flag else []
    return given_problems(folder, items)


def reader_of(facts: Facts, folder: Folder) -> MediaReader:
    """Return how given frames are read: as in the run that made a model, else cropped, over white."""
    background = background_of(facts.background) if facts.background else WHITE
    return MediaReader(facts.video_fps or float(folder.fps), background, facts.fit or CROP)


def frame_problems(folder: Folder, reader: MediaReader, items: list[PromptItem], size: Size) -> list[str]:
    """List the images and videos whose given frames cannot be used, with the reasons; all are read."""
    problems = []
    for item in items if folder.config.takes_image else []:
        try:
            given_frames(folder, reader, Sample(item, size))
        except MediaError as error:
            problems.append(f"{item.begins_with}: {error}.")
    return problems
