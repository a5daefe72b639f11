"""Checks of a Wan pipeline's files, before a weight is read: each part is built and called without memory."""

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
from wandistiller.utils.validation import of_type, write
from wandistiller.wan.components import (
    TEXT_CLASSES,
    PartConfig,
    image_encoder_of,
    load_tokenizer,
    refused_keys,
    states,
    text_config,
    text_encoder_of,
    tokenize,
    vae_of,
)
from wandistiller.wan.damaged import cure, unfinished
from wandistiller.wan.schedulers import flow_problem, own_settings, scheduler_class
from wandistiller.wan.transformer import meta_transformer
from wandistiller.wan.transformer_config import TransformerConfig
from wandistiller.wan.weight_reader import DIFFUSERS_STEM, WeightReader

TEXT_TO_VIDEO, IMAGE_TO_VIDEO = "WanPipeline", "WanImageToVideoPipeline"
"""diffusers' classes of the pipelines that can be distilled."""
UNSUPPORTED = "VACE, Animate and speech-to-video Wans are not supported."
Layers = Annotated[int, Field(ge=1, le=1024)]
Size = Annotated[int, Field(ge=1, le=10**6)]
Patch = Annotated[list[Size], Field(min_length=3, max_length=3), write("three positive integers")]
NUMBERS = of_type(
    (Layers, "num_layers num_res_blocks"),
    (Annotated[int, Field(ge=2, le=1024, multiple_of=2)], "attention_head_dim"),  # for rope
    (Size, "num_attention_heads ffn_dim text_dim in_channels out_channels"),
    (Size, "rope_max_seq_len z_dim scale_factor_spatial scale_factor_temporal"),
)
"""Types of the numbers that are computed with here; the libraries check all others."""
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
    problems = config.problems(NUMBERS | {"patch_size": Patch})
    if config.values.get("_class_name", "WanTransformer3DModel") != "WanTransformer3DModel":
        remedy = f"Give a Wan whose class is WanTransformer3DModel. {UNSUPPORTED}"
        problems.append(config.problem("_class_name", remedy))
    return problems or _unfit("transformer", config.where, config.values | {"num_layers": 1})


def _call_transformer(values: dict[str, Any]) -> None:
    config = TransformerConfig.of(values)
    rows = (2, config.pos_embed_seq_len // 2) if config.pos_embed_seq_len else (1, 1)
    image_BLD = torch.zeros(*rows, config.image_dim) if config.image_dim else None
    x_t_BCFHW = torch.zeros(1, config.in_channels, *config.patch_size)
    meta_transformer(config)(x_t_BCFHW, torch.zeros(1), torch.zeros(1, 1, config.text_dim), image_BLD)


def _make_vae(values: dict[str, Any]) -> None:
    vae_of(values)
    torch.tensor([values["latents_mean"], values["latents_std"]]).view(2, values["z_dim"]).float()


def _call_text_encoder(values: dict[str, Any]) -> None:
    states(text_encoder_of(values), torch.zeros(1, 2, dtype=torch.long), None)


def _call_scheduler(values: dict[str, Any]) -> None:
    scheduler, nothing = scheduler_class(values["_class_name"]).from_config(values), torch.zeros([1] * 5)
    scheduler.set_timesteps(3)
    for t in scheduler.timesteps:  # some settings are used from the second step on
        scheduler.step(nothing, t, nothing)


PARTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "transformer": _call_transformer,
    "vae": _make_vae,
    "text_encoder": _call_text_encoder,
    "scheduler": _call_scheduler,
}
"""Part -> its construction and, where it is cheap, a call, both on the current default device."""


@once_for_each
def _unfit(part: str, where: str, values: dict[str, Any]) -> list[str]:
    """List the library's reason why a part cannot be made of these settings; it takes no memory."""
    try:
        with torch.device("cpu" if part == "scheduler" else "meta"), torch.no_grad():
            PARTS[part](values)
    except UNFIT as error:
        why = str(error) or type(error).__name__
        return [f"{where}: it cannot be built from this: {why}. Fix it, or fetch this file again."]
    return []


