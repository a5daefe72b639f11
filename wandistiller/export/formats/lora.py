"""`--format lora`, or `--adapter`: the LoRA of a run with `lora`, else the difference to the teacher."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import WanPipeline
from torch import Tensor

from wandistiller.experts import Expert
from wandistiller.export.comfy_nodes import comfy_nodes
from wandistiller.export.formats.base import ExportFormat
from wandistiller.export.low_rank import A, Adapter, B, extract
from wandistiller.export.model_card import (
    BESIDE,
    HERE,
    MADE_FOR,
    few_steps_sentence,
    joined,
    write_card,
)
from wandistiller.export.output import check_files, check_folder, per_expert, replaced, write_file
from wandistiller.export.source import Source, arguments, clip, written
from wandistiller.flow import EULER
from wandistiller.student.lora import adapter_state
from wandistiller.utils.errors import ConfigError, problem
from wandistiller.wan.added_lora import added_changes, sum_of
from wandistiller.wan.lora_experts import FILES
from wandistiller.wan.lora_files import LowRank
from wandistiller.wan.original_names import original_name
from wandistiller.wan.sampling import few_step_config, pipeline_config
from wandistiller.wan.schedulers import shift_key
from wandistiller.wan.weight_reader import WeightReader

OF_LOW_NOISE = [
    "pipe.transformer, pipe.transformer_2 = pipe.transformer_2, None  # the student is of this one alone",
    "pipe.register_to_config(boundary_ratio=None)",
]
"""Lines by which diffusers' pipeline of two experts samples with the low-noise one at all noise levels."""
CARD = """# A Wan LoRA distilled with wandistiller

For `{base}`, {layers} layers. {rank}. {made_for}

```python
from diffusers import {classes}
pipe = {pipeline}.from_pretrained("{base}")
{scheduler}
{calls}
```
"""
LESS = "it keeps {kept:.1%} of the difference to the teacher, not the {energy:.1%} asked for"


@dataclass(frozen=True, kw_only=True)
class LoraFormat(ExportFormat):
    """For ComfyUI a FILE for each expert and the folder FILE.card; for diffusers a folder."""

    energy: float = 0.99
    """Of a difference, the share of its square to keep, over 0 and up to 1."""
    rank: int = 128
    """Of a difference, the largest rank."""
    format: str = "lora"
    """Reader: `original` for ComfyUI, `diffusers`, or `lora`: by the output's suffix."""

    def problems(self) -> list[str]:
        problems = []
        if not 0 < self.energy <= 1:
            problems.append(problem("command line", "energy", self.energy, "Write a share over 0, up to 1."))
        if self.rank < 1:
            problems.append(problem("command line", "rank", self.rank, "Write a positive integer."))
        return problems

    def write(self, source: Source, output: Path) -> list[Path]:
        comfy = self.format == "original" or self.format == "lora" and output.suffix == ".safetensors"
        files = [per_expert(output, source.experts, name) for name in source.experts]
        target = check_files(output, files) if comfy else check_folder(output)
        adapters = [adapter.to(self.dtype) for adapter in _adapters(source, self.energy, self.rank)]
        rank = ranks_in_words(source.experts, [adapter.sentence for adapter in adapters])
        with replaced(target) as folder:
            if comfy:
                about = "Wan/lora", source.description, source.published
                with ExitStack() as together:
                    for file, adapter in zip(files, adapters, strict=True):
                        write_file(file, comfy_state(adapter), *about, together)
            else:
                files = [Path(FILES[Expert(name)]) for name in source.experts]
                for file, adapter in zip(files, adapters, strict=True):
                    config = {"transformer_lora_adapter_metadata": adapter.config}
                    WanPipeline.save_lora_weights(folder, adapter.state, weight_name=file.name, **config)
            names = [file.name for file in files]
            write_adapter_card(folder, source, self.repository, rank, names, comfy and target.name)
        return [*files, target] if comfy else [target]


