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
from wandistiller.utils.validation import Positive, Text, of_type, value_problems, write
from wandistiller.wan.component_classes import TEXT_CLASSES, load_tokenizer, refused_keys, tokenize
from wandistiller.wan.components import text_config, text_encoder_of, vae_of
from wandistiller.wan.damaged import cure, unfinished
from wandistiller.wan.transformer import meta_transformer
from wandistiller.wan.weight_reader import DIFFUSERS_STEM, WeightReader

UpTo1024 = Annotated[int, Field(ge=1, le=1024)]
EvenUpTo1024 = Annotated[int, Field(ge=2, le=1024, multiple_of=2)]
UpToAMillion = Annotated[int, Field(ge=1, le=10**6)]
ThreeCounts = Annotated[
    list[Annotated[int, Field(gt=0)]], Field(min_length=3, max_length=3), write("three positive integers")
]
TextToVideo = Annotated[None, write("null: only text-to-video is supported")]
TRANSFORMER = of_type(
    (UpTo1024, "num_layers num_attention_heads"),
    (EvenUpTo1024, "attention_head_dim"),  # for rope
    (UpToAMillion, "ffn_dim freq_dim text_dim in_channels out_channels rope_max_seq_len"),
    (ThreeCounts, "patch_size"),
    (bool, "cross_attn_norm"),
    (Positive, "eps"),
    (TextToVideo, "image_dim added_kv_proj_dim pos_embed_seq_len"),
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
    (Annotated[float, Field(gt=0, le=1000)], "flow_shift shift"),
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


def transformer_problems(where: str, config: dict[str, Any]) -> list[str]:
    """List the reasons why no WanTransformer3DModel can be made of `config`."""
    problems = _section_problems(where, config, NEEDED, TRANSFORMER) + refused_keys(where, config)
    if (name := config.get("_class_name", "WanTransformer3DModel")) != "WanTransformer3DModel":
        remedy = "Give a text-to-video Wan, whose class is WanTransformer3DModel."
        problems.append(problem(where, "_class_name", name, remedy))
    return problems or _building_problems(where, "transformer", config | {"num_layers": 1})


PARTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "transformer": meta_transformer,
    "vae": vae_of,
    "text_encoder": text_encoder_of,
}


def _building_problems(where: str, part: str, config: dict[str, Any]) -> list[str]:
    """List the reason why a part cannot be built."""
    return list(filter(None, [_why_not_built(where, part, config)]))


@once_for_each
def _why_not_built(where: str, part: str, config: dict[str, Any]) -> str:
    """Build a part on the meta device; return the message for what is raised, or nothing."""
    try:
        with torch.device("meta"):
            PARTS[part](config)
    except UNFIT as error:
        return unfit(where, error)
    return ""


def vae_problems(where: str, config: dict[str, Any]) -> list[str]:
    """List the reasons why no AutoencoderKLWan can be made of `config`."""
    problems = _section_problems(where, config, ["latents_mean", "latents_std", "z_dim"], VAE)
    problems += refused_keys(where, config)
    if (name := config.get("_class_name", "AutoencoderKLWan")) != "AutoencoderKLWan":
        problems.append(problem(where, "_class_name", name, "Give the VAE of Wan, AutoencoderKLWan."))
    return problems or _building_problems(where, "vae", config)


def text_problems(where: str, config: dict[str, Any], text_dim: int) -> list[str]:
    """List the reasons why `config` describes no text encoder for a transformer with text of this width."""
    problems = _section_problems(where, config, ["d_model"], TEXT) + refused_keys(where, config)
    named = config.get("architectures") or TEXT_CLASSES[:1]
    if not (isinstance(named, list) and all(name in TEXT_CLASSES for name in named)):
        remedy = f"Give the text encoder of Wan, {TEXT_CLASSES[0]}; no other class is loaded."
        problems.append(problem(where, "architectures", named, remedy))
    if (kind := config.get("model_type", "umt5")) != "umt5":
        problems.append(problem(where, "model_type", kind, 'Give the text encoder of Wan, of type "umt5".'))
    if not problems and config["d_model"] != text_dim:
        remedy = f"The transformer takes text of width {text_dim}; give the text encoder that belongs to it."
        problems.append(problem(where, "d_model", config["d_model"], remedy))
    problems = problems or _distance_problems(where, config)
    return problems or _building_problems(where, "text_encoder", config | {"num_layers": 1})


