"""The components of a pipeline, of known classes and keys alone, made without weights; and their calls.

Nothing else of a folder is loaded, run or copied.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers  # whose classes take a second each to import: where they are used
from diffusers import AutoencoderKLWan, SchedulerMixin, WanTransformer3DModel
from torch import Tensor

from wandistiller.utils.errors import problem
from wandistiller.utils.files import REFUSED, read_json, refused_keys
from wandistiller.wan.text_padding import TEXT_TOKENS
from wandistiller.wan.transformer_config import NEEDED

TOKENIZERS = {
    "T5Tokenizer": "T5TokenizerFast",
    "T5TokenizerFast": "T5TokenizerFast",
    "PreTrainedTokenizerFast": "PreTrainedTokenizerFast",
    "TokenizersBackend": "PreTrainedTokenizerFast",  # as transformers 5 names it
}
"""Classes in tokenizer_config.json, and transformers' that is loaded."""
ANY_STEP, OF_ANY_STEP = "AnyFlowPipeline", "FlowMapEulerDiscreteScheduler"
"""diffusers' pipeline of a flow map, and its scheduler."""
TRANSFORMERS = ["WanTransformer3DModel", "AnyFlowTransformer3DModel"]
"""Classes of networks; the second is the first with a second time."""
COMPONENTS = {
    "text_encoder": ("transformers", ["UMT5EncoderModel"]),
    "tokenizer": ("transformers", list(TOKENIZERS)),
    "transformer": ("diffusers", TRANSFORMERS),
    "transformer_2": ("diffusers", TRANSFORMERS),
    "vae": ("diffusers", ["AutoencoderKLWan"]),
    "image_encoder": ("transformers", ["CLIPVisionModel"]),
    "image_processor": ("transformers", [f"CLIPImageProcessor{end}" for end in ("", "Fast", "Pil")]),
}
"""Library and classes of each component in model_index.json; a scheduler may be any of diffusers."""
IMAGE_PARTS = ("image_encoder", "image_processor")
"""Components of a Wan whose transformer takes the states of given frames."""
OPTIONAL = ("transformer_2", *IMAGE_PARTS)
"""Components that some Wans do without."""
TOKENIZER_KEYS = """
    add_prefix_space added_tokens_decoder additional_special_tokens backend clean_up_tokenization_spaces
    extra_ids extra_special_tokens legacy model_max_length padding_side sp_model_kwargs
    spaces_between_special_tokens split_special_tokens tokenizer_class truncation_side
    bos_token cls_token eos_token mask_token pad_token sep_token unk_token
""".split()
OF_VAE = ["z_dim", "latents_mean", "latents_std"]
VERSIONS = ["_class_name", "_diffusers_version"]
UMT5_XXL = {
    "d_ff": 10240,
    "d_kv": 64,
    "d_model": 4096,
    "num_heads": 64,
    "num_layers": 24,
    "vocab_size": 256384,
}
"""Wan's text encoder. Source: text_encoder/config.json of Wan-AI/Wan2.1-T2V-14B-Diffusers."""

VIT_H = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "patch_size": 14,
    "image_size": 224,
    "hidden_act": "gelu",
}
"""Wan2.1's image encoder. Source: image_encoder/config.json of Wan-AI/Wan2.1-I2V-14B-480P-Diffusers."""


@dataclass(frozen=True)
class PartConfig:
    """The settings of one part of a pipeline, and the file that they are from, in the user's words."""

    where: str
    values: dict[str, Any]

    def problem(self, key: str, remedy: str) -> str:
        return problem(self.where, key, self.values.get(key), remedy)


def index_problems(index: PartConfig, parts: list[str], scheduler: Any) -> list[str]:
    """List the components in model_index.json that are missing, or not of the classes of Wan.

    Args:
        parts: folder names of the transformers that are here, and of an image encoder's if they take it.
        scheduler: class in the scheduler's own file.
    """
    problems = refused_keys(index.where, index.values)
    if index.values.get("_class_name") == ANY_STEP and scheduler != OF_ANY_STEP:
        remedy = f"A flow map is sampled by {OF_ANY_STEP} alone. Fetch scheduler/ again."
        problems.append(problem(index.where, "scheduler", scheduler, remedy))
    # an unknown one is told where it is read
    of_flow = scheduler if scheduler_class(scheduler) else "UniPCMultistepScheduler"
    classes = COMPONENTS | {"scheduler": ("diffusers", [of_flow])}
    for part, component in (dict.fromkeys(classes) | index.values).items():
        if part in classes and (part not in OPTIONAL or part in parts):
            library, names = classes[part]
            if component not in [[library, name] for name in names]:
                remedy = f'Write ["{library}", "{names[0]}"]: no other class is loaded.'
                problems.append(index.problem(part, remedy))
        elif isinstance(component, list | dict) and part not in REFUSED and component != [None, None]:
            remedy = "It has no such part. Give the whole pipeline, or write [null, null]."
            problems.append(index.problem(part, remedy))
    return problems


