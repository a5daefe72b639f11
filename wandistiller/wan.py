"""The only file that knows diffusers' Wan: what a pipeline folder holds, how its weights are read, what it answers."""

import inspect
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,  # of the library that huggingface_hub asks with: httpx, or httpx2 from huggingface_hub 2 on
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import Tensor, nn

from wandistiller.batch import Expert
from wandistiller.config import read_json
from wandistiller.kinds import KINDS
from wandistiller.noise import timestep
from wandistiller.pipeline_parts import UNFIT, part_problems, unfit
from wandistiller.problems import ConfigError, problem, readable
from wandistiller.wan_configs import pipeline_problems
from wandistiller.weights import WeightReader

TINY = Path(__file__).parent / "tiny"
# What is fetched of a hub id: first what `open_wan` reads, later the weights; no .bin, .pth, fp16 copies, videos.
CONFIG_FILES = ["model_index.json", "scheduler/*.json", "vae/config.json", "text_encoder/config.json", "transformer*/config.json",
                "README.md"]  # its licence is that of the student
PARTS = {"transformer": "diffusion_pytorch_model", "transformer_2": "diffusion_pytorch_model",
         "vae": "diffusion_pytorch_model", "text_encoder": "model"}  # fmt: skip
WEIGHT_FILES = ["tokenizer/*", "text_encoder/*.json"] + [
    f"{part}/{stem}{end}" for part, stem in PARTS.items()
    for end in (".safetensors", "-?????-of-?????.safetensors", ".safetensors.index.json")
]  # fmt: skip
TEXT_TOKENS = 512  # what WanPipeline.__call__ passes; encode_prompt's own default of 226 is not what Wan saw