def vae_problems(config: PartConfig) -> list[str]:
    """List the reasons why no AutoencoderKLWan can be made of `config`."""
    problems = config.problems(NUMBERS)
    if config.values.get("_class_name", "AutoencoderKLWan") != "AutoencoderKLWan":
        problems.append(config.problem("_class_name", "Give the VAE of Wan, AutoencoderKLWan."))
    return problems or _unfit("vae", config.where, config.values)


def text_problems(config: PartConfig, text_dim: int) -> list[str]:
    """List the reasons why `config` describes no text encoder for a transformer with text of this width."""
    values, problems = config.values, config.problems(NUMBERS)
    named = values.get("architectures") or TEXT_CLASSES[:1]
    if not (isinstance(named, list) and all(name in TEXT_CLASSES for name in named)):
        remedy = f"Give the text encoder of Wan, {TEXT_CLASSES[0]}; no other class is loaded."
        problems.append(config.problem("architectures", remedy))
    if values.get("model_type", "umt5") != "umt5":
        problems.append(config.problem("model_type", 'Give the text encoder of Wan, of type "umt5".'))
    if values.get("d_model", text_dim) != text_dim:
        remedy = f"The transformer takes text of width {text_dim}; give the text encoder that belongs to it."
        problems.append(config.problem("d_model", remedy))
    return problems or _unfit("text_encoder", config.where, values | {"num_layers": 1})


def pipeline_problems(index: PartConfig, experts: list[PartConfig], vae: PartConfig) -> list[str]:
    """List the problems of a pipeline's networks, and between them; its first expert has high noise."""
    problems = [p for expert in experts for p in transformer_problems(expert)] + vae_problems(vae)
    first = experts[0].values
    return problems or [
        expert.problem(key, f"The other expert has {first[key]}; give two of one shape.")
        for expert in experts
        for key in TransformerConfig.filled({})
        if expert.values[key] != first[key]
    ] + _channel_problems(index, experts[0], vae)


def _channel_problems(index: PartConfig, transformer: PartConfig, vae: PartConfig) -> list[str]:
    """List channels that are not those of a text-to-video or an image-to-video Wan, or not the VAE's."""
    kind, channels = index.values["_class_name"], transformer.values["out_channels"]
    inputs = transformer.values["in_channels"]
    mask = (
        0 if index.values.get("expand_timesteps") else vae.values.get("scale_factor_temporal", 4) + channels
    )
    joined, problems = {TEXT_TO_VIDEO: 0, IMAGE_TO_VIDEO: mask}, []
    if inputs != channels + joined[kind]:
        other = next((name for name, more in joined.items() if inputs == channels + more), None)
        remedy = f"Write {other} there." if other else "Give another Wan."
        text = f"networks have {channels + joined[kind]} inputs and {channels} outputs"
        remedy = f"{index.where} has the class {kind}, whose {text}. {remedy}"
        problems.append(transformer.problem("in_channels", remedy))
    if vae.values["z_dim"] != channels:
        remedy = f"The transformer is for {channels} channels. Give the VAE that belongs to it."
        problems.append(vae.problem("z_dim", remedy))
    return problems


def scheduler_problems(config: PartConfig) -> list[str]:
    """List the reason why the scheduler cannot be made of `config`, or not be used."""
    if not scheduler_class(config.values.get("_class_name")):
        remedy = "Name a scheduler of diffusers: UniPCMultistepScheduler."
        return [config.problem("_class_name", remedy)]
    if problems := _unfit("scheduler", config.where, config.values):
        dynamic = own_settings(config.values).get("use_dynamic_shifting")
        remedy = "A Wan has one shift for all sizes. Write false here, and that shift under `shift`."
        return [config.problem("use_dynamic_shifting", remedy)] if dynamic else problems
    wrong = flow_problem(config.values)
    return [config.problem(*wrong)] if wrong else []


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
