"""Checks of a Wan pipeline: its files, whose parts are built and called without memory, and its weights."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import nn

from wandistiller.network.weight_reader import DIFFUSERS_STEM, NAMED, WeightReader, damage_in, unfinished
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json
from wandistiller.utils.memoize import once_for_each
from wandistiller.utils.validation import of_type, value_problems, write
from wandistiller.wan import components
from wandistiller.wan.components import flow_problem, own_settings, scheduler_class
from wandistiller.wan.transformer_config import NEEDED, TransformerConfig

TEXT_TO_VIDEO, IMAGE_TO_VIDEO = "WanPipeline", "WanImageToVideoPipeline"
"""diffusers' classes of the pipelines that can be distilled."""
PIPELINES = (TEXT_TO_VIDEO, IMAGE_TO_VIDEO, components.ANY_STEP)
"""Those that are opened."""
M = TypeVar("M", bound=nn.Module)
UNSUPPORTED = "VACE, Animate and speech-to-video Wans are not supported."
Layers = Annotated[int, Field(ge=1, le=1024)]
Size = Annotated[int, Field(ge=1, le=10**6)]
Patch = Annotated[list[Size], Field(min_length=3, max_length=3), write("three positive integers")]
NUMBERS = of_type(
    (Layers, "num_layers num_res_blocks"),
    (Annotated[int, Field(ge=2, le=1024, multiple_of=2)], "attention_head_dim"),  # for rope
    (Size, "num_attention_heads ffn_dim text_dim in_channels out_channels"),
    (Size, "rope_max_seq_len z_dim scale_factor_spatial scale_factor_temporal"),
    (Literal["r"], "deltatime_type"),
)
"""Types of the numbers that are computed with here; the libraries check all others."""
TIED = "encoder.embed_tokens.weight"
"""Another name of UMT5's `shared.weight`; a file has either or both."""
MAY_BE_ZERO = ("to_out.", "ffn.net.2.", ".proj.")
"""Parts of names of matrices before a residual connection: zero in a block that was made to do nothing."""

CLASSES = {
    "transformer": ("_class_name", components.TRANSFORMERS),
    "vae": ("_class_name", ["AutoencoderKLWan"]),
    "text_encoder": ("architectures", ["UMT5EncoderModel", "UMT5Model", "UMT5ForConditionalGeneration"]),
}
"""Part -> the key of its class in its config.json, and the classes that are loaded."""


def part_problems(part: str, config: components.PartConfig) -> list[str]:
    """List the reasons why a transformer, VAE or text encoder of Wan cannot be made of `config`."""
    numbers = NUMBERS | {"patch_size": Patch if part == "transformer" else Size | None}
    where, values = config.where, config.values
    problems = value_problems(where, values, numbers) + components.refused_keys(where, values)
    key, classes = CLASSES[part]
    named = values.get(key) or classes[0]
    if not all(name in classes for name in (named if isinstance(named, list) else [named])):
        remedy = f"Give a Wan whose class is {classes[0]}; no other is loaded. {UNSUPPORTED}"
        problems.append(config.problem(key, remedy))
    return problems or _unfit(part, config)