@dataclass(frozen=True, slots=True)
class WanFolder:
    """A diffusers Wan pipeline on disk, described from its JSON files; no weight is read."""

    path: Path
    name: str
    """As the user gave it."""
    configs: dict[Expert, dict[str, Any]]
    """Transformer config per expert; two for Wan2.2 A14B, one otherwise."""
    boundary: float | None
    shift: float
    vae: dict[str, Any]
    revision: str | None = None
    """Of a hub id: the commit that was opened; whatever is fetched later comes from the same."""

    @property
    def config(self) -> dict[str, Any]:
        return self.configs[Expert.HIGH_NOISE]

    @property
    def is_tiny(self) -> bool:
        return self.path == TINY

    @property
    def spatial(self) -> int:
        """Pixels per latent pixel."""
        return self.vae.get("scale_factor_spatial", 8)

    @property
    def fps(self) -> int:
        """Frames a second of its videos: Wan2.2 5B's 24, which its VAE tells, or 16."""
        return 24 if self.spatial == 16 else 16

    @property
    def temporal(self) -> int:
        """Frames per latent frame."""
        return self.vae.get("scale_factor_temporal", 4)

    def latent_shape(self, height: int, width: int, num_frames: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of one sample of the given size in pixels and frames."""
        frames = (num_frames - 1) // self.temporal + 1
        return self.config["in_channels"], frames, height // self.spatial, width // self.spatial

    def tokens(self, height: int, width: int, num_frames: int) -> int:
        """Patches of one sample of the given size, which is what attention sees."""
        shape = self.latent_shape(height, width, num_frames)[1:]
        return math.prod(n // p for n, p in zip(shape, self.config["patch_size"], strict=True))

    def size_problems(self, height: int, width: int, num_frames: int) -> list[str]:
        """What keeps a size from being made of whole latents and whole patches."""
        patch = self.config["patch_size"]
        found, rope = [], self.config["rope_max_seq_len"]
        for key, value, multiple in (("height", height, self.spatial * patch[1]), ("width", width, self.spatial * patch[2])):
            if value > rope * multiple:
                found.append(problem(self.name, key, value, f"This teacher knows places up to {rope * multiple}. Write less."))
            elif value % multiple:
                near = max(multiple, round(value / multiple) * multiple)
                found.append(problem(self.name, key, value, f"This teacher needs a multiple of {multiple}, e.g. {near}."))
        if num_frames > (rope * patch[0] - 1) * self.temporal + 1:
            most = (rope * patch[0] - 1) * self.temporal + 1
            found.append(problem(self.name, "num_frames", num_frames, f"This teacher knows places up to {most}. Write less."))
        elif (num_frames - 1) % self.temporal:
            near = (num_frames - 1) // self.temporal * self.temporal + 1
            found.append(problem(self.name, "num_frames", num_frames, f"Write {self.temporal}k + 1, e.g. {near}."))
        return found


@readable()
def require_weights(folder: WanFolder) -> None:
    """Make sure that all weights are here and fit their configs, before any is loaded; those of a hub id are fetched.

    Raises:
        ConfigError: names every part without a safetensors file, and every tensor that is missing, cut off or misshapen.
    """
    remedy = "Give the whole pipeline."
    if folder.revision:
        _fetch(folder.name, folder.revision, CONFIG_FILES + WEIGHT_FILES)
        offline = f"It is not in {constants.HF_HUB_CACHE}, and this machine is offline (HF_HUB_OFFLINE). Fetch it elsewhere."
        remedy = offline if constants.HF_HUB_OFFLINE else remedy
    parts = [*(e.value for e in folder.configs), "vae", "text_encoder"]
    empty = [part for part in parts if not any((folder.path / part).glob("*.safetensors"))]
    found = [f"{folder.name}: no .safetensors file in {part}/. {remedy}" for part in empty]
    for expert, config in folder.configs.items():
        if expert.value not in empty:
            found += weight_problems(folder.path / expert.value, config)
    found += part_problems(folder.path, folder.vae, folder.config["text_dim"]) if not {"vae", "text_encoder"} & {*empty} else []
    if found:
        raise ConfigError(*found)


def weight_problems(source: Path, config: dict[str, Any]) -> list[str]:
    """Every tensor in `source` that is missing, unexpected, cut off or not as `config` has it; reads headers only."""
    try:
        reader = WeightReader(source)
    except ConfigError as error:
        return error.problems
    model = skeleton(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return reader.problems(source, shapes, model._keys_to_ignore_on_load_unexpected)


@readable()
def open_wan(name: str, weights: bool = False, revision: str | None = None) -> WanFolder:
    """Describe a diffusers Wan pipeline: a folder, a hub id, or `tiny`.

    Args:
        weights: for a hub id, fetch the weights too and not only the JSON files.
        revision: branch, tag or commit of a hub id; None is its main branch.
    Raises:
        ConfigError: there is no such folder, or it is no Wan text-to-video pipeline.
    """
    path, commit = TINY if name == "tiny" else Path(name), None
    if not path.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        path = _fetch(name, revision or "main", CONFIG_FILES + WEIGHT_FILES if weights else CONFIG_FILES)
        commit = path.name
    elif revision:
        raise ConfigError(problem(name, "teacher_revision", revision, "Only a hub id has revisions; leave it out."))
    index = _read(path / "model_index.json", name)
    if index.get("_class_name") != "WanPipeline":
        raise ConfigError(problem(f"{name}/model_index.json", "_class_name", index.get("_class_name"),
                                  "Give a diffusers Wan text-to-video pipeline (WanPipeline)."))  # fmt: skip
    # boundary_ratio alone proves nothing: a converted Wan2.1 can carry it without a second transformer
    experts = [e for e in Expert if (path / e.value / "config.json").is_file()]
    if Expert.HIGH_NOISE not in experts:
        raise ConfigError(f"{name}: no transformer/config.json. Give a complete diffusers pipeline folder.")
    usual = _defaults(WanTransformer3DModel, "cross_attn_norm")
    configs = {e: usual | _read(path / e.value / "config.json", name) for e in experts}
    vae = _defaults(AutoencoderKLWan, "latents_mean", "latents_std") | _read(path / "vae" / "config.json", name)
    scheduler = _read(path / "scheduler" / "scheduler_config.json", name)
    boundary = index.get("boundary_ratio") if len(experts) == 2 else None
    found = pipeline_problems(name, {e.value: config for e, config in configs.items()}, vae, scheduler)
    if len(experts) == 2 and not KINDS["a number between 0 and 1"](boundary):
        found.append(problem(f"{name}/model_index.json", "boundary_ratio", boundary,
                             "It has two experts; write where they meet (Wan2.2 A14B: 0.875)."))  # fmt: skip
    if found := found or _scheduler_problems(f"{name}/scheduler/scheduler_config.json", scheduler):
        raise ConfigError(*found)
    shift = scheduler.get("flow_shift", scheduler.get("shift")) or 1.0
    return WanFolder(path, name, configs, boundary, float(shift), vae, commit)


def _scheduler_problems(where: str, config: dict[str, Any]) -> list[str]:
    kind = getattr(diffusers, config["_class_name"], None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)):
        return [problem(where, "_class_name", config["_class_name"], "Name a scheduler of diffusers: UniPCMultistepScheduler.")]
    try:
        scheduler, nothing = kind.from_config(config), torch.zeros(1, 1, 1, 1, 1)
        scheduler.set_timesteps(2)
        scheduler.step(nothing, scheduler.timesteps[0], nothing)
    except UNFIT as error:
        return [unfit(where, error)]
    return []


def _fetch(hub_id: str, revision: str, files: list[str]) -> Path:
    """The snapshot of a hub repository in the hub's cache, for which only what is missing is fetched."""
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=files))
    except (HTTPError, HFValidationError, OSError) as error:
        raise ConfigError(f"{hub_id}: no such folder here, and {_why_not(error, hub_id, revision)}") from None


