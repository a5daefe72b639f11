"""Checks of the JSON files of a Wan pipeline, before anything is built from them."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import Field
from torch import nn
from transformers import UMT5Config

from wandistiller.utils.errors import ConfigError, problem
from wandistiller.utils.files import read_json
from wandistiller.utils.memoize import once_for_each
from wandistiller.utils.validation import Positive, Text, of_type, write
from wandistiller.wan.components import (
    TEXT_CLASSES,
    PartConfig,
    image_encoder_of,
    load_tokenizer,
    refused_keys,
    text_config,
    text_encoder_of,
    tokenize,
    vae_of,
)
from wandistiller.wan.damaged import cure, unfinished
from wandistiller.wan.schedulers import flow_problem, scheduler_class
from wandistiller.wan.transformer import meta_transformer
from wandistiller.wan.transformer_config import TransformerConfig
from wandistiller.wan.weight_reader import DIFFUSERS_STEM, WeightReader

TEXT_TO_VIDEO, IMAGE_TO_VIDEO = "WanPipeline", "WanImageToVideoPipeline"
"""diffusers' classes of the pipelines that can be distilled."""
UNSUPPORTED = "VACE, Animate and speech-to-video Wans are not supported."
UpTo1024 = Annotated[int, Field(ge=1, le=1024)]
EvenUpTo1024 = Annotated[int, Field(ge=2, le=1024, multiple_of=2)]
UpToAMillion = Annotated[int, Field(ge=1, le=10**6)]
ThreeCounts = Annotated[
    list[Annotated[int, Field(gt=0)]], Field(min_length=3, max_length=3), write("three positive integers")
]
TRANSFORMER = of_type(
    (UpTo1024, "num_layers num_attention_heads"),
    (EvenUpTo1024, "attention_head_dim"),  # for rope
    (UpToAMillion, "ffn_dim freq_dim text_dim in_channels out_channels rope_max_seq_len"),
    (ThreeCounts, "patch_size"),
    (bool, "cross_attn_norm"),
    (Positive, "eps"),
    (UpToAMillion | None, "image_dim added_kv_proj_dim pos_embed_seq_len"),
)
NEEDED = (
    "num_layers num_attention_heads attention_head_dim ffn_dim text_dim in_channels out_channels "
    "rope_max_seq_len patch_size cross_attn_norm"
).split()
VAE = of_type(
    (
        UpTo1024,
        "z_dim base_dim num_res_blocks in_channels out_channels scale_factor_spatial scale_factor_temporal",
    ),
    (Annotated[list[float], write("a list of numbers")], "latents_mean"),
    (Annotated[list[Positive], write("a list of positive numbers")], "latents_std"),
)
SCHEDULER = of_type(
    (Annotated[float, Field(gt=0, le=1000)] | None, "flow_shift shift"),
    (UpTo1024, "solver_order"),
    (Text, "_class_name"),
)
TEXT = of_type(
    (UpTo1024, "num_layers num_decoder_layers num_heads"),
    (UpToAMillion, "d_model d_kv d_ff relative_attention_num_buckets relative_attention_max_distance"),
    (Annotated[int, Field(ge=1, le=10**7)], "vocab_size"),
)
UNFIT = (
    StrictDataclassError,
    *(ArithmeticError, AssertionError, AttributeError, ImportError),
    *(LookupError, NameError, RuntimeError, TypeError, ValueError),
)
"""Exceptions of diffusers and transformers for settings that do not fit together."""
TIED = "encoder.embed_tokens.weight"
"""Another name of UMT5's `shared.weight`; a file has either or both."""


def transformer_problems(config: PartConfig) -> list[str]:
    """List the reasons why no WanTransformer3DModel can be made of `config`."""
    problems = config.value_problems(TRANSFORMER, NEEDED)
    if config.values.get("_class_name", "WanTransformer3DModel") != "WanTransformer3DModel":
        remedy = f"Give a Wan whose class is WanTransformer3DModel. {UNSUPPORTED}"
        problems.append(config.problem("_class_name", remedy))
    problems = problems or _image_state_problems(config)
    return problems or _building_problems("transformer", config.where, config.values | {"num_layers": 1})


def _image_state_problems(config: PartConfig) -> list[str]:
    """List the setting of given frames' states that does not fit the other; a Wan of text has neither."""
    values = config.values
    image, added = (values.get(key) for key in ("image_dim", "added_kv_proj_dim"))
    width = values["num_attention_heads"] * values["attention_head_dim"]
    if (image is None) == (added is None) and added in (None, width):
        return []
    remedy = f"`image_dim` is {image}. Write {width}, the network's width, or null for both: a Wan of text."
    return [config.problem("added_kv_proj_dim", remedy)]


PARTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "transformer": lambda values: meta_transformer(TransformerConfig.of(values)),
    "vae": vae_of,
    "text_encoder": text_encoder_of,
}


