"""One Wan transformer: its meta-device copy, sizes, parameter dtypes, kernels and velocity."""

import inspect
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.modeling_utils import no_init_weights
from torch import Tensor, nn

from wandistiller.batch import Conditioning, State
from wandistiller.engine.kernels import Kernels
from wandistiller.experts import Expert
from wandistiller.flow import TRAIN_TIMESTEPS
from wandistiller.utils.memoize import once_for_each
from wandistiller.wan.structure import BLOCKS, in_block, is_in_block
from wandistiller.wan.text_padding import TEXT_TOKENS, network_text
from wandistiller.wan.transformer_config import TransformerConfig

IMAGE_ROWS = 257
"""States of a frame: of 16 x 16 patches, and of the whole; CLIP's ViT-H/14 at 224 pixels."""


def meta_transformer(config: TransformerConfig, device: torch.device | None = None) -> WanTransformer3DModel:
    """Make the model without memory for its parameters (meta device), with real rope tables on `device`."""
    # torch draws even numbers that have no memory, half of the time
    with no_init_weights(), torch.device("meta"):
        model = WanTransformer3DModel.from_config(config.raw)
    renew_rope(model, device)
    return model


def usual_config(**sizes: Any) -> TransformerConfig:
    """Return diffusers' default config, that of Wan2.1 14B, with other sizes."""
    parameters = inspect.signature(WanTransformer3DModel.__init__).parameters.values()
    return TransformerConfig.of({p.name: p.default for p in parameters if p.name != "self"} | sizes)


def renew_rope(model: WanTransformer3DModel, device: torch.device | None = None) -> None:
    """Make the rope tables of `model` again, in float32, on `device` or torch's default one.

    zero.Init builds float tables in its own dtype, and `data_types.buffer_dtype` casts buffers (deepspeed
    0.19.8): in bf16 cos is off by up to 2.0 at 1024 positions.
    tests/unit/wan/test_wan.py::test_rope_tables_survive_every_engine.
    """
    c = model.config
    model.rope = type(model.rope)(c.attention_head_dim, c.patch_size, c.rope_max_seq_len).to(device)


def share_rope(model: WanTransformer3DModel, other: WanTransformer3DModel) -> None:
    """Give `model` the rope tables of another network of its config, where that computes."""
    model.rope = other.rope


def called_in_turn(model: WanTransformer3DModel) -> list[nn.Module]:
    """Return the modules that have nearly all weights, in the order of their calls."""
    return [model.condition_embedder, *model.blocks]


def top_modules(config: TransformerConfig) -> list[str]:
    """Return the modules that a device map assigns to devices: each block, and the model's other modules."""
    children = meta_transformer(config.replaced(num_layers=1)).named_children()
    others = [name for name, module in children if name != BLOCKS and list(module.parameters())]
    return [in_block(i) for i in range(config.num_layers)] + others


def count_parameters(config: TransformerConfig) -> int:
    return sum(numels(config).values())


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter in diffusers' from_pretrained: `_keep_in_fp32_modules` stay float32."""
    kept = set(WanTransformer3DModel._keep_in_fp32_modules)
    return torch.float32 if kept & set(name.split(".")) else dtype