def _why_not(error: Exception, hub_id: str, revision: str) -> str:
    """What the hub's refusal means, and what to do."""
    if isinstance(error, LocalEntryNotFoundError):
        lacking = f"revision `{revision}` of that hub id is not in {constants.HF_HUB_CACHE}, and"
        if constants.HF_HUB_OFFLINE:
            return f"{lacking} this machine is offline (HF_HUB_OFFLINE). Fetch it elsewhere, or give a folder."
        return f"{lacking} {constants.ENDPOINT} cannot be reached. Fetch it elsewhere, or give a folder."
    if isinstance(error, GatedRepoError):
        return f"that hub id is gated. Accept its terms at {constants.ENDPOINT}/{hub_id} and put your token into HF_TOKEN."
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such hub id, or it is private. Mend the name, or put a token that may read it into HF_TOKEN."
    if isinstance(error, RevisionNotFoundError):
        return f"that hub id has no revision `{revision}`. Give one of its branches, tags or commits."
    return f"the hub did not give it: {(str(error).strip() or type(error).__name__).splitlines()[0]}"


def _defaults(model: type, *keys: str) -> dict[str, Any]:
    """What diffusers takes where a config leaves these out, as those of some conversions do."""
    parameters = inspect.signature(model.__init__).parameters
    return {key: parameters[key].default for key in keys}


def _read(file: Path, name: str) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"{name}: no file {file}. "
                          "Give a complete diffusers Wan pipeline folder, a hub id, or `tiny`.")  # fmt: skip
    return read_json(file)


def skeleton(config: dict[str, Any]) -> WanTransformer3DModel:
    """The model without memory for its parameters (meta device), with real rope tables."""
    with torch.device("meta"):
        model = WanTransformer3DModel.from_config(config)
    model.rope = fresh_rope(model)
    return model


def fresh_rope(model: WanTransformer3DModel) -> nn.Module:
    """Rope tables in float32.

    zero.Init builds float tables in its own dtype, and `data_types.buffer_dtype` casts buffers (deepspeed 0.19.8): in
    bf16 cos is off by up to 2.0 at 1024 positions. tests/test_wan.py::test_rope_tables_survive_every_engine.
    """
    c = model.config
    return type(model.rope)(c.attention_head_dim, c.patch_size, c.rope_max_seq_len)


def top_modules(config: dict[str, Any]) -> list[str]:
    """What a device map gives devices to: each block, and the model's other modules."""
    model = skeleton(config | {"num_layers": 1})
    others = [name for name, module in model.named_children() if name != "blocks" and list(module.parameters())]
    return [f"blocks.{i}" for i in range(config["num_layers"])] + others


def width(config: dict[str, Any]) -> int:
    """Numbers in one token's hidden state."""
    return config["num_attention_heads"] * config["attention_head_dim"]


def count_parameters(config: dict[str, Any]) -> int:
    """Parameters of the transformer that `config` describes."""
    return sum(p.numel() for p in skeleton(config).parameters())


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What diffusers' from_pretrained gives a parameter: `_keep_in_fp32_modules` stay float32."""
    kept = set(WanTransformer3DModel._keep_in_fp32_modules)
    return torch.float32 if kept & set(name.split(".")) else dtype


def put(module: nn.Module, name: str, value: Tensor) -> None:
    *path, leaf = name.split(".")
    setattr(module.get_submodule(".".join(path)), leaf, nn.Parameter(value, requires_grad=False))


def velocity(model: nn.Module, x_t_BCFHW: Tensor, sigma_B: Tensor, text_BLD: Tensor) -> Tensor:
    """Ask a WanTransformer3DModel for v = noise - x0.

    Args:
        x_t_BCFHW: noisy normalised latents, any float dtype; cast to the model's.
        sigma_B: in [0, 1], 1 is pure noise.
        text_BLD: UMT5 states, zero-padded to 512 tokens.
    Returns:
        v_BCFHW, float32.
    """
    dtype = model.patch_embedding.weight.dtype
    return model(
        hidden_states=x_t_BCFHW.to(dtype), timestep=timestep(sigma_B), encoder_hidden_states=text_BLD.to(dtype),
        return_dict=False,
    )[0].float()  # fmt: skip
