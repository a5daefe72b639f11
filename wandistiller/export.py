"""`wandistiller export`: a checkpoint -> a diffusers pipeline folder that opens without this package."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from wandistiller import checkpoint, wan
from wandistiller.batch import Expert
from wandistiller.config import ConfigError
from wandistiller.files import link_or_copy, write_json
from wandistiller.wan import WanFolder, open_wan

FACTS = "wandistiller.json"
CARD = """---
library_name: diffusers
pipeline_tag: text-to-video
---
# A Wan student distilled with wandistiller

Distilled from `{teacher_path}`: {layers} layers, {experts} expert(s), {parameters:.1f}M parameters,
{max_steps} steps of {objective}.

Guidance is folded in: sample with `guidance_scale=1.0`. Made for {height}x{width}, {num_frames} frame(s),
timestep shift {shift} (set in the scheduler).

```python
from diffusers import WanPipeline
pipe = WanPipeline.from_pretrained("THIS_FOLDER")
pipe("{prompt}", height={height}, width={width}, num_frames={num_frames}, guidance_scale=1.0).frames[0]
```
"""


def export(run_or_checkpoint: Path, target: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the student as a diffusers pipeline; `target` appears whole, an earlier one is replaced.

    Args:
        run_or_checkpoint: an output folder (its newest checkpoint is taken) or one checkpoint folder.
        dtype: of the stored weights, except those that diffusers keeps in float32.
    Raises:
        ConfigError: no checkpoint there.
    """
    source = _checkpoint(run_or_checkpoint)
    facts = checkpoint.read_state(source)["facts"]
    # .get: checkpoints made before `teacher_revision` have no such fact
    teacher = open_wan(facts["teacher_path"], weights=True, revision=facts.get("teacher_revision"))
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name in facts["experts"]:
        _write_transformer(source, Expert(name), facts["transformer"], temporary / name, dtype)
    for part in ("vae", "text_encoder", "tokenizer"):
        link_or_copy(teacher.path / part, temporary / part)
    _write_scheduler(teacher, facts["shift"], temporary / "scheduler")
    _write_index(teacher, facts, temporary)
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)
    return target


def _checkpoint(folder: Path) -> Path:
    found = folder if (folder / checkpoint.STATE).is_file() else checkpoint.find(folder, "auto")
    if found is None or not (found / checkpoint.STATE).is_file():
        raise ConfigError(f"{folder}: no checkpoint there. Name the --output_dir of a run, or one checkpoints/step_... folder.")
    return found


def _write_transformer(source: Path, expert: Expert, config: dict[str, Any], folder: Path, dtype: torch.dtype) -> None:
    model = wan.skeleton(config)
    for name, value in checkpoint.weights(source, expert).items():
        wan.put(model, name, value.to(wan.parameter_dtype(name, dtype)))
    model.save_pretrained(folder)


def _write_scheduler(teacher: WanFolder, shift: float, folder: Path) -> None:
    config = json.loads((teacher.path / "scheduler" / "scheduler_config.json").read_text())
    config["shift" if "shift" in config else "flow_shift"] = shift
    write_json(folder / "scheduler_config.json", config)


def _write_index(teacher: WanFolder, facts: dict[str, Any], folder: Path) -> None:
    index = json.loads((teacher.path / "model_index.json").read_text())
    if len(facts["experts"]) == 1:  # one network serves the whole path
        index |= {"transformer_2": [None, None], "boundary_ratio": None}
    write_json(folder / "model_index.json", index)
    parameters = wan.count_parameters(facts["transformer"]) * len(facts["experts"]) / 1e6
    layers, experts = facts["transformer"]["num_layers"], len(facts["experts"])
    card = CARD.format(**facts | {"experts": experts}, layers=layers, parameters=parameters, prompt="a red circle")
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_json(folder / FACTS, facts)