def ranks_in_words(experts: list[str], ranks: list[str]) -> str:
    """Say the rank of each expert's adapter, or once that of all."""
    if len({*ranks}) == 1:
        return ranks[0]
    return "; ".join(f"{rank} ({Expert(name).in_words})" for name, rank in zip(experts, ranks, strict=True))


def _adapters(source: Source, energy: float, rank: int) -> Iterator[Adapter]:
    """Yield each expert's adapter: trained, or extracted from the difference to the teacher."""
    facts = source.facts
    if facts.lora and not facts.lora_base:
        raise ConfigError(
            f"{source.folder}: its adapters are for a network with {facts.config.num_layers} layers that it "
            f"began with, made of {facts.init} weights, which is no pipeline that they could be added to. "
            "Leave out --adapter and --format lora: the export then is a pipeline with them merged."
        )
    if facts.lora:
        for name in source.experts:
            model = source.adapters(name)
            config = model.peft_config["default"]
            layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
            adapter = Adapter(
                adapter_state(model),
                config.lora_alpha,
                config.r,
                config.to_dict(),
                _other_ranks(layer.r["default"] for layer in layers.values()),
                {n: layer.scaling["default"] for n, layer in layers.items()},
            )
            yield _with_teachers(adapter, source, name)
        return
    teacher = source.teacher(weights=True)
    own, theirs = facts.transformer, teacher.config.raw
    different = [key for key, value in own.items() if theirs.get(key, value) != value]
    if different or set(source.experts) != {e.value for e in teacher.configs}:
        keys = ", ".join(f"`{key}`" for key in different) or "`experts`"
        raise ConfigError(
            f"{source.folder}: its student differs from {facts.teacher_path} in {keys}, "
            "so it is no LoRA of it. Leave out --adapter; or train one with the recipe key `lora`."
        )
    for name, model in source.networks(torch.float32):
        with torch.no_grad():
            extracted = extract(model, WeightReader(teacher.path / name).read, energy, rank)
        del model  # before the next is read
        adapter = extracted.adapter
        print(
            f"{name}: rank {extracted.adapter.rank} keeps {extracted.kept:.2%} of the squared difference "
            f"of the linear layers; {extracted.outside:.2%} of all is in biases, norms and tables, "
            "which no LoRA holds",
            file=sys.stderr,
        )
        if extracted.kept < energy * (1 - 1e-6):
            less = LESS.format(kept=extracted.kept, energy=energy)
            print(
                f"warning: {name}: at rank {adapter.rank} {less}. A larger --rank than {rank} keeps more.",
                file=sys.stderr,
            )
            adapter = adapter._replace(note=f": {less}")
        yield adapter


def _with_teachers(adapter: Adapter, source: Source, name: str) -> Adapter:
    """Return the sum of an expert's adapter and of what was added to the teacher that it was trained on.

    So the file is for the teacher as it was published, without `teacher_lora`.
    """
    if not (source.facts.bases and source.facts.teacher_lora):
        return adapter
    layers = added_changes(source.base_teacher().added, source.base(name))
    for layer in (key.removesuffix(A) for key in adapter.state if key.endswith(A)):
        own = LowRank(adapter.state[layer + A], adapter.state[layer + B] * adapter.factor(layer))
        layers[layer] = sum_of(layers.get(layer), own)
    state = {}
    for layer, (a, b) in layers.items():
        state |= {layer + A: a, layer + B: b}
    note = f"{adapter.note}, beside those of `teacher_lora`, which are in it"
    return Adapter(state, adapter.rank, adapter.rank, note=note)


def _other_ranks(of_layers: Iterable[int]) -> str:
    """Say how many layers have which rank, if there are several."""
    ranks = sorted(Counter(of_layers).items())
    listed = ", ".join(f"{n} of {rank}" for rank, n in ranks)
    return f"; layers by rank: {listed}" if len(ranks) > 1 else ""


