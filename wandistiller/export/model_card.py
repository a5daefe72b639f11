"""The model card of an export; each format adds its own text."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load

from wandistiller.utils.files import write_json
from wandistiller.utils.images import drawn
from wandistiller.wan import transformer
from wandistiller.wan.pipeline import WanFolder

FACTS = "wandistiller.json"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB = "https://huggingface.co"
PICTURE = "samples.png"
MADE_FOR = """Guidance is folded in: sample with `guidance_scale=1.0` (CFG 1), which takes half the calls. \
Made for
{height}x{width}, {num_frames} frame(s), {steps} steps, timestep shift {shift}."""
MADE = (
    """Distilled from `{teacher_path}`: {layers} layers, {n_experts} expert(s), {parameters:.1f}M \
parameters, {max_steps}
steps of {objective}. """
    + MADE_FOR
)


class CardContext(NamedTuple):
    """Contents of a card."""

    teacher: WanFolder | None
    """None if it is gone."""
    facts: dict[str, Any]
    recipe: dict[str, Any]
    """The run's settings as they were used."""
    run: Path
    """The run's output folder."""
    repository: str
    """Repository on the hub; empty: none."""

    @property
    def where(self) -> str:
        """Argument of `from_pretrained`."""
        return self.repository or "THIS_FOLDER"

    @property
    def made(self) -> str:
        """The student in one sentence."""
        config, experts = self.facts["transformer"], len(self.facts["experts"])
        parameters = transformer.count_parameters(config) * experts / 1e6
        return MADE.format(
            **self.facts | {"layers": config["num_layers"], "n_experts": experts, "parameters": parameters}
        )

    def file(self, name: str) -> str:
        """The path of a file for from_single_file."""
        return f"{HUB}/{self.repository}/blob/main/{name}" if self.repository else name


def joined(files: list[str]) -> str:
    """File names in a sentence."""
    return " and ".join(f"`{file}`" for file in files)


def write_card(folder: Path, context: CardContext, relation: str, text: str) -> None:
    """Write README.md (front matter, `text`, last picture, evaluation, recipe) and the facts as JSON.

    Args:
        relation: to the base model: finetune, adapter.
    """
    text = f"---\n{_front_matter(context, relation)}\n---\n{text}"
    if pictures := drawn(context.run):
        shutil.copyfile(pictures[-1], folder / PICTURE)
        text += f"\nAbove the teacher, below the student, from the same noise:\n\n![samples]({PICTURE})\n"
    if tables := _evaluation(context.run):
        measured = "Measured on the student as a diffusers pipeline."
        text += f"\n## How near it is to its teacher\n\n{measured}\n\n{tables}\n"
    recipe = json.dumps(context.recipe, indent=1, ensure_ascii=False)
    details = f"<details><summary>the recipe</summary>\n\n```json\n{recipe}\n```\n\n</details>"
    text += f"\n## How it was made\n\n{details}\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
    write_json(folder / FACTS, context.facts)


def _front_matter(context: CardContext, relation: str) -> str:
    """The metadata of the hub's cards: https://github.com/huggingface/hub-docs/blob/main/modelcard.md."""
    named = context.facts["teacher_path"]
    hub_id = named if HUB_ID.fullmatch(named) and not Path(named).exists() else ""
    base = {"base_model": [hub_id], "base_model_relation": relation} if hub_id else {}
    return ModelCardData(
        library_name="diffusers",
        pipeline_tag="text-to-video",
        tags=["wan", "distillation"],
        **licence(context.teacher, hub_id),
        **base,
    ).to_yaml()


def licence(teacher: WanFolder | None, hub_id: str) -> dict[str, str]:
    """The licence on the teacher's own card; without one, `other`, by the name `as-the-teacher`.

    Args:
        hub_id: the teacher's, or empty.
    """
    if teacher and teacher.is_tiny:
        return {"license": "apache-2.0"}  # as all that comes with this package
    card = _read_front_matter(teacher.path / "README.md") if teacher else {}
    keys = ("license", "license_name", "license_link")
    known = {key: card[key] for key in keys if isinstance(card.get(key), str)}
    if "license" not in known:
        link = {"license_link": f"{HUB}/{hub_id}"} if hub_id else {}
        return {"license": "other", "license_name": "as-the-teacher", **link}
    if hub_id and "://" not in (link := known.get("license_link", "://")):
        known["license_link"] = f"{HUB}/{hub_id}/blob/main/{link}"
    return known


def _read_front_matter(card: Path) -> dict[str, Any]:
    try:
        return card.is_file() and metadata_load(card) or {}
    except (ValueError, yaml.YAMLError):  # a mistake in the teacher's card
        return {}


def _evaluation(run: Path) -> str:
    """The tables of OUTPUT/evaluation.md, if `evaluate` has run."""
    file = run / "evaluation.md"
    blocks = file.read_text(encoding="utf-8").split("\n\n") if file.is_file() else []
    return "\n\n".join(block for block in blocks if block.startswith("|"))
