"""`--format lora`, or `--adapter`: the LoRA of a run with `lora`, else the difference to the teacher."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
from torch import Tensor

from wandistiller.checkpoint.facts import Facts
from wandistiller.experts import Expert
from wandistiller.export import model_card
from wandistiller.export.low_rank import A, Adapter, B, extract
from wandistiller.export.output import (
    ExportFormat,
    check_files,
    check_folder,
    per_expert,
    replaced,
    write_file,
)
from wandistiller.export.source import Source, WholeModel, arguments, clip, written
from wandistiller.flow import EULER
from wandistiller.network.adapters import LowRank, adapter_state
from wandistiller.network.folder import Folder
from wandistiller.network.names import SECOND_TIME
from wandistiller.network.sampling import few_step_config
from wandistiller.network.weight_reader import WeightReader
from wandistiller.utils.errors import ConfigError, problem
from wandistiller.utils.files import FACTS, write_json
from wandistiller.utils.parameter_patterns import any_names, unknown_parts
from wandistiller.wan.added_lora import sum_of
from wandistiller.wan.components import shift_key
from wandistiller.wan.lora_experts import FILES
from wandistiller.wan.original_names import original_name

OF_LOW_NOISE = [
    "pipe.transformer, pipe.transformer_2 = pipe.transformer_2, None  # the student is of this one alone",
    "pipe.register_to_config(boundary_ratio=None)",
]
"""Lines by which diffusers' pipeline of two experts samples with the low-noise one at all noise levels."""
CARD = """# A Wan LoRA distilled with wandistiller

For `{base}`, {layers} layers. {rank}. {made_for}

```python
import torch
from diffusers import {classes}
{imports}{second_time}dtypes = {{"default": torch.bfloat16, "vae": torch.float32}}
pipe = {pipeline}.from_pretrained("{pipeline_of}"{parts}, torch_dtype=dtypes)
{scheduler}
{calls}
{offload}
{call}
```

These lines need accelerate, a GPU of 24 GB, and CPU memory for the whole pipeline. With less of either use
`wandistiller sample --lora {lora}`.
"""
SECOND = """\
weights = AnyFlowPipeline.lora_state_dict({file})
second_time = {{n.removeprefix("transformer."): weights.pop(n) for n in [*weights] if "{part}" in n}}
transformer = AnyFlowTransformer3DModel.from_pretrained("{base}", subfolder="{network}",
                                                        torch_dtype=torch.bfloat16)
transformer.load_state_dict(second_time, strict=False, assign=True)  # what diffusers says is new
"""
"""Lines that make a flow map of a Wan and of what its LoRA's file has beside adapters."""
NOT_COMFY = "\nComfyUI cannot sample with it: no node there says where its velocity leads.\n"
WHOLE = 8_000_000_000
"""Parameters of a network that has room on a GPU of 24 GB, in bf16 beside its activations."""
ONE_PART = "pipe.enable_model_cpu_offload()  # one part at a time is on the GPU"
ONE_LAYER = "pipe.enable_sequential_cpu_offload()  # one layer at a time is on the GPU"
TILED = 60_000_000
"""Pixels of all frames from which the VAE decodes in tiles: a whole call takes 270 bytes for each."""
TILES = "pipe.vae.enable_tiling()"
LESS = "it keeps {share:.1%} of the difference to the teacher, not the {energy:.1%} asked for"
ENERGY, RANK = 0.99, 128
"""Usual values of the flags."""