def _building_problems(part: str, where: str, values: dict[str, Any]) -> list[str]:
    return [wrong] if (wrong := _building_problem(part, where, values)) else []


@once_for_each
def _building_problem(part: str, where: str, values: dict[str, Any]) -> str | None:
    """Return the reason why a part cannot be built on the meta device."""
    try:
        with torch.device("meta"):
            PARTS[part](values)
    except UNFIT as error:
        return _unfit(where, error)
    return None


def _vae_problems(config: PartConfig) -> list[str]:
    """List the reasons why no AutoencoderKLWan can be made of `config`."""
    problems = config.value_problems(VAE, ["latents_mean", "latents_std", "z_dim"])
    if config.values.get("_class_name", "AutoencoderKLWan") != "AutoencoderKLWan":
        problems.append(config.problem("_class_name", "Give the VAE of Wan, AutoencoderKLWan."))
    return problems or _building_problems("vae", config.where, config.values)


def text_problems(config: PartConfig, text_dim: int) -> list[str]:
    """List the reasons why `config` describes no text encoder for a transformer with text of this width."""
    values, problems = config.values, config.value_problems(TEXT, ["d_model"])
    named = values.get("architectures") or TEXT_CLASSES[:1]
    if not (isinstance(named, list) and all(name in TEXT_CLASSES for name in named)):
        remedy = f"Give the text encoder of Wan, {TEXT_CLASSES[0]}; no other class is loaded."
        problems.append(config.problem("architectures", remedy))
    if values.get("model_type", "umt5") != "umt5":
        problems.append(config.problem("model_type", 'Give the text encoder of Wan, of type "umt5".'))
    if not problems and values["d_model"] != text_dim:
        remedy = f"The transformer takes text of width {text_dim}; give the text encoder that belongs to it."
        problems.append(config.problem("d_model", remedy))
    problems = problems or _distance_problems(config)
    return problems or _building_problems("text_encoder", config.where, config.values | {"num_layers": 1})


def _distance_problems(config: PartConfig) -> list[str]:
    """List the problem of an encoder whose farthest distance has no bucket, which is an error in its use."""
    key, left_out = "relative_attention_max_distance", UMT5Config()
    exact = config.values.get("relative_attention_num_buckets", left_out.relative_attention_num_buckets) // 4
    if config.values.get(key, left_out.relative_attention_max_distance) > exact:
        return []
    remedy = f"A quarter of the buckets, {exact}, are for single distances; write a larger number."
    return [config.problem(key, remedy, left_out.relative_attention_max_distance)]


def pipeline_problems(
    index: PartConfig, experts: list[PartConfig], vae: PartConfig, scheduler: PartConfig
) -> list[str]:
    """List the problems within the parts of a pipeline, and between them; its first expert has high noise."""
    problems = [p for expert in experts for p in transformer_problems(expert)] + _vae_problems(vae)
    problems += scheduler.value_problems(SCHEDULER, ["_class_name"])
    return problems or _unequal(experts) + _channel_problems(index, experts[0], vae)


def _unequal(experts: list[PartConfig]) -> list[str]:
    """Keys in which the experts differ."""
    first = experts[0].values
    return [
        expert.problem(key, f"The other expert has {first[key]}; give two of one shape.")
        for expert in experts
        for key in NEEDED
        if expert.values[key] != first[key]
    ]


def _channel_problems(index: PartConfig, transformer: PartConfig, vae: PartConfig) -> list[str]:
    """List channels that are not those of a text-to-video or an image-to-video Wan, or not the VAE's."""
    given, channels, problems = transformer.values, transformer.values["out_channels"], []
    mask = vae.values.get("scale_factor_temporal", 4)
    joined = {
        TEXT_TO_VIDEO: 0,
        IMAGE_TO_VIDEO: 0 if index.values.get("expand_timesteps") else mask + channels,
    }
    kind = index.values["_class_name"]
    if given["in_channels"] != (inputs := channels + joined[kind]):
        remedy = (
            f"{index.where} has the class {kind}, whose networks have {inputs} inputs and {channels} outputs."
        )
        other = next((name for name, more in joined.items() if given["in_channels"] == channels + more), None)
        remedy += f" Write {other} there." if other else " Give another Wan."
        problems.append(transformer.problem("in_channels", remedy))
    if kind == TEXT_TO_VIDEO and given.get("image_dim"):
        problems.append(transformer.problem("image_dim", f"Only an {IMAGE_TO_VIDEO} has it; write null."))
    sizes = {"z_dim": vae.values["z_dim"]}
    sizes |= {key: len(vae.values[key]) for key in ("latents_mean", "latents_std")}
    remedy = f"channels, the transformer for {channels}. Give the VAE that belongs to it."
    wrong = {key: size for key, size in sizes.items() if size != channels}
    return problems + [f"{vae.where}: `{key}` is for {size} {remedy}" for key, size in wrong.items()]