def _distance_problems(where: str, config: dict[str, Any]) -> list[str]:
    """List the problem of an encoder whose farthest distance has no bucket, which is an error in its use."""
    key, left_out = "relative_attention_max_distance", UMT5Config()
    exact = config.get("relative_attention_num_buckets", left_out.relative_attention_num_buckets) // 4
    if (given := config.get(key, left_out.relative_attention_max_distance)) > exact:
        return []
    remedy = f"A quarter of the buckets, {exact}, are for single distances; write a larger number."
    return [problem(where, key, given, remedy)]


def pipeline_problems(
    name: str, experts: dict[str, dict[str, Any]], vae: dict[str, Any], scheduler: dict[str, Any]
) -> list[str]:
    """List the problems within the parts of a pipeline, and between them.

    Args:
        experts: transformer config by folder name, the high-noise expert's first.
    """
    files = {folder: f"{name}/{folder}/config.json" for folder in (*experts, "vae")}
    problems = [p for folder, config in experts.items() for p in transformer_problems(files[folder], config)]
    problems += vae_problems(files["vae"], vae)
    shifts = ("flow_shift", "shift")
    given = {key: value for key, value in scheduler.items() if value is not None or key not in shifts}
    scheduler_file = f"{name}/scheduler/scheduler_config.json"
    problems += _section_problems(scheduler_file, given, ["_class_name"], SCHEDULER)
    problems += refused_keys(scheduler_file, scheduler)
    return problems or _unequal(files, experts) + _channel_problems(files, experts, vae)


def _unequal(files: dict[str, str], experts: dict[str, dict[str, Any]]) -> list[str]:
    """Keys in which the experts differ."""
    first = next(iter(experts.values()))
    return [
        problem(files[folder], key, config[key], f"The other expert has {first[key]}; give two of one shape.")
        for folder, config in experts.items()
        for key in NEEDED
        if config[key] != first[key]
    ]


def _channel_problems(
    files: dict[str, str], experts: dict[str, dict[str, Any]], vae: dict[str, Any]
) -> list[str]:
    problems, (first, config) = [], next(iter(experts.items()))
    channels, out = config["in_channels"], config["out_channels"]
    if out != channels:
        remedy = (
            f"It has {channels} input channels; only a Wan with as many outputs as inputs can be distilled."
        )
        problems.append(problem(files[first], "out_channels", out, remedy))
    sizes = {"z_dim": vae["z_dim"], **{key: len(vae[key]) for key in ("latents_mean", "latents_std")}}
    remedy = f"channels, the transformer for {channels}. Give the VAE that belongs to it."
    wrong = {key: size for key, size in sizes.items() if size != channels}
    return problems + [f"{files['vae']}: `{key}` is for {size} {remedy}" for key, size in wrong.items()]


def _section_problems(
    where: str, config: dict[str, Any], needed: list[str], types: dict[str, Any]
) -> list[str]:
    """List the missing keys and the wrong values."""
    missing = [key for key in needed if key not in config]
    problems = [f"{where}: `{key}` is missing. Fetch this file again." for key in missing]
    return problems + value_problems(where, config, types)


def unfit(where: str | Path, error: Exception) -> str:
    """Return the message for one of `UNFIT`."""
    why = str(error) or type(error).__name__
    return f"{where}: it cannot be built from this: {why}. Fetch this file again, or fix it."


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