@dataclass(frozen=True, kw_only=True)
class LoraFormat(ExportFormat):
    """For ComfyUI a FILE for each expert and the folder FILE.card; for diffusers a folder.

    Both are for diffusers of a flow map, with its second time beside the adapters.
    """

    energy: float | None = None
    """The share of the change's square to keep, over 0 and up to 1; default `ENERGY`."""
    rank: int | None = None
    """The largest rank; default `RANK`. A run's adapters are as they are if neither is given."""
    targets: list[str] | None = None
    """Parts whose linear layers it changes; default all."""
    teacher_path: str | None = None
    """The pipeline that a whole model differs from."""
    format: str = "lora"
    """Reader: `original` for ComfyUI, `diffusers`, or `lora`: by the output's suffix."""

    def problems(self) -> list[str]:
        problems = []
        if self.energy is not None and not 0 < self.energy <= 1:
            problems.append(problem("command line", "energy", self.energy, "Write a share over 0, up to 1."))
        if self.rank is not None and self.rank < 1:
            problems.append(problem("command line", "rank", self.rank, "Write a positive integer."))
        return problems

    def write(self, source: Source, output: Path) -> list[Path]:
        comfy = self.format == "original" or self.format == "lora" and output.suffix == ".safetensors"
        experts = source.facts.experts
        files = [per_expert(output, source.sides, name) for name in experts]
        target = check_files(output, files) if comfy else check_folder(output)
        adapters = [
            adapter._replace(state={name: value.to(self.dtype) for name, value in adapter.state.items()})
            for adapter in self._adapters(source)
        ]
        ranks = ranks_in_words(experts, [f"Rank {a.rank}{a.note}" for a in adapters])
        with replaced(target) as folder:
            if comfy:
                about = "Wan/lora", source.description, source.published
                with ExitStack() as together:
                    for file, adapter in zip(files, adapters, strict=True):
                        plain = {f"transformer.{name}": value for name, value in adapter.state.items()}
                        state = plain if source.facts.is_flow_map else comfy_state(adapter)
                        write_file(file, state, *about, together)
            else:
                files = [Path(FILES[Expert(name)]) for name in experts]
                for file, adapter in zip(files, adapters, strict=True):
                    config = {"transformer_lora_adapter_metadata": adapter.config}
                    save = diffusers.WanPipeline.save_lora_weights
                    save(folder, adapter.state, weight_name=file.name, **config)
            names = [file.name for file in files]
            if isinstance(source, WholeModel):
                write_json(folder / FACTS, source.published.as_json())
            else:
                write_adapter_card(folder, source, self.repository, ranks, names, comfy and target.name)
        return [*files, target] if comfy else [target]

    def _adapters(self, source: Source) -> Iterator[Adapter]:
        """Yield each expert's adapter: trained, or extracted from the difference to the teacher."""
        facts = source.facts
        if facts.lora and not facts.lora_base:
            raise ConfigError(
                f"{source.folder}: its adapters are for a network with {facts.config.num_layers} layers that "
                f"it began with, made of {facts.init} weights, which is no pipeline that they could be added "
                "to. Leave out --adapter and --format lora: the export then is a pipeline with them merged."
            )
        teacher = None if facts.lora else _teacher_of_same_shape(source)
        for name in facts.experts:
            if teacher:
                changes = _differences(source.weights(name), WeightReader(teacher.path / name))
            else:
                adapter = _trained(source, name)
                changes = ((f"{layer}.weight", b @ a) for layer, (a, b) in _changes(adapter).items())
            if teacher or self.energy or self.rank or self.targets:
                adapter = self._extracted(source, name, changes)
            yield _with_second_time(adapter, source.second_time(name)) if facts.is_flow_map else adapter

    def _extracted(self, source: Source, name: str, changes: Iterable[tuple[str, Tensor]]) -> Adapter:
        """Return the largest directions of an expert's changes of weights, and print their share."""
        layers = source.facts.config.linear_layers
        targets = [layer for layer in layers if self.targets is None or any_names(self.targets, layer)]
        if problems := unknown_parts("command line", "targets", self.targets or (), layers):
            raise ConfigError(*problems)
        energy, rank = self.energy or ENERGY, self.rank or RANK
        with torch.no_grad():
            extracted = extract(targets, changes, energy, rank)
        adapter = extracted.adapter
        print(
            f"{name}: rank {adapter.rank} keeps {extracted.share:.2%} of the squared difference of its "
            f"layers; {extracted.outside:.2%} of all is in other weights, which it does not hold",
            file=sys.stderr,
        )
        if extracted.share >= energy * (1 - 1e-6):
            return adapter
        less = LESS.format(share=extracted.share, energy=energy)
        print(
            f"warning: {name}: at rank {adapter.rank} {less}. A larger --rank than {rank} keeps more.",
            file=sys.stderr,
        )
        return adapter._replace(note=f": {less}")


