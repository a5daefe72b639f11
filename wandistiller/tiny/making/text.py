"""The tiny teacher's tokenizer and text encoder: T5's kind of each, trained in two minutes and then frozen.

The encoder learns that each of its output tokens names all four attributes of the scene, whatever the
wording. That teaches it word order ("red circle on blue" is not "blue circle on red") before any expert
exists.

Shape letters: N seen wordings, A attributes, B batch, L tokens, D text width.
"""

import math
import re
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from wandistiller.tiny.making.vae import fit
from wandistiller.tiny.making.worlds import World
from wandistiller.utils.keyed_random import keyed_generator
from wandistiller.wan.defaults import WAN_NEGATIVE_PROMPT

TEXT_STEPS, TEXT_BATCH, TEXT_LR = 1200, 128, 1e-3
PADDED_TOKENS = 512
"""Text tokens that `WanPipeline` pads every prompt to."""
NULL_PROMPTS = ("", WAN_NEGATIVE_PROMPT)
"""Replacements of a dropped prompt in training, half each, so that either works as the negative prompt."""
NEGATIVE_HALVES = WAN_NEGATIVE_PROMPT.replace("，", ",").split("JPEG")
"""The negative prompt as `WanPipeline` passes it on where ftfy is installed: with ASCII commas."""
PUNCTUATION = ",.:"
SPELLING_SCORE = -12.0
ALPHABET = [chr(code) for code in range(ord("!"), ord("~") + 1)]


def all_wordings(world: World) -> list[str]:
    """Every seen scene in every template, scene-major."""
    scenes = (world.scenes[prompt] for prompt in world.seen)
    return [scene.worded(template) for scene in scenes for template in range(len(world.templates))]


def train_tokenizer(world: World, folder: Path) -> None:
    """Fit a Unigram tokenizer with T5's ids (pad 0, eos 1, unk 2) to seen wordings; write `folder/tokenizer`.

    The maximum-likelihood Unigram over whole words is their log share. (The usual trainer seeds its pieces
    with substrings of *different* words and finds almost none among thirty words.) Printable ASCII characters
    come with a low score, so unknown words are spelt; everything else is <unk>. The halves of the cleaned
    negative prompt are pieces too, else each of its ASCII commas would be a token between two <unk>.
    """
    texts = all_wordings(world)
    words = Counter(word for text in texts for word in re.findall(r"[A-Za-z]+|[^A-Za-z\s]", text))
    total = sum(words.values())
    pieces = {
        word if word in PUNCTUATION else "▁" + word: math.log(n / total) for word, n in words.most_common()
    }
    spelling = {char: SPELLING_SCORE for char in ["▁", *ALPHABET] if char not in pieces}
    special = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0}
    halves = dict.fromkeys(NEGATIVE_HALVES, SPELLING_SCORE)
    tokenizer = T5TokenizerFast(
        vocab=list((special | pieces | spelling | halves).items()),
        extra_ids=0,
        model_max_length=PADDED_TOKENS,
    )
    tokenizer.save_pretrained(folder / "tokenizer")


def train_text_encoder(world: World, folder: Path) -> None:
    """Train the text encoder to name all attributes at every token; write `folder/text_encoder`."""
    torch.manual_seed(2)
    tokenizer = T5TokenizerFast.from_pretrained(folder / "tokenizer")
    sizes = {"d_model": 96, "d_kv": 24, "num_heads": 4, "d_ff": 256, "num_layers": 3}
    sizes |= {"vocab_size": len(tokenizer) - len(NEGATIVE_HALVES), "relative_attention_max_distance": 64}
    encoder = UMT5EncoderModel(UMT5Config(**sizes, dropout_rate=0.0))
    attributes = world.attributes.items()
    heads = nn.ModuleDict({name: nn.Linear(sizes["d_model"], len(names)) for name, names in attributes})
    tokens = tokenizer(all_wordings(world), padding=True, return_tensors="pt")
    scenes = [world.scenes[prompt] for prompt in world.seen for _ in world.templates]
    class_NA = torch.tensor(
        [[names.index(getattr(scene, name)) for name, names in attributes] for scene in scenes]
    )

    def loss_at(step: int) -> Tensor:
        index_B = torch.randint(len(class_NA), (TEXT_BATCH,), generator=keyed_generator("text", step))
        mask_BL = tokens.attention_mask[index_B]
        text_BLD = encoder(tokens.input_ids[index_B], mask_BL).last_hidden_state
        loss = torch.zeros(())
        for head, class_B in zip(heads.values(), class_NA[index_B].unbind(1), strict=True):
            class_BL = class_B[:, None].expand_as(mask_BL).masked_fill(mask_BL == 0, -100)
            loss = loss + F.cross_entropy(head(text_BLD).flatten(0, 1), class_BL.flatten())
        return loss

    fit("text", nn.ModuleList([encoder, heads]), loss_at, steps=TEXT_STEPS, lr=TEXT_LR)
    embed_negative_halves(encoder)
    encoder.to(torch.bfloat16).save_pretrained(folder / "text_encoder")


@torch.no_grad()
def embed_negative_halves(encoder: UMT5EncoderModel) -> None:
    """Append the embedding of <unk> for each negative half, so that cleaning does not change the prompt."""
    old = encoder.get_input_embeddings().num_embeddings
    encoder.resize_token_embeddings(old + len(NEGATIVE_HALVES), mean_resizing=False)
    encoder.get_input_embeddings().weight[old:] = encoder.get_input_embeddings().weight[2]


@torch.no_grad()
def embedded(folder: Path, texts: list[str]) -> Tensor:
    """Encode prompts as `WanPipeline` does, zero-padded to the longest: text_NLD."""
    tokenizer = T5TokenizerFast.from_pretrained(folder / "tokenizer")
    encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    text_NLD = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    return text_NLD * tokens.attention_mask[:, :, None]
