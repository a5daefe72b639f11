"""How well an image fits its prompt, in the eyes of a CLIP model on disk."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import CLIPModel, CLIPProcessor

from wandistiller.config import read_json
from wandistiller.pictures import to_pil
from wandistiller.problems import problem


def clip_problems(folder: Path) -> list[str]:
    """Why `folder` is no CLIP model that transformers opens."""
    if not (folder / "config.json").is_file():
        return [problem("evaluate", "clip_path", folder, "There is no config.json in it. Give a CLIP folder of transformers.")]
    kind = read_json(folder / "config.json").get("model_type")
    return [] if kind == "clip" else [problem(folder / "config.json", "model_type", kind, 'Give a model of type "clip".')]


class Clip:
    """CLIP's two encoders, float32."""

    def __init__(self, folder: Path, device: torch.device):
        self._model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        self._processor = CLIPProcessor.from_pretrained(folder)

    @torch.no_grad()
    def judge(self, image_BCHW: Tensor, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Look at images in [0, 1].

        Returns:
            Their embeddings, unit vectors image_BD; and score_B = 100 max(cos(image, text), 0), in [0, 100], of a prompt cut
            to what CLIP reads. Source: Hessel et al. 2021, arXiv:2104.08718, with 100 for their 2.5, as torchmetrics has it.
        """
        inputs = self._processor(text=prompts, images=[to_pil(i) for i in image_BCHW], return_tensors="pt", padding=True,
                                 truncation=True, max_length=self._model.config.text_config.max_position_embeddings)  # fmt: skip
        seen = self._model(**inputs.to(self._model.device))
        cosine_B = (seen.image_embeds * seen.text_embeds).sum(1)  # the model has made them unit vectors
        return seen.image_embeds.cpu(), 100 * cosine_B.clamp(min=0).cpu()
