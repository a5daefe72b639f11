"""`wandistiller export`: a checkpoint -> a diffusers pipeline folder that opens without this package."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline, WanTransformer3DModel

from wandistiller import checkpoint, manifest, wan
from wandistiller.batch import Expert
from wandistiller.blocks import PROJECTIONS
from wandistiller.files import link_or_copy, write_json
from wandistiller.problems import ConfigError, folder_problems, readable
from wandistiller.resume import find, read_state
from wandistiller.tuning import Lora, adapter_state, add_lora
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


ADAPTER_CARD = """---
library_name: diffusers
---
# A Wan LoRA distilled with wandistiller

For the network that it was trained beside: {base}, {layers} layers. Guidance is folded in: sample with
`guidance_scale=1.0`, at timestep shift {shift}.

```python
pipe.load_lora_weights("THIS_FOLDER")
{second}```
"""
SECOND = "pytorch_lora_weights_2.safetensors"


def export(
    run_or_checkpoint: Path, target: Path, dtype: torch.dtype = torch.bfloat16, averaged: bool | None = None
) -> Path:
    """Write the student as a diffusers pipeline; `target` appears whole, an earlier one is replaced.

    Args:
        run_or_checkpoint: an output folder (its newest checkpoint is taken) or one checkpoint folder.
        dtype: of the stored weights, except those that diffusers keeps in float32.
        averaged: the moving average of the weights, or the last ones; None: the average where there is one.
    Raises:
        ConfigError: no checkpoint there, or no average in it.
    """
    source, facts = _read(run_or_checkpoint, averaged)
    _refuse_foreign(target)
    # .get: checkpoints made before `teacher_revision` have no such fact
    teacher = open_wan(facts["teacher_path"], weights=True, revision=facts.get("teacher_revision"))
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name in facts["experts"]:
        model = _network(source, Expert(name), facts)
        if facts.get("lora"):
            model.fuse_lora()
            model.unload_lora()
        for parameter, value in list(model.named_parameters()):
            wan.put(model, parameter, value.to(wan.parameter_dtype(parameter, dtype)))
        model.save_pretrained(temporary / name)
    for part in ("vae", "text_encoder", "tokenizer"):
        link_or_copy(teacher.path / part, temporary / part)
    _write_scheduler(teacher, facts["shift"], temporary / "scheduler")
    _write_index(teacher, facts, temporary)
    return _put_in_place(temporary, target)


def export_adapter(
    run_or_checkpoint: Path, target: Path, dtype: torch.dtype = torch.bfloat16, averaged: bool | None = None
) -> Path:
    """Write the LoRA alone, as WanPipeline.load_lora_weights reads it; arguments as for `export`.

    Raises:
        ConfigError: no checkpoint there, or one of a run without `lora`.
    """
    source, facts = _read(run_or_checkpoint, averaged)
    _refuse_foreign(target)
    if not facts.get("lora"):
        raise ConfigError(f"{source}: its run had no `lora`, so it has no adapter. Leave out --adapter.")
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for name in facts["experts"]:
        model = _network(source, Expert(name), facts).to(dtype)
        WanPipeline.save_lora_weights(
            temporary, adapter_state(model), weight_name=SECOND if Expert(name) is Expert.LOW_NOISE else None,
            transformer_lora_adapter_metadata=model.peft_config["default"].to_dict(),
        )  # fmt: skip
    base = f"`{facts['teacher_path']}`" if facts["init"] == "teacher" else f"`{facts['init']}`"
    second = f'pipe.load_lora_weights("THIS_FOLDER", weight_name="{SECOND}", load_into_transformer_2=True)\n'
    card = ADAPTER_CARD.format(base=base, layers=facts["transformer"]["num_layers"], shift=facts["shift"],
                               second=second if len(facts["experts"]) > 1 else "")  # fmt: skip
    (temporary / "README.md").write_text(card, encoding="utf-8")
    write_json(temporary / FACTS, facts)
    return _put_in_place(temporary, target)


def _refuse_foreign(target: Path) -> None:
    """An export takes the place of an earlier one, and of nothing else."""
    if found := folder_problems("output", target):
        raise ConfigError(*found)
    if target.is_dir() and any(target.iterdir()) and not (target / FACTS).is_file():
        raise ConfigError(f"--output {target}: is a folder with something else in it. Name a new one, or an earlier export.")


def _put_in_place(temporary: Path, target: Path) -> Path:
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)
    return target


def _read(run_or_checkpoint: Path, averaged: bool | None) -> tuple[Path, dict[str, Any]]:
    """The checkpoint, and its facts with "averaged" as asked."""
    source = _checkpoint(run_or_checkpoint)
    facts = read_state(source)["facts"]
    if averaged and "ema" not in facts:
        raise ConfigError(f"{source}: its run had no `ema`, so it has no averaged weights. Leave out --ema.")
    return source, facts | {"averaged": "ema" in facts if averaged is None else averaged}


@readable()
def _checkpoint(folder: Path) -> Path:
    found = folder if (folder / checkpoint.STATE).is_file() else find(folder, "auto")
    if found is None or not (found / checkpoint.STATE).is_file():
        raise ConfigError(f"{folder}: no checkpoint there. Name the --output_dir of a run, or one checkpoints/step_... folder.")
    if faults := manifest.faults(found):
        raise ConfigError(f"{found}: {'; '.join(faults)}. Name another checkpoint.")
    return found


def _network(source: Path, expert: Expert, facts: dict[str, Any]) -> WanTransformer3DModel:
    """One expert as it was trained, float32 on the CPU: with its adapters, without the projections of feature matching."""
    model = wan.skeleton(facts["transformer"])
    if facts.get("lora"):
        add_lora(model, Lora(**facts["lora"]), seed=0)
    for name, value in checkpoint.weights(source, expert, facts["averaged"]).items():
        if not name.startswith(PROJECTIONS):
            wan.put(model, name, value)
    return model


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