def tokenizer_problems(where: str, folder: Path) -> list[str]:
    """List what no tokenizer of Wan has in the JSON files that say how to make it, where they are here."""
    problems = []
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).is_file():
            config = read_json(folder / name)
            problems += refused_keys(f"{where}/{name}", config)
            kind = config.get("tokenizer_class", "T5Tokenizer") if name == "tokenizer_config.json" else None
            if kind is not None and not (isinstance(kind, str) and kind in TOKENIZERS):
                remedy = f"Write one of: {', '.join(TOKENIZERS)}. No other class is loaded."
                problems.append(problem(f"{where}/{name}", "tokenizer_class", kind, remedy))
    return problems


def load_tokenizer(folder: Path) -> "transformers.PreTrainedTokenizerFast":
    """Load the tokenizer in `folder` by its class in TOKENIZERS; a wrong one raises any exception."""
    file = folder / "tokenizer_config.json"
    name = read_json(file).get("tokenizer_class") if file.is_file() else None
    kind = getattr(transformers, TOKENIZERS[name or "T5Tokenizer"])
    return kind.from_pretrained(folder, trust_remote_code=False)


def tokenize(
    tokenizer: "transformers.PreTrainedTokenizerFast", prompt: str, *, padded: bool = False
) -> "transformers.BatchEncoding":
    """Return ids and mask of a prompt, cut to what the transformer takes, as WanPipeline does.

    Args:
        padded: to that length, as WanPipeline does too.
    """
    cut = {"max_length": TEXT_TOKENS, "truncation": True, "padding": "max_length" if padded else False}
    return tokenizer([prompt], **cut, return_attention_mask=True, return_tensors="pt")


def known_config(file: Path) -> dict[str, Any]:
    """Return a pipeline's JSON file, in its place, with the keys that the class behind it knows."""
    config, part, name = read_json(file), file.parent.name, file.name
    kinds: dict[str, Any] = {"vae": AutoencoderKLWan, "scheduler": scheduler_class(config.get("_class_name"))}
    kinds |= dict.fromkeys(("transformer", "transformer_2"), WanTransformer3DModel)
    libraries = {"image_encoder": "CLIPVisionConfig", "image_processor": "CLIPImageProcessor"}
    known: Iterable[str] = config
    if name == "model_index.json":
        known = [*COMPONENTS, "scheduler", "boundary_ratio", "expand_timesteps", *VERSIONS]
    elif part == "text_encoder" and name == "config.json":
        known = text_encoder_keys()
    elif part in libraries:
        known = {*getattr(transformers, libraries[part])().to_dict(), "architectures"} - {"_name_or_path"}
    elif part == "tokenizer" and name in ("tokenizer_config.json", "special_tokens_map.json"):
        known = TOKENIZER_KEYS
    elif name in ("config.json", "scheduler_config.json") and (kind := kinds.get(part)):
        known = [*inspect.signature(kind.__init__).parameters, *VERSIONS]
    return {key: value for key, value in config.items() if key in known}


@cache
def text_encoder_keys() -> set[str]:
    """Return the keys of UMT5, without the path of the machine that wrote the file."""
    return {*transformers.UMT5Config().to_dict(), "torch_dtype"} - {"_name_or_path"}


def text_config(folder: Path) -> dict[str, Any]:
    """Return the text encoder's config; Wan's own if the pipeline has none."""
    file = folder / "text_encoder" / "config.json"
    return read_json(file) if file.is_file() else UMT5_XXL


