"""Embeddings and scores of pictures by CLIP, PickScore and DINOv2, from folders of transformers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    BitImageProcessorPil,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
)

from wandistiller.utils.errors import problem
from wandistiller.utils.files import read_json, refused_keys
from wandistiller.utils.images import to_pil


class Clip:
    """CLIP's two encoders, float32."""

    def __init__(self, folder: Path, device: torch.device):
        self._model = CLIPModel.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
        self._model.eval().to(device)
        # of known classes: its own from_pretrained asks to run code that the folder names (transformers 5.23)
        pixels, tokens = CLIPImageProcessorPil.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder)
        self._processor = CLIPProcessor(pixels, tokens)

    @torch.no_grad()
    def score(self, image_BCHW: Tensor, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Embed images in [0, 1], and compare them with prompts, cut to what CLIP reads.

        Returns:
            Their embeddings, unit vectors image_BD; and cosine_B of image and text.
        """
        inputs = self._processor(
            text=prompts,
            images=[to_pil(i) for i in image_BCHW],
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=self._model.config.text_config.max_position_embeddings,
        )
        output = self._model(**inputs.to(self._model.device))
        cosine_B = (output.image_embeds * output.text_embeds).sum(1)  # of unit vectors
        return output.image_embeds.cpu(), cosine_B.cpu()

    @torch.no_grad()
    def preference(self, image_BCHW: Tensor, prompts: list[str]) -> Tensor:
        """Score images in [0, 1] as PickScore does, a CLIP with a scale of its own: exp(scale) cos, score_B.

        Source: Kirstain et al. 2023, arXiv:2305.01569.
        """
        return self._model.logit_scale.exp().cpu() * self.score(image_BCHW, prompts)[1]


class Dino:
    """DINOv2's encoder, float32."""

    def __init__(self, folder: Path, device: torch.device):
        how = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
        self._model = AutoModel.from_pretrained(folder, **how).eval().to(device)
        self._processor = BitImageProcessorPil.from_pretrained(folder)

    @torch.no_grad()
    def embed(self, images: Sequence[Tensor]) -> Tensor:
        """Embed images image_CHW in [0, 1] by their class token: unit vectors image_BD, on the CPU."""
        inputs = self._processor(images=[to_pil(i) for i in images], return_tensors="pt")
        output = self._model(**inputs.to(self._model.device))
        return normalize(output.last_hidden_state[:, 0], dim=1).cpu()


ENCODERS: dict[str, tuple[type[Clip | Dino], tuple[str, ...], str]] = {
    "clip": (Clip, ("clip",), "openai/clip-vit-large-patch14"),
    "pickscore": (Clip, ("clip",), "yuvalkirstain/PickScore_v1"),
    "dino": (Dino, ("dinov2", "dinov2_with_registers"), "facebook/dinov2-base"),
}
"""Reader, types of model and an example of the folders that `evaluate` takes as --NAME_path."""
NO_SAFETENSORS = "no model.safetensors in it, and pickles (.bin) are not read, as they can run code"


def encoder_problems(name: str, folder: Path) -> list[str]:
    """List the problems of a folder for one of ENCODERS; no weight is read."""
    config, (_, kinds, example) = folder / "config.json", ENCODERS[name]
    remedy = f"Give a folder such as that of {example}."
    if not config.is_file():
        return [problem("evaluate", f"{name}_path", folder, f"There is no config.json in it. {remedy}")]
    problems = [] if any(folder.glob("model*.safetensors")) else [f"{folder}: {NO_SAFETENSORS}. {remedy}"]
    for file in ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json"):
        if (folder / file).is_file():
            problems += refused_keys(folder / file, read_json(folder / file))
    if (kind := read_json(config).get("model_type")) not in kinds:
        problems.append(problem(config, "model_type", kind, f'Give a model of type "{kinds[0]}".'))
    return problems