def _try(part: str, values: dict[str, Any]) -> None:
    """Make a part and, where it is cheap, call it, both on the current default device."""
    if part == "transformer":
        config = TransformerConfig.of(values | {"num_layers": 1})
        rows = (2, config.pos_embed_seq_len // 2) if config.pos_embed_seq_len else (1, 1)
        image_BLD = torch.zeros(*rows, config.image_dim) if config.image_dim else None
        x_t_BCFHW = torch.zeros(1, config.in_channels, *config.patch_size)
        config.meta()(x_t_BCFHW, torch.zeros(1), torch.zeros(1, 1, config.text_dim), image_BLD)
    elif part == "vae":
        components.vae_of(values)
        torch.tensor([values["latents_mean"], values["latents_std"]]).view(2, values["z_dim"]).float()
    elif part == "text_encoder":
        components.states(
            components.text_encoder_of(values | {"num_layers": 1}), torch.zeros(1, 2, dtype=torch.long), None
        )
    else:
        scheduler, nothing = scheduler_class(values["_class_name"]).from_config(values), torch.zeros([1] * 5)
        scheduler.set_timesteps(3)
        for t in scheduler.timesteps:  # some settings are used from the second step on
            scheduler.step(nothing, t, nothing)


def _unfit(part: str, config: components.PartConfig) -> list[str]:
    """List the library's reason why a part cannot be made of these settings; it takes no memory."""
    why = _refusal(part, config.values)
    text = f"{config.where}: it cannot be built from this: {why}. Fix it, or fetch this file again."
    return [text] if why else []


@once_for_each
def _refusal(part: str, values: dict[str, Any]) -> str:
    try:
        with torch.device("cpu" if part == "scheduler" else "meta"), torch.no_grad():
            _try(part, values)
    except Exception as error:  # of the libraries any
        return str(error) or type(error).__name__
    return ""


def unequal_problems(
    index: components.PartConfig,
    experts: list[components.PartConfig],
    vae: components.PartConfig,
    text: components.PartConfig | None,
) -> list[str]:
    """List the sizes in which the parts of a pipeline do not fit together."""
    kind, first = index.values["_class_name"], experts[0].values
    channels, joined = first["out_channels"], 0
    if kind == IMAGE_TO_VIDEO and not index.values.get("expand_timesteps"):  # a mask, and latents
        joined = vae.values.get("scale_factor_temporal", 4) + channels
    wanted = [(experts[0], "in_channels", channels + joined), (vae, "z_dim", channels)]
    wanted += [(other, key, first[key]) for other in experts[1:] for key in NEEDED]
    wanted += [(text, "d_model", first["text_dim"])] if text else []
    return [
        part.problem(
            key, f"The other parts of this {kind} are for {size}. Give the one that belongs to them."
        )
        for part, key, size in wanted
        if part.values.get(key, size) != size
    ]


def scheduler_problems(config: components.PartConfig) -> list[str]:
    """List the reason why the scheduler cannot be made of `config`, or not be used."""
    if not scheduler_class(config.values.get("_class_name")):
        return [config.problem("_class_name", "Name a scheduler of diffusers: UniPCMultistepScheduler.")]
    if problems := _unfit("scheduler", config):
        dynamic = own_settings(config.values).get("use_dynamic_shifting")
        remedy = "A Wan has one shift for all sizes. Write false here, and that shift under `shift`."
        return [config.problem("use_dynamic_shifting", remedy)] if dynamic else problems
    wrong = flow_problem(config.values)
    return [config.problem(*wrong)] if wrong else []


def component_problems(folder: Path, *, image: bool) -> list[str]:
    """List missing, truncated or misshapen tensors of VAE and encoders, and a tokenizer that fails.

    Args:
        image: the transformer takes an image encoder's states.
    """
    problems = _loaded_tokenizer_problems(folder / "tokenizer")
    parts = ["vae", "text_encoder", *(["image_encoder"] if image else [])]
    if (file := folder / "text_encoder" / "adapter_config.json").exists():  # peft would add it to the weights
        problems.append(f"{file}: Delete it; a text encoder is loaded without adapters.")
    files = [f"{part}/config.json" for part in parts] + ["image_processor/preprocessor_config.json"] * image
    if lacking := [name for name in files if not (folder / name).is_file()]:
        return problems + [f"{folder / name}: no such file. Give the whole pipeline." for name in lacking]
    for part in parts:
        values = read_json(folder / part / "config.json")
        problems += components.refused_keys(folder / part / "config.json", values)
        stem = DIFFUSERS_STEM if part == "vae" else "model"
        problems += weight_problems(folder / part, *_parameters(part, values), stem)
    return problems


@once_for_each
def _parameters(part: str, values: dict[str, Any]) -> tuple[dict[str, torch.Size], list[str] | None]:
    """Return shapes by name, and the names that the library ignores in a file."""
    with torch.device("meta"):
        model = getattr(components, f"{part}_of")(values)
    return {name: p.shape for name, p in model.named_parameters()}, model._keys_to_ignore_on_load_unexpected


def _loaded_tokenizer_problems(folder: Path) -> list[str]:
    names = ("tokenizer.json", "spiece.model")
    if problems := unfinished(folder, names):
        return problems
    files = [folder / name for name in names if (folder / name).is_file()]
    if problems := [f"{file}: {what}" for file in files if (what := damage_in(file))]:
        return problems
    if not files:
        return [f"{folder}: no tokenizer.json or spiece.model in it. Give the whole pipeline."]
    try:
        tokens = components.tokenize(components.load_tokenizer(folder), "a red circle", padded=True)
    except Exception as error:  # tokenizers raises it bare
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [f"{folder}: it cannot be read: {why}. Fetch the folder again."]
    vocabulary = components.umt5_config(components.text_config(folder.parent)).vocab_size
    if int(tokens.input_ids.max()) < vocabulary:
        return []
    return [f"{folder}: it has more tokens than the text encoder, {vocabulary}. Give its own."]


def transformer_problems(folder: Path, config: TransformerConfig, held: Iterable[str] = ()) -> list[str]:
    """List the tensors in `folder` that are not a transformer's; those of the names `held` are elsewhere."""
    shapes = {name: shape for name, shape in config.shapes.items() if name not in held}
    return weight_problems(folder, shapes, [*(config.kind._keys_to_ignore_on_load_unexpected or ()), *held])


def weight_problems(
    folder: Path, shapes: Mapping[str, Sequence[int]], ignored: list[str] | None, stem: str = DIFFUSERS_STEM
) -> list[str]:
    """List the tensors in `folder` without these names and shapes, from the files' headers."""
    try:
        reader = WeightReader(folder, stem)
    except ConfigError as error:
        return error.problems
    # of an image encoder transformers 4 began the names otherwise
    begins = "vision_model." if all(name.startswith("vision_model.") for name in reader.stored) else ""
    expected = {f"{begins}{name}": torch.Size(shape) for name, shape in shapes.items()}
    if TIED in reader.stored and "shared.weight" in expected:
        expected[TIED] = expected["shared.weight"]
        if "shared.weight" not in reader.stored:
            del expected["shared.weight"]
    return reader.problems(expected, ignored)


def zero_problems(folder: Path, matrices: Iterable[str]) -> list[str]:
    """List the problem of `matrices`, names of tensors of two dimensions or more that hold nothing but zeros.

    A file has such where a download left a hole.
    """
    zero = sorted(name for name in matrices if not any(part in name for part in MAY_BE_ZERO))
    if not zero:
        return []
    others = f" and {len(zero) - NAMED} more" if len(zero) > NAMED else ""
    shown = ", ".join(f"`{name}`" for name in zero[:NAMED])
    remedy = "A download left holes in it, or it was never trained. Fetch the folder again."
    return [f"{folder}: {len(zero)} tensor(s) hold nothing but zeros: {shown}{others}. {remedy}"]


def sound(model: M, folder: Path) -> M:
    """Return a model that was loaded from `folder`, with its weights checked, but for those not in memory.

    Raises:
        ConfigError: numbers that are not finite, or matrices of zeros.
    """
    zero, problems = [], []
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta" or not parameter.numel():
            continue
        low, high = parameter.detach().aminmax()
        if not (low.isfinite() and high.isfinite()):
            remedy = "Fetch the folder again."
            problems.append(f"{folder}: tensor `{name}` holds numbers that are not finite. {remedy}")
        elif low == high == 0 and parameter.ndim >= 2:
            zero.append(name)
    if problems := problems[:NAMED] + zero_problems(folder, zero):
        raise ConfigError(*problems)
    return model.eval()