def set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter by `value`, without gradient."""
    *path, leaf = name.split(".")
    setattr(module.get_submodule(".".join(path)), leaf, nn.Parameter(value, requires_grad=False))


def use_kernels(model: WanTransformer3DModel, kernels: Kernels) -> None:
    """Compute the blocks of `model` with these kernels from now on.

    diffusers' own `set_attention_backend` (0.42.1) would change the default of all networks of the process,
    and cross-attention too, which is short and may have a bias.
    """
    for block in model.blocks:
        if kernels.attention != "native":
            block.attn1.processor._attention_backend = AttentionBackendName(kernels.attention)
        if kernels.compile:  # without the hooks around it, which fetch weights
            block.forward = torch.compile(block.forward)


def new_network(config: TransformerConfig) -> nn.Module:
    return WanTransformer3DModel.from_config(config.raw)


def blank_state(
    config: TransformerConfig,
    latent: tuple[int, ...],
    samples: int = 1,
    text_tokens: int = TEXT_TOKENS,
    device: str | torch.device = "cpu",
) -> State:
    """Return a state with the shapes that the network is given, float32, without values.

    Args:
        latent: shape CFHW.
    """

    def empty(*shape: int) -> Tensor:
        return torch.empty(samples, *shape, device=device)

    channels, _, *sides = latent
    joined, rows = config.joined_channels, config.pos_embed_seq_len or IMAGE_ROWS
    conditioning = Conditioning(
        empty(text_tokens, config.text_dim),
        joined_BCFHW=empty(joined, *latent[1:]) if joined else None,
        first_BCFHW=empty(channels, 1, *sides) if config.expands_time else None,
        image_BLD=empty(rows, config.image_dim) if config.image_dim else None,
    )
    x_t_BCFHW, sigma_B = empty(*latent), empty()
    return State(x_t_BCFHW=x_t_BCFHW, sigma_B=sigma_B, conditioning=conditioning, expert=Expert.HIGH_NOISE)


def velocity(model: nn.Module, state: State, call: Callable[..., Any] | None = None) -> Tensor:
    """Predict v_BCFHW = noise - x0, float32, with a WanTransformer3DModel; the only call of a network.

    Args:
        state: of any float dtypes, on the model's device.
        call: what is called in its place, as its engine; it has the model's arguments.
    """
    dtype, given = model.patch_embedding.weight.dtype, state.conditioning
    inputs = [given.with_given(state.x_t_BCFHW), given.joined_BCFHW]
    image: dict[str, Tensor] = {}
    if (image_BLD := given.image_BLD) is not None:
        if model.config.pos_embed_seq_len:  # diffusers takes those of two frames one after the other
            image_BLD = image_BLD.unflatten(1, (2, -1)).flatten(0, 1)
        image["encoder_hidden_states_image"] = image_BLD.to(dtype)
    v_BCFHW = (call or model)(
        hidden_states=torch.cat([x_BCFHW.to(dtype) for x_BCFHW in inputs if x_BCFHW is not None], dim=1),
        timestep=_timestep(model, state),
        encoder_hidden_states=network_text(model, given.text_BLD.to(dtype)),
        **image,
        return_dict=False,
    )[0].float()
    return given.without_given(v_BCFHW)


def _timestep(model: nn.Module, state: State) -> Tensor:
    """Return t_B = 1000 sigma; where the first frame is given t_BS of each patch, 0 of that frame's."""
    t_B = state.sigma_B.float() * TRAIN_TIMESTEPS
    if state.conditioning.first_BCFHW is None:
        return t_B
    frames, *sides = (n // p for n, p in zip(state.x_t_BCFHW.shape[2:], model.config.patch_size, strict=True))
    t_BFP = t_B[:, None, None].repeat(1, frames, prod(sides))
    t_BFP[:, 0] = 0
    return t_BFP.flatten(1)


@once_for_each
def numels(config: TransformerConfig) -> dict[str, int]:
    """Return the number of elements of each parameter of the transformer that `config` describes, by name."""
    return {name: prod(shape) for name, shape in shapes(config).items()}


@once_for_each
def shapes(config: TransformerConfig) -> dict[str, list[int]]:
    """Return the shape of each parameter of the transformer that `config` describes, by name."""
    one, found = meta_transformer(config.replaced(num_layers=1)), {}
    block = {name: list(p.shape) for name, p in one.blocks[0].named_parameters()}
    numbers = range(config.num_layers)
    blocks = {in_block(k, name): shape for k in numbers for name, shape in block.items()}
    for name, p in one.named_parameters():
        found |= blocks if is_in_block(name) else {name: list(p.shape)}
    return found
