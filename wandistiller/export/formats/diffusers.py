"""`--format diffusers`: a pipeline folder for diffusers' from_pretrained."""

import inspect
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import AnyFlowPipeline, AnyFlowTransformer3DModel
from safetensors.torch import save_file

from wandistiller.export.model_card import HERE, call_in_diffusers, student_sentence, write_card
from wandistiller.export.output import ExportFormat, check_folder, replaced
from wandistiller.export.source import Source
from wandistiller.flow import EULER
from wandistiller.network.folder import Folder
from wandistiller.network.sampling import few_step_config
from wandistiller.network.weight_reader import DIFFUSERS_STEM, RENAMED, WeightReader
from wandistiller.utils.errors import problem
from wandistiller.utils.files import atomic, link_or_copy, read_json, write_json
from wandistiller.wan.checks import IMAGE_TO_VIDEO
from wandistiller.wan.components import ANY_STEP, IMAGE_PARTS, VERSIONS, known_config
from wandistiller.wan.hub import is_used
from wandistiller.wan.pipeline import open_wan

SIZE = re.compile(r"[1-9]\d*(KB|MB|GB|KIB|MIB|GIB)", re.IGNORECASE)
CARD = """# A Wan student distilled with wandistiller

{made}

```python
import torch
from diffusers import {pipeline}
{imports}pipe = {pipeline}.from_pretrained("{where}", torch_dtype=torch.bfloat16)
{call}
```
"""


@dataclass(frozen=True, kw_only=True)
class DiffusersFormat(ExportFormat):
    """A diffusers pipeline: the student's experts with the teacher's other parts."""

    max_shard_size: str = "10GB"
    """Largest size of a file, such as 5GB; larger networks are split. The default is diffusers' own."""

    def problems(self) -> list[str]:
        if SIZE.fullmatch(size := self.max_shard_size):
            return []
        return [problem("command line", "max_shard_size", size, "Write a size such as 5GB or 500MB.")]

    def write(self, source: Source, output: Path) -> list[Path]:
        check_folder(output)
        teacher = source.teacher(weights=True)
        with replaced(output) as folder:
            for name, model in source.networks(self.dtype):
                model.save_pretrained(folder / name, max_shard_size=self.max_shard_size)
                if source.facts.is_flow_map:
                    _write_flow_map(folder / name / "config.json", source.facts.transformer)
                del model  # before the next is read
            images = IMAGE_PARTS if teacher.config.image_dim else ()
            for part in ("vae", "text_encoder", "tokenizer", *images):
                _copy_component(teacher.path / part, folder / part)
            if (facts := source.facts).few_steps:  # with the noise levels that are trained
                scheduler = few_step_config(facts.shift, facts.steps, facts.sampler or EULER)
            else:
                scheduler = teacher.scheduler_config(facts.shift)
            write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
            _write_index(teacher, source, scheduler["_class_name"], folder)
            write_pipeline_card(folder, source, self.repository)
            open_wan(str(folder)).require_weights()  # nothing that is incomplete takes the output's place
        return [output]


def _copy_component(source: Path, target: Path) -> None:
    """Copy the files of a teacher's part that are ever read, its JSON files with known keys only.

    Tensors that have the original Wan's names there get diffusers'.
    """
    link_or_copy(source, target)
    index = target / f"{DIFFUSERS_STEM}.safetensors.index.json"
    if index.is_file() and RENAMED in read_json(index).get("metadata", {}):
        with atomic(target / f"{DIFFUSERS_STEM}.safetensors") as file:  # not into a link of that name
            save_file(WeightReader(source).state(), file, {"format": "pt"})
        index.unlink()
    for file in target.iterdir():
        if not is_used(f"{target.name}/{file.name}"):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        elif file.suffix == ".json" and file.name != "tokenizer.json":
            known = known_config(file)
            if read_json(file) != known:
                write_json(file, known)


def _write_index(teacher: Folder, source: Source, scheduler: str, folder: Path) -> None:
    index = known_config(teacher.path / "model_index.json")
    index["scheduler"] = ["diffusers", scheduler]
    if source.facts.image_to_video:
        index["_class_name"] = IMAGE_TO_VIDEO
    if len(source.facts.experts) == 1:  # one network serves the whole path
        index |= {"transformer_2": [None, None], "boundary_ratio": None}
    elif source.facts.few_steps:  # it lies between two levels
        index["boundary_ratio"] = source.facts.boundary
    if source.facts.is_flow_map:
        known = [*VERSIONS, "expand_timesteps", *inspect.signature(AnyFlowPipeline.__init__).parameters]
        index = {key: index[key] for key in known if index.get(key)}
        index |= {"_class_name": ANY_STEP, "transformer": ["diffusers", AnyFlowTransformer3DModel.__name__]}
    write_json(folder / "model_index.json", index)


def _write_flow_map(file: Path, config: dict[str, Any]) -> None:
    """Write the config.json of a network as that of diffusers' flow map, which has the same weights."""
    values = config | read_json(file) | {"_class_name": AnyFlowTransformer3DModel.__name__}
    known = [*VERSIONS, *inspect.signature(AnyFlowTransformer3DModel.__init__).parameters]
    write_json(file, {key: values[key] for key in known if key in values})


def write_pipeline_card(folder: Path, source: Source, repository: str) -> None:
    made, where = student_sentence(source.published), repository or HERE
    write_card(folder, source, "finetune", CARD.format(**call_in_diffusers(source), made=made, where=where))
