"""Random Wan pipelines of the real classes, small enough to build in a second."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

WORDS = "a red blue green circle square on background , left right top bottom center".split()


def tokenizer() -> PreTrainedTokenizerFast:
    """Words to numbers, with T5's pad and end tokens."""
    vocab = {t: i for i, t in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def small_transformer(seed: int, layers: int = 4, **config: int) -> WanTransformer3DModel:
    """A random expert whose output depends on all of its inputs (fresh Wan weights give almost nothing)."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (
        dict(
            num_attention_heads=2,
            attention_head_dim=32,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=32,
            ffn_dim=96,
            num_layers=layers,
            rope_max_seq_len=64,
        )
        | config
    )
    torch.manual_seed(seed)
    model = WanTransformer3DModel(**sizes)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return model


FORMS: dict[str, dict[str, Any]] = {  # arguments of `make_wan` for each published Wan
    "Wan2.1-1.3B": {"experts": 1, "layers": 3},
    "Wan2.1-14B": {"experts": 1, "heads": 3, "max_shard_size": "200KB"},
    "Wan2.2-TI2V-5B": {"experts": 1, "ti2v": True},
    "Wan2.2-T2V-A14B": {"experts": 2},
}
IMAGE_FORMS: dict[str, dict[str, Any]] = {  # the same of each published image-to-video Wan
    "Wan2.2-I2V-A14B": {"experts": 2, "image": "joined"},
    "Wan2.1-I2V-14B": {"experts": 1, "image": "states"},
    "Wan2.1-FLF2V-14B": {"experts": 1, "image": "both ends"},
    "Wan2.2-TI2V-5B": {"experts": 1, "ti2v": True, "image": "first"},
}
CLIP_SIDE, CLIP_WIDTH, CLIP_ROWS = 28, 24, 5
"""Pixels, width and rows of the states of a small image encoder."""
VAE21 = dict(
    base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
)
VAE22 = VAE21 | dict(
    z_dim=48,
    is_residual=True,
    in_channels=12,
    out_channels=12,
    patch_size=2,
    scale_factor_spatial=16,
    decoder_base_dim=16,
    latents_mean=torch.linspace(-1, 1, 48).tolist(),
    latents_std=torch.linspace(0.5, 2, 48).tolist(),
)


def make_wan(
    folder: Path,
    *,
    experts: int = 2,
    layers: int = 4,
    heads: int = 2,
    ti2v: bool = False,
    image: str = "",
    max_shard_size: str | None = None,
) -> Path:
    """Write a pipeline with diffusers: Wan2.2 A14B's form, Wan2.1's (one expert) or Wan2.2 5B's (`ti2v`).

    Args:
        image: what an image-to-video Wan takes of it, as in IMAGE_FORMS; "" for text-to-video.
    """
    torch.manual_seed(0)
    text = UMT5EncoderModel(
        UMT5Config(vocab_size=len(WORDS) + 3, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    )
    vae = AutoencoderKLWan(**(VAE22 if ti2v else VAE21))
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    sizes = {"num_attention_heads": heads} | ({"in_channels": 48, "out_channels": 48} if ti2v else {})
    sizes |= {"in_channels": 36} if image and not ti2v else {}
    parts: dict[str, Any] = {}
    if image in ("states", "both ends"):
        sizes |= {"image_dim": CLIP_WIDTH, "added_kv_proj_dim": 32 * heads}
        sizes |= {"pos_embed_seq_len": 2 * CLIP_ROWS} if image == "both ends" else {}
        parts = image_parts()
    second = small_transformer(2, layers, **sizes) if experts == 2 else None
    (WanImageToVideoPipeline if image else WanPipeline)(
        **parts,
        tokenizer=tokenizer(),
        text_encoder=text,
        vae=vae,
        scheduler=scheduler,
        transformer=small_transformer(1, layers, **sizes),
        transformer_2=second,
        boundary_ratio=0.875 if experts == 2 else None,
        expand_timesteps=ti2v,
    ).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def image_parts() -> dict[str, Any]:
    """An image encoder of CLIP's form, and its processor."""
    config = CLIPVisionConfig(
        hidden_size=CLIP_WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=CLIP_SIDE,
        patch_size=14,
    )
    side = {"height": CLIP_SIDE, "width": CLIP_SIDE}
    processor = CLIPImageProcessor(size={"shortest_edge": CLIP_SIDE}, crop_size=side)
    return {"image_encoder": CLIPVisionModel(config), "image_processor": processor}


def make_large_wan(target: Path, dtype: torch.dtype, max_shard_size: str, **config: int) -> Path:
    """Write a pipeline whose only expert has these sizes and random weights, unless `target` exists."""
    from wandistiller.wan.pipeline import open_wan

    if not target.exists():
        temporary = make_wan(target.with_suffix(".tmp"), experts=1)
        folder = temporary / "transformer"
        model = open_wan(str(temporary)).config.replaced(**config).meta()
        model = model.to(dtype).to_empty(device="cpu")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for p in model.parameters():
            p.data.copy_(torch.randn(p.shape, device=device).mul_(0.02))
        for old in folder.glob("*.safetensors"):
            old.unlink()
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        temporary.rename(target)
    return target