def ranks_in_words(experts: list[str], ranks: list[str]) -> str:
    """Say the rank of each expert's adapter, or once that of all."""
    if len({*ranks}) == 1:
        return ranks[0]
    return "; ".join(f"{rank} ({Expert(name).in_words})" for name, rank in zip(experts, ranks, strict=True))


def _teacher_of_same_shape(source: Source) -> Folder:
    """Return the teacher, which a LoRA is the difference to.

    Raises:
        ConfigError: the student is another network.
    """
    facts, teacher = source.facts, source.teacher(weights=True)
    raw = teacher.config.raw
    different = [key for key, value in facts.transformer.items() if raw.get(key, value) != value]
    if different or {*source.sides} != {e.value for e in teacher.configs}:
        keys = ", ".join(f"`{key}`" for key in different) or "`experts`"
        raise ConfigError(
            f"{source.folder}: its student differs from {facts.teacher_path} in {keys}, "
            "so it is no LoRA of it. Leave out --adapter; or train one with the recipe key `lora`."
        )
    return teacher


def _differences(
    weights: Iterable[tuple[str, Tensor]], teacher: WeightReader
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and change of each weight, float32; raises ConfigError if the teacher's is damaged."""
    for name, value in ((n, value) for n, value in weights if SECOND_TIME not in n):
        original = torch.empty(value.shape)
        teacher.read(name, original)
        if teacher.faults:
            raise ConfigError(*teacher.faults)
        yield name, value.float() - original


def _trained(source: Source, name: str) -> Adapter:
    """Return the adapters of an expert, with what was added to the teacher that it was trained on.

    So the file is for the teacher as it was published, without `teacher_lora`.
    """
    model = source.adapters(name)
    config = model.peft_config["default"]
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    ranks = Counter(layer.r["default"] for layer in layers.values())
    listed = ", ".join(f"{number} of {rank}" for rank, number in sorted(ranks.items()))
    adapter = Adapter(
        adapter_state(model),
        config.lora_alpha,
        config.r,
        config.to_dict(),
        f"; layers by rank: {listed}" if len(ranks) > 1 else "",
        {n: layer.scaling["default"] for n, layer in layers.items()},
    )
    if not (source.facts.bases and source.facts.teacher_lora):
        return adapter
    teacher, base, state = source.base_teacher(), source.base(name), {}
    changes = teacher.added_changes(base)
    for layer, trained in _changes(adapter).items():
        changes[layer] = sum_of(changes.get(layer), trained)
    for layer, (a, b) in changes.items():
        state |= {layer + A: a, layer + B: b}
    note = f"{adapter.note}, beside those of `teacher_lora`, which are in it"
    return Adapter(state, adapter.rank, adapter.rank, note=note)


def _changes(adapter: Adapter) -> dict[str, LowRank]:
    layers = [key.removesuffix(A) for key in adapter.state if key.endswith(A)]
    return {n: LowRank(adapter.state[n + A], adapter.state[n + B] * adapter.factor(n)) for n in layers}


def _with_second_time(adapter: Adapter, second_time: dict[str, Tensor]) -> Adapter:
    """Return an adapter with a flow map's second time, and its factors in its weights.

    The card's lines read a file without its settings.
    """
    state = dict(second_time)
    for layer, (a, b) in _changes(adapter).items():
        state |= {layer + A: a.contiguous(), layer + B: b}
    return Adapter(state, adapter.rank, adapter.rank, note=adapter.note)


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


def _offload(facts: Facts) -> str:
    """Return the lines by which the pipeline takes no more than a GPU of 24 GB has."""
    lines = [ONE_PART if facts.config.numel < WHOLE else ONE_LAYER]
    return "\n".join(lines + [TILES] * (facts.height * facts.width * facts.num_frames >= TILED))


def _scheduler(source: Source, pipeline: str) -> dict[str, str]:
    """The classes to import and the call that sets the scheduler of a pipeline of that class."""
    facts = source.facts
    if not facts.few_steps:
        key = "flow_shift"  # the usual one, if the teacher is gone
        with suppress(ConfigError):
            key = shift_key(source.teacher(weights=False).scheduler_config(facts.shift))
        call = f"pipe.scheduler.from_config(pipe.scheduler.config, {arguments({key: facts.shift})})"
        return {"classes": pipeline, "scheduler": f"pipe.scheduler = {call}"}
    config = few_step_config(facts.shift, facts.steps, facts.sampler or EULER)
    name = config.pop("_class_name")
    lines = [f"pipe.scheduler = {name}({arguments(config)})"]
    name += ", AnyFlowTransformer3DModel" * facts.is_flow_map
    if facts.has_boundary:
        lines.append(f"pipe.register_to_config({arguments({'boundary_ratio': facts.boundary})})")
    return {"classes": f"{name}, {pipeline}", "scheduler": "\n".join(lines)}


def loading_lines(files: list[str], networks: list[Expert]) -> list[str]:
    """Return the lines that add LoRA files to the teacher's networks in diffusers' pipeline `pipe`.

    Args:
        files: arguments of `load_lora_weights` that name each.
        networks: of the teacher, one of each file.
    """
    if networks == [Expert.LOW_NOISE]:
        return [*OF_LOW_NOISE, f"pipe.load_lora_weights({files[0]})"]
    into = {Expert.HIGH_NOISE: "", Expert.LOW_NOISE: ", load_into_transformer_2=True"}
    return [f"pipe.load_lora_weights({f}{into[network]})" for f, network in zip(files, networks, strict=True)]


def write_adapter_card(
    folder: Path, source: Source, repository: str, rank: str, files: list[str], comfy: str
) -> None:
    """Write README.md of a LoRA; `files` holds one for each expert, `rank` is a sentence with their ranks.

    Args:
        comfy: the card's folder once it is in its place, beside the files for ComfyUI; else empty.
    """
    facts = source.published
    base = facts.lora_base
    where = repository or (model_card.BESIDE if comfy else model_card.HERE)
    networks = [Expert(name) for name in facts.bases or source.facts.experts]
    places = [f'"{where}", weight_name="{file}"' for file in files]
    call = model_card.call_in_diffusers(source)
    of = facts.teacher_hub_id if base == facts.teacher_path and facts.teacher_hub_id else base
    calls, second_time, parts = loading_lines(places, networks), "", ""
    if facts.is_flow_map:
        calls, parts = ["pipe.load_lora_weights(weights)"], ", transformer=transformer"
        second_time = SECOND.format(file=places[0], part=SECOND_TIME, base=of, network=networks[0].value)
    text = CARD.format(
        base=base,
        pipeline_of=of,
        second_time=second_time,
        parts=parts,
        **call,
        **_scheduler(source, call["pipeline"]),
        offload=_offload(facts),
        lora=where,
        layers=facts.config.num_layers,
        rank=rank,
        made_for=model_card.MADE_FOR.format(**written(facts), clip=clip(facts))
        + model_card.few_steps_sentence(facts),
        calls="\n".join(calls),
    )
    if facts.is_flow_map:
        text += NOT_COMFY
    elif comfy:
        model = "low-noise model alone" if networks == [Expert.LOW_NOISE] else "model"
        model = f"the teacher's {model}" if base == facts.teacher_path else f"the {model} of `{base}`"
        text += f"\nFor ComfyUI put {model_card.joined(files)} into `models/loras`, for {model}.\n"
        text += model_card.comfy_nodes(facts, "LoraLoaderModelOnly")
    model_card.write_card(folder, source, "adapter", text)
