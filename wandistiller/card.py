"""The model card of an export: what it is, of what it was made, how good it is, how to run it, under which licence."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load

from wandistiller import wan
from wandistiller.files import write_json
from wandistiller.pictures import drawn
from wandistiller.wan import WanFolder

FACTS = "wandistiller.json"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB = "https://huggingface.co"
PICTURE = "samples.png"
MADE_FOR = """Guidance is folded in: sample with `guidance_scale=1.0` (CFG 1), which takes half the calls. Made for
{height}x{width}, {num_frames} frame(s), {steps} steps, timestep shift {shift}."""
MADE = """Distilled from `{teacher_path}`: {layers} layers, {n_experts} expert(s), {parameters:.1f}M parameters, {max_steps}
steps of {objective}. """ + MADE_FOR
PIPELINE = """# A Wan student distilled with wandistiller

{made}

```python
import torch
from diffusers import WanPipeline
pipe = WanPipeline.from_pretrained("{where}", torch_dtype=torch.bfloat16)
pipe("a red circle", height={height}, width={width}, num_frames={num_frames}, num_inference_steps={steps},
     guidance_scale=1.0).frames[0]
```
"""
ORIGINAL = """# A Wan student distilled with wandistiller, in the original Wan's names

{made}

For ComfyUI put {names} into `models/diffusion_models`; text encoder and VAE are the teacher's.
"""
EIGHT_BITS = """
The matrices of the blocks are in eight bits with a scale each, marked by `.comfy_quant`: only a ComfyUI that knows such layers
reads them right.
"""
SINGLE_FILE = """
diffusers reads such a file too. Without `config` it takes that of a published Wan, which does not fit a student of another shape:

```python
from diffusers import WanTransformer3DModel
{calls}
```

They open in float32; `torch_dtype=torch.bfloat16` takes half the memory, and rounds the few weights too that are kept in float32.
"""
ADAPTER = """# A Wan LoRA distilled with wandistiller

For the network {base}, {layers} layers. {rank}. {made_for}