def filled(part: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a VAE or transformer with diffusers' values of keys that are needed here."""
    kind, keys = (AutoencoderKLWan, OF_VAE) if part == "vae" else (WanTransformer3DModel, NEEDED)
    parameters = inspect.signature(kind.__init__).parameters
    defaults = {key: parameters[key].default for key in keys}
    return {k: [*v] if isinstance(v, tuple) else v for k, v in defaults.items()} | config


def vae_of(config: dict[str, Any]) -> AutoencoderKLWan:
    """Make the VAE that `config` describes, untrained, in float32, on the current default device."""
    return AutoencoderKLWan.from_config(config).eval()


def umt5_config(config: dict[str, Any]) -> "transformers.UMT5Config":
    known = {key: value for key, value in config.items() if key in text_encoder_keys()}
    return transformers.UMT5Config.from_dict(known)


def text_encoder_of(
    config: dict[str, Any], dtype: torch.dtype = torch.float32
) -> "transformers.UMT5EncoderModel":
    """Make the text encoder that `config` describes, untrained, on the current default device."""
    return transformers.UMT5EncoderModel._from_config(umt5_config(config), dtype=dtype).eval()


def image_config(folder: Path) -> dict[str, Any]:
    """Return the image encoder's config; Wan2.1's own, CLIP's ViT-H/14, if the pipeline has none."""
    file = folder / "image_encoder" / "config.json"
    return read_json(file) if file.is_file() else VIT_H


def image_encoder_of(config: dict[str, Any]) -> "transformers.CLIPVisionModel":
    """Make the image encoder that `config` describes, untrained, on the current default device."""
    return transformers.CLIPVisionModel._from_config(transformers.CLIPVisionConfig.from_dict(config)).eval()


def states(encoder: "transformers.UMT5EncoderModel", token_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Return text_BLD of token ids; `mask_BL` is 0 at padding."""
    return encoder(token_BL, mask_BL).last_hidden_state


def encoded(vae: AutoencoderKLWan, pixels_BCFHW: Tensor) -> Tensor:
    """Encode pixels in [-1, 1] to the posterior's mode z_BCFHW."""
    return vae.encode(pixels_BCFHW).latent_dist.mode()


def decoded(vae: AutoencoderKLWan, z_BCFHW: Tensor) -> Tensor:
    """Decode z_BCFHW to pixels_BCFHW in [0, 1]."""
    return (vae.decode(z_BCFHW).sample / 2 + 0.5).clamp(0, 1)


FLOW = "flow_prediction"
ROUNDING = 1e-5
"""Of the first noise level, 1, in float32."""


def scheduler_class(name: Any) -> type[SchedulerMixin] | None:
    """Return diffusers' scheduler of this name, if it has one."""
    kind = getattr(diffusers.schedulers, name, None) if isinstance(name, str) else None
    is_one = isinstance(kind, type) and issubclass(kind, SchedulerMixin) and kind is not SchedulerMixin
    return kind if is_one else None


def own_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return all settings that the class of a scheduler_config.json reads, with its defaults.

    diffusers (0.42.1) keeps other keys in a file: those of the class from whose config a scheduler was made.
    """
    parameters = inspect.signature(scheduler_class(config["_class_name"]).__init__).parameters
    return {name: config.get(name, p.default) for name, p in parameters.items() if name != "self"}


def shift_key(config: dict[str, Any]) -> str | None:
    """Return the key under which the class of a scheduler_config.json reads its shift, if it has one."""
    return next((key for key in ("flow_shift", "shift") if key in own_settings(config)), None)


def flow_problem(config: dict[str, Any]) -> tuple[str, str] | None:
    """Return the key for which a scheduler is none of a flow, and what to write there; None for a flow's."""
    settings = own_settings(config)
    if settings.get("use_flow_sigmas") is False:
        return "use_flow_sigmas", "The noise levels of Wan, a flow, fall from 1 to 0. Write true."
    if "use_flow_sigmas" in settings and settings.get("prediction_type", FLOW) != FLOW:
        return "prediction_type", f'Wan predicts the velocity of a flow. Write "{FLOW}".'
    scheduler = scheduler_class(config["_class_name"]).from_config(settings)
    scheduler.set_timesteps(3)
    first, last = (getattr(scheduler, "sigmas", [0.0, 0.0])[i] for i in (0, -1))
    if not (0.9 < first < 1 + ROUNDING and 0 <= last < 0.05 and shift_key(config)):
        remedy = f'UniPCMultistepScheduler, "use_flow_sigmas": true and "prediction_type": "{FLOW}".'
        text = "It does not have the noise levels of a flow: from 1 to 0, with a shift. Write"
        return "_class_name", f"{text} {remedy}"
    return None