def comfy_state(adapter: Adapter) -> dict[str, Tensor]:
    """The adapter's weights under the names that ComfyUI reads, and diffusers too.

    The factor alpha / rank is in the weights: diffusers 0.42.1 takes no `.alpha` of a layer outside the
    blocks.
    """
    renamed = {}
    for name, value in adapter.state.items():
        layer, _, part = name.rpartition(".lora_")
        factor = adapter.factor(layer)
        layer = "diffusion_model." + original_name(f"{layer}.").removesuffix(".")
        renamed[f"{layer}.lora_{part}"] = value * factor if name.endswith(B) else value.contiguous()
    return renamed


def _scheduler(source: Source) -> dict[str, str]:
    """The classes to import and the call that sets the pipeline's scheduler."""
    facts = source.facts
    pipeline = "WanImageToVideoPipeline" if facts.image_to_video else "WanPipeline"
    if not facts.few_steps:
        shift = arguments({_shift_key(source): facts.shift})
        call = f"pipe.scheduler.from_config(pipe.scheduler.config, {shift})"
        return {"classes": pipeline, "pipeline": pipeline, "scheduler": f"pipe.scheduler = {call}"}
    config = few_step_config(facts.shift, facts.steps, facts.sampler or EULER)
    name = config.pop("_class_name")
    lines = [f"pipe.scheduler = {name}({arguments(config)})"]
    if facts.has_boundary:
        lines.append(f"pipe.register_to_config({arguments({'boundary_ratio': facts.boundary})})")
    classes = f"{name}, {pipeline}"
    return {"classes": classes, "pipeline": pipeline, "scheduler": "\n".join(lines)}


def _shift_key(source: Source) -> str:
    """The key of the shift in the teacher's own scheduler; the usual one, if the teacher is gone."""
    try:
        return shift_key(pipeline_config(source.teacher(weights=False), source.facts.shift))
    except ConfigError:
        return "flow_shift"


def loading_lines(files: list[str], networks: list[Expert]) -> list[str]:
    """Return the lines that add LoRA files to the teacher's networks in diffusers' pipeline `pipe`.

    Args:
        files: arguments of `load_lora_weights` that name each.
        networks: of the teacher, one of each file.
    """
    if networks == [Expert.LOW_NOISE]:
        return [*OF_LOW_NOISE, f"pipe.load_lora_weights({files[0]})"]
    more = {Expert.HIGH_NOISE: "", Expert.LOW_NOISE: ", load_into_transformer_2=True"}
    return [f"pipe.load_lora_weights({f}{more[network]})" for f, network in zip(files, networks, strict=True)]


def write_adapter_card(
    folder: Path, source: Source, repository: str, rank: str, files: list[str], comfy: str
) -> None:
    """Write README.md of a LoRA; `files` holds one for each expert, `rank` is a sentence with their ranks.

    Args:
        comfy: the card's folder once it is in its place, beside the files for ComfyUI; else empty.
    """
    facts = source.published
    base = facts.lora_base
    where = repository or (BESIDE if comfy else HERE)
    networks = [Expert(name) for name in facts.bases or source.experts]
    calls = loading_lines([f'"{where}", weight_name="{file}"' for file in files], networks)
    text = CARD.format(
        base=base,
        **_scheduler(source),
        layers=facts.config.num_layers,
        rank=rank,
        made_for=MADE_FOR.format(**written(facts), clip=clip(facts)) + few_steps_sentence(facts),
        calls="\n".join(calls),
    )
    if comfy:
        model = "low-noise model alone" if networks == [Expert.LOW_NOISE] else "model"
        model = f"the teacher's {model}" if base == facts.teacher_path else f"the {model} of `{base}`"
        text += f"\nFor ComfyUI put {joined(files)} into `models/loras`, for {model}.\n"
        text += comfy_nodes(facts, "LoraLoaderModelOnly")
    write_card(folder, source, "adapter", text)
