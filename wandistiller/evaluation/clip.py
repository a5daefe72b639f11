"""CLIP's embeddings and scores, from a folder of transformers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

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
        """Embed and score images in [0, 1].

        Returns:
            Their embeddings, unit vectors image_BD; and score_B = 100 max(cos(image, text), 0), in [0, 100],
            of a prompt cut to what CLIP reads. Source: Hessel et al. 2021, arXiv:2104.08718, with 100 for
            their 2.5, as torchmetrics has it.
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
        return output.image_embeds.cpu(), 100 * cosine_B.clamp(min=0).cpu()

    @torch.no_grad()
    def embed(self, images: Sequence[Tensor]) -> Tensor:
        """Embed images image_CHW in [0, 1]: unit vectors image_BD, on the CPU."""
        inputs = self._processor(images=[to_pil(i) for i in images], return_tensors="pt")
        output = self._model.get_image_features(**inputs.to(self._model.device))
        return normalize(output.pooler_output, dim=1).cpu()


NO_SAFETENSORS = (
    "no model.safetensors in it, and pickles (.bin) are not read, as they can run code. Give a folder that "
    "has it, such as that of openai/clip-vit-large-patch14."
)


def clip_problems(folder: Path) -> list[str]:
    config = folder / "config.json"
    if not config.is_file():
        remedy = "There is no config.json in it. Give a CLIP folder of transformers."
        return [problem("evaluate", "clip_path", folder, remedy)]
    problems = [] if any(folder.glob("model*.safetensors")) else [f"{folder}: {NO_SAFETENSORS}"]
    for name in ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json"):
        if (file := folder / name).is_file():
            problems += refused_keys(file, read_json(file))
    if (kind := read_json(config).get("model_type")) != "clip":
        problems.append(problem(config, "model_type", kind, 'Give a model of type "clip".'))
    return problems
