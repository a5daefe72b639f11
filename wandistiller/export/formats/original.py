"""`--format original`: the transformers under the original Wan's names, for ComfyUI and from_single_file."""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wandistiller.export.model_card import HUB, comfy_nodes, joined, student_sentence, write_card
from wandistiller.export.output import ExportFormat, check_files, per_expert, replaced, write_file
from wandistiller.export.source import Source
from wandistiller.wan.original_names import original_name, unlike_published

QUANTIZED = re.compile(r"^blocks\.\d+\.(?:(?:self|cross)_attn\.(?:[qkvo]|[kv]_img)|ffn\.[02])\.weight$")
"""Weights stored in eight bits: the matrices of the blocks."""
LARGEST = torch.finfo(torch.float8_e4m3fn).max
MARKER = "scaled_fp8"
"""A tensor that says that matrices have scales. Its two elements say to multiply in the input's precision,
whose scale was not measured."""
CARD = """# A Wan student distilled with wandistiller, in the original Wan's names

{made}

For ComfyUI put {names} into `models/diffusion_models`; text encoder and VAE are the teacher's.
{nodes}"""
EIGHT_BITS = """
The matrices of the blocks are in eight bits with one scale each (`scaled_fp8`, `.scale_weight`).
Every ComfyUI that knows Wan reads them. Versions before December 2025 round the other linear layers to
eight bits too, without a scale: their outputs differ by 2 to 3 %. **Not for diffusers**: it opens the file
without an error, ignores the scales and draws nonsense; it prints only "Some weights of the model
checkpoint were not used when initializing WanTransformer3DModel", with the names of the scales.
"""
SINGLE_FILE = """
diffusers reads such a file too{here}. Without `config` it takes that of a published Wan, which does not fit \
a student of another shape:

```python
from diffusers import WanTransformer3DModel{load}
{calls}
```

They open in float32; `torch_dtype=torch.bfloat16` takes half the memory, and rounds the few weights \
too that are kept in float32.
"""
OPENED = '{expert} = WanTransformer3DModel.from_single_file("{address}{file}", config="{config}")'
OPENED_RENAMED = """weights = load_file("{file}")
weights["condition_embedder.image_embedder.pos_embed"] = weights.pop("img_emb.emb_pos")
{expert} = WanTransformer3DModel.from_single_file(weights, config="{config}")"""
"""Where the first and the last frame are given: diffusers 0.42.1 does not know this original name."""


@dataclass(frozen=True, kw_only=True)
class OriginalFormat(ExportFormat):
    """FILE, or for two experts FILE_high_noise and FILE_low_noise; next to them the folder FILE.card.

    That has the model card and the config.json with which diffusers reads the files. float8_e4m3fn stores the
    matrices of the blocks in eight bits with a scale each, the rest in bfloat16.
    """

    DTYPES = (*ExportFormat.DTYPES, "float8_e4m3fn")

    def write(self, source: Source, output: Path) -> list[Path]:
        files = {name: per_expert(output, source.facts.experts, name) for name in source.facts.experts}
        card = check_files(output, list(files.values()))
        for line in unlike_published(source.facts.config):
            print(f"note: {line}", file=sys.stderr)
        eight_bits = self.dtype == torch.float8_e4m3fn
        with ExitStack() as together:
            for name, model in source.networks(torch.bfloat16 if eight_bits else self.dtype):
                state = original_state(model.state_dict(), eight_bits)
                write_file(files[name], state, "Wan", source.description, source.published, together)
                del model, state  # before the next is read
        with replaced(card) as folder:
            names = [file.name for file in files.values()]
            write_original_card(folder, source, self.repository, names, eight_bits, card.name)
        return [*files.values(), card]


def quantized(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight in eight bits and its scale, float32: weight ~ stored * scale.

    Source of the layout: ComfyUI's scaled fp8 layers, which 0.3.64 reads as they are, and 0.33 translates
    into its `.weight_scale` and `.comfy_quant`, which 0.3.64 ignores.
    """
    layer, scale = name.removesuffix(".weight"), weight.abs().max().float().clamp(min=1e-12) / LARGEST
    yield name, (weight.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    yield f"{layer}.scale_weight", scale


def original_state(state: dict[str, Tensor], eight_bits: bool) -> dict[str, Tensor]:
    """All weights of a network under their original names."""
    renamed = {MARKER: torch.zeros(2, dtype=torch.float8_e4m3fn)} if eight_bits else {}
    for key, value in state.items():
        name = original_name(key)
        small = eight_bits and QUANTIZED.match(name)
        renamed |= quantized(name, value) if small else {name: value.contiguous()}
    return renamed


def write_original_card(
    folder: Path, source: Source, repository: str, files: list[str], eight_bits: bool, name: str
) -> None:
    """Write README.md of original-Wan files, one for each expert, and the config.json for diffusers.

    Args:
        name: of the folder once it is in its place, beside the files.
    """
    source.facts.config.meta().save_config(folder)
    facts, here = source.published, "" if repository else f", in the folder that holds it and `{name}`"
    where = {"address": f"{HUB}/{repository}/blob/main/" if repository else "", "config": repository or name}
    both_ends = facts.config.pos_embed_seq_len
    call, load = (OPENED_RENAMED, "\nfrom safetensors.torch import load_file") if both_ends else (OPENED, "")
    calls = "\n".join(
        call.format(expert=expert, file=file, **where)
        for expert, file in zip(source.facts.experts, files, strict=True)
    )
    nodes = comfy_nodes(facts, "Load Diffusion Model")
    text = CARD.format(made=student_sentence(facts), names=joined(files), nodes=nodes)
    text += EIGHT_BITS if eight_bits else SINGLE_FILE.format(calls=calls, here=here, load=load)
    write_card(folder, source, "finetune", text)