```python
{calls}
```
"""


class About(NamedTuple):
    """What a card tells of."""

    teacher: WanFolder | None
    """None where it is not here any more."""
    facts: dict[str, Any]
    recipe: dict[str, Any]
    """What really ran."""
    run: Path
    """Its output folder."""
    repository: str
    """Where it goes on the hub; empty: nowhere."""

    @property
    def where(self) -> str:
        return self.repository or "THIS_FOLDER"

    @property
    def made(self) -> str:
        """What the student is, in words."""
        config, experts = self.facts["transformer"], len(self.facts["experts"])
        parameters = wan.count_parameters(config) * experts / 1e6
        return MADE.format(**self.facts | {"layers": config["num_layers"], "n_experts": experts, "parameters": parameters})

    def file(self, name: str) -> str:
        """One of its files, as from_single_file takes it."""
        return f"{HUB}/{self.repository}/blob/main/{name}" if self.repository else name


def write_pipeline_card(folder: Path, about: About) -> None:
    """Write README.md of a pipeline."""
    _write(folder, about, "finetune", PIPELINE.format(**about.facts | {"made": about.made, "where": about.where}))


def write_original_card(folder: Path, about: About, files: list[str], eight_bits: bool) -> None:
    """Write README.md of a student in original-Wan files, and the config.json with which diffusers reads them."""
    wan.skeleton(about.facts["transformer"]).save_config(folder)
    calls = [f'{name} = WanTransformer3DModel.from_single_file("{about.file(file)}", config="{about.where}")'
             for name, file in zip(about.facts["experts"], files, strict=True)]  # fmt: skip
    more = EIGHT_BITS if eight_bits else SINGLE_FILE.format(calls="\n".join(calls))
    _write(folder, about, "finetune", ORIGINAL.format(made=about.made, names=_listed(files)) + more)


def write_adapter_card(folder: Path, about: About, rank: str, files: list[str], comfy: bool) -> None:
    """Write README.md of a LoRA; `files` holds one an expert, `rank` says of what rank they are."""
    facts = about.facts
    second = ["", ", load_into_transformer_2=True"]
    calls = [f'pipe.load_lora_weights("{about.where}", weight_name="{file}"{more})'
             for file, more in zip(files, second, strict=False)]  # fmt: skip
    text = ADAPTER.format(base=f"`{facts['teacher_path'] if facts['init'] == 'teacher' else facts['init']}`",
                          layers=facts["transformer"]["num_layers"], rank=rank, made_for=MADE_FOR.format(**facts),
                          calls="\n".join(calls))  # fmt: skip
    _write(folder, about, "adapter", text + (f"\nFor ComfyUI put {_listed(files)} into `models/loras`.\n" if comfy else ""))


def _listed(files: list[str]) -> str:
    return " and ".join(f"`{file}`" for file in files)


def _write(folder: Path, about: About, relation: str, text: str) -> None:
    """Write README.md with its front matter, `text`, and what the run has left of pictures, of an evaluation, and its recipe."""
    text = f"---\n{front(about, relation)}\n---\n{text}"
    if pictures := drawn(about.run):
        shutil.copyfile(pictures[-1], folder / PICTURE)
        text += f"\nAbove the teacher, below the student, from the same noise:\n\n![samples]({PICTURE})\n"
    if tables := _evaluation(about.run):
        text += f"\n## How near it is to its teacher\n\nMeasured on the student as a diffusers pipeline.\n\n{tables}\n"
    shown = json.dumps(about.recipe, indent=1, ensure_ascii=False)
    text += f"\n## How it was made\n\n<details><summary>the recipe</summary>\n\n```json\n{shown}\n```\n\n</details>\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
    write_json(folder / FACTS, about.facts)


def front(about: About, relation: str) -> str:
    """The front matter, as the hub wants it: https://github.com/huggingface/hub-docs/blob/main/modelcard.md.

    Args:
        relation: to the base model: finetune, adapter.
    """
    named = about.facts["teacher_path"]
    of_hub = named if HUB_ID.fullmatch(named) and not Path(named).exists() else ""
    base = {"base_model": [of_hub], "base_model_relation": relation} if of_hub else {}
    return ModelCardData(library_name="diffusers", pipeline_tag="text-to-video", tags=["wan", "distillation"],
                         **licence(about.teacher, of_hub), **base).to_yaml()  # fmt: skip


def licence(teacher: WanFolder | None, of_hub: str) -> dict[str, str]:
    """That of the teacher's own card; of a teacher without one, that there is one of another's making.

    Args:
        of_hub: the teacher's hub id, or empty.
    """
    if teacher and teacher.is_tiny:
        return {"license": "apache-2.0"}  # as all that comes with this package
    said = _front_matter(teacher.path / "README.md") if teacher else {}
    if not isinstance(said.get("license"), str):
        link = {"license_link": f"{HUB}/{of_hub}"} if of_hub else {}
        return {"license": "other", "license_name": "as-the-teacher", **link}
    found = {key: said[key] for key in ("license", "license_name", "license_link") if isinstance(said.get(key), str)}
    if of_hub and "://" not in (link := found.get("license_link", "://")):
        found["license_link"] = f"{HUB}/{of_hub}/blob/main/{link}"
    return found


def _front_matter(card: Path) -> dict[str, Any]:
    try:
        return card.is_file() and metadata_load(card) or {}
    except (ValueError, yaml.YAMLError):  # somebody else's mistake
        return {}


def _evaluation(run: Path) -> str:
    """The tables of OUTPUT/evaluation.md, if `evaluate` was there."""
    file = run / "evaluation.md"
    blocks = file.read_text(encoding="utf-8").split("\n\n") if file.is_file() else []
    return "\n\n".join(block for block in blocks if block.startswith("|"))