def scheduler_problems(config: PartConfig) -> list[str]:
    """List the reason why the scheduler cannot be made of `config`, or not be used."""
    if not (kind := scheduler_class(config.values["_class_name"])):
        remedy = "Name a scheduler of diffusers: UniPCMultistepScheduler."
        return [config.problem("_class_name", remedy)]
    try:
        scheduler, nothing = kind.from_config(config.values), torch.zeros(1, 1, 1, 1, 1)
        scheduler.set_timesteps(3)
        for t in scheduler.timesteps:  # some settings are used from the second step on
            scheduler.step(nothing, t, nothing)
        wrong = flow_problem(config.values)
    except UNFIT as error:
        return [_unfit(config.where, error)]
    return [config.problem(*wrong)] if wrong else []


def _unfit(where: str, error: Exception) -> str:
    why = str(error) or type(error).__name__
    return f"{where}: it cannot be built from this: {why}. Fetch this file again, or fix it."


def image_problems(folder: Path, config: TransformerConfig) -> list[str]:
    """List what is missing or does not fit of the image encoder, if the transformer takes its states."""
    if not config.image_dim:
        return []
    file, other = (
        folder / f for f in ("image_encoder/config.json", "image_processor/preprocessor_config.json")
    )
    if lacking := [f for f in (file, other) if not f.is_file()]:
        return [f"{f}: no such file. Give the whole pipeline." for f in lacking]
    given = read_json(file)
    if (width := given.get("hidden_size")) != config.image_dim:
        belongs = "give the encoder that belongs to it."
        remedy = f"The transformer takes states of width {config.image_dim}; {belongs}"
        return [problem(file, "hidden_size", width, remedy)]
    return refused_keys(file, given) + _encoder_problems(folder / "image_encoder", given)


def _encoder_problems(folder: Path, config: dict[str, Any]) -> list[str]:
    """List the tensors of an image encoder that do not fit; transformers 4 began their names otherwise."""
    with torch.device("meta"):
        model = image_encoder_of(config)
    try:
        reader = WeightReader(folder, "model")
    except ConfigError as error:
        return error.problems
    begins = "vision_model." if all(name.startswith("vision_model.") for name in reader.stored) else ""
    renamed = {f"{begins}{name}": p.shape for name, p in model.named_parameters()}
    return reader.problems(renamed, None)


def component_problems(folder: Path, vae: dict[str, Any]) -> list[str]:
    """List missing, truncated or misshapen tensors of VAE and text encoder, and a tokenizer that fails."""
    problems = _loaded_tokenizer_problems(folder)
    with torch.device("meta"):
        model = vae_of(vae)
    problems += weight_problems(folder / "vae", model)
    if (folder / "text_encoder" / "adapter_config.json").exists():  # peft would add it to the weights
        remedy = "Delete it; a text encoder is loaded without adapters."
        problems.append(f"{folder / 'text_encoder' / 'adapter_config.json'}: {remedy}")
    if not (file := folder / "text_encoder" / "config.json").is_file():
        return [*problems, f"{file}: no such file. Give the whole pipeline."]
    with torch.device("meta"):
        model = text_encoder_of(read_json(file))
    return problems + weight_problems(folder / "text_encoder", model, "model")


def _loaded_tokenizer_problems(folder: Path) -> list[str]:
    where, names = folder / "tokenizer", ("tokenizer.json", "spiece.model")
    if problems := unfinished(where, names):
        return problems
    files = [where / name for name in names if (where / name).is_file()]
    if problems := [f"{file}: {what}" for file in files if (what := cure(file))]:
        return problems
    if not files:
        return [f"{where}: no tokenizer.json or spiece.model in it. Give the whole pipeline."]
    try:
        tokens = tokenize(load_tokenizer(where), "a red circle", padded=True)
    except Exception as error:  # tokenizers raises it bare
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [f"{where}: it cannot be read: {why}. Fetch the folder again."]
    vocabulary = UMT5Config.from_dict(text_config(folder)).vocab_size
    if (largest := int(tokens.input_ids.max())) >= vocabulary:
        remedy = f"has {vocabulary} tokens. Give the tokenizer that belongs to it."
        return [f"{where}: it makes token {largest}, but the text encoder {remedy}"]
    return []


def weight_problems(folder: Path, model: nn.Module, stem: str = DIFFUSERS_STEM) -> list[str]:
    """List the tensors in `folder` that do not fit `model`, from the files' headers."""
    try:
        reader = WeightReader(folder, stem)
    except ConfigError as error:
        return error.problems
    expected = {name: p.shape for name, p in model.named_parameters()}
    if TIED in reader.stored and "shared.weight" in expected:
        expected[TIED] = expected["shared.weight"]
        if "shared.weight" not in reader.stored:
            del expected["shared.weight"]
    return reader.problems(expected, model._keys_to_ignore_on_load_unexpected)
