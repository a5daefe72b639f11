"""The model card of an export: what it is, of what it was made, how good it is, how to run it, under which licence."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from wandistiller import wan
from wandistiller.files import write_json
from wandistiller.pictures import drawn
from wandistiller.wan import WanFolder

FACTS = "wandistiller.json"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
PICTURE = "samples.png"
LICENCE = re.compile(r"^license:\s*(\S+)\s*$", re.MULTILINE)
FRONT = """---
library_name: diffusers
pipeline_tag: text-to-video
{more}tags:
- wan
- distillation
---
"""
PIPELINE = FRONT + """# A Wan student distilled with wandistiller

Distilled from `{teacher_path}`: {layers} layers, {n_experts} expert(s), {parameters:.1f}M parameters, {max_steps} steps of
{objective}. Guidance is folded in: sample with `guidance_scale=1.0`, which takes half the calls. Made for {height}x{width},
{num_frames} frame(s), {steps} steps, timestep shift {shift} (set in the scheduler).

```python
import torch
from diffusers import WanPipeline
pipe = WanPipeline.from_pretrained("THIS_FOLDER", torch_dtype=torch.bfloat16)
pipe("a red circle", height={height}, width={width}, num_frames={num_frames}, num_inference_steps={steps},
     guidance_scale=1.0).frames[0]
```
"""
ADAPTER = FRONT + """# A Wan LoRA distilled with wandistiller

For the network {base}, {layers} layers. {rank}. Guidance is folded in: sample with `guidance_scale=1.0`, at timestep shift
{shift}.

```python
pipe.load_lora_weights("THIS_FOLDER")
{second}```
"""


def front(teacher: WanFolder, facts: dict[str, Any]) -> str:
    """The lines of the front matter that depend on the teacher: those of its own card where it has one."""
    card = teacher.path / "README.md"
    said = LICENCE.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    named = facts["teacher_path"]
    lines = [f"license: {said[1]}"] if said else []
    if HUB_ID.fullmatch(named) and not Path(named).exists():
        lines += ["base_model:", f"- {named}", "base_model_relation: finetune"]
    return "".join(f"{line}\n" for line in lines)


def write_card(folder: Path, teacher: WanFolder, facts: dict[str, Any], recipe: dict[str, Any], run: Path) -> None:
    """Write README.md of a pipeline, with what the run has left of pictures and of an evaluation.

    Args:
        recipe: what really ran.
        run: its output folder.
    """
    config, experts = facts["transformer"], facts["experts"]
    numbers = {"layers": config["num_layers"], "n_experts": len(experts), "more": front(teacher, facts),
               "parameters": wan.count_parameters(config) * len(experts) / 1e6}  # fmt: skip
    text = PIPELINE.format(**facts | numbers)
    pictures = drawn(run)
    if pictures:
        shutil.copyfile(pictures[-1], folder / PICTURE)
        text += f"\nAbove the teacher, below the student, from the same noise:\n\n![samples]({PICTURE})\n"
    if tables := _evaluation(run):
        text += f"\n## How near it is to its teacher\n\n{tables}\n"
    shown = json.dumps(recipe, indent=1, ensure_ascii=False)
    text += f"\n## How it was made\n\n<details><summary>the recipe</summary>\n\n```json\n{shown}\n```\n\n</details>\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
    write_json(folder / FACTS, facts)


def _evaluation(run: Path) -> str:
    """The tables of OUTPUT/evaluation.md, if `evaluate` was there."""
    file = run / "evaluation.md"
    blocks = file.read_text(encoding="utf-8").split("\n\n") if file.is_file() else []
    return "\n\n".join(block for block in blocks if block.startswith("|"))


def write_adapter_card(folder: Path, teacher: WanFolder, facts: dict[str, Any], rank: str, second: str) -> None:
    """Write README.md of a LoRA; `second` is the name of the second expert's file, or empty."""
    base = f"`{facts['teacher_path']}`" if facts["init"] == "teacher" else f"`{facts['init']}`"
    load = f'pipe.load_lora_weights("THIS_FOLDER", weight_name="{second}", load_into_transformer_2=True)\n' if second else ""
    more = front(teacher, facts).replace("finetune", "adapter")
    card = ADAPTER.format(base=base, layers=facts["transformer"]["num_layers"], shift=facts["shift"], second=load, rank=rank,
                          more=more)  # fmt: skip
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_json(folder / FACTS, facts)
