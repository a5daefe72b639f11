"""Published image-to-video Wans, without weights: what they are, take and are refused for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from published_wan import IMAGE_TO_VIDEO
from ranks import edit_json

from wandistiller.utils.errors import ConfigError
from wandistiller.wan.components import image_config, image_encoder_of
from wandistiller.wan.pipeline import open_wan

FACTS = {  # parameters of each expert; guidance; boundary
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": ([14_288_901_184] * 2, (3.5, 3.5), 0.9),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": ([16_394_878_784], (5.0, 5.0), None),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": ([16_394_878_784], (5.0, 5.0), None),
    "Wan-AI/Wan2.1-FLF2V-14B-720P-Diffusers": ([16_395_536_704], (5.0, 5.0), None),
}


@pytest.mark.parametrize("name", IMAGE_TO_VIDEO)
def test_a_published_image_to_video_wan_has_its_parameters_and_defaults(published: Path, name: str) -> None:
    folder, (parameters, guidance, boundary) = open_wan(str(published / name)), FACTS[name]
    assert [config.numel for config in folder.configs.values()] == parameters
    assert (folder.usual.guidance, folder.boundary) == (guidance, boundary)
    assert folder.config.takes_image and folder.latent_shape(480, 832, 81) == (16, 21, 60, 104)


def test_its_image_encoder_is_clip_s_vit_h(tmp_path: Path) -> None:
    with torch.device("meta"):
        encoder = image_encoder_of(image_config(tmp_path))
    assert sum(p.numel() for p in encoder.parameters()) == 632_076_800 - 1280 * 1024  # without the projection


def test_a_wan_of_text_and_one_of_images_is_told_by_its_class(published: Path, tmp_path: Path) -> None:
    for name in IMAGE_TO_VIDEO:
        folder = published / name
        index = json.loads((folder / "model_index.json").read_text())
        message = _refused(
            folder, tmp_path / name.replace("/", "_"), **index | {"_class_name": "WanPipeline"}
        )
        assert "`in_channels` is 36. The other parts of this WanPipeline are for 16." in message


@pytest.mark.parametrize("kind", ["WanVACEPipeline", "WanAnimatePipeline", "WanSpeechToVideoPipeline"])
def test_other_wans_are_refused_in_one_line(published: Path, tmp_path: Path, kind: str) -> None:
    folder = published / next(iter(IMAGE_TO_VIDEO))
    message = _refused(folder, tmp_path / "other", _class_name=kind)
    assert message.count("\n") == 0
    assert "VACE, Animate and speech-to-video Wans are not supported." in message


def _refused(folder: Path, copy: Path, **index: Any) -> str:
    shutil.copytree(folder, copy)
    edit_json(copy / "model_index.json", **index)
    with pytest.raises(ConfigError) as raised:
        open_wan(str(copy))
    return str(raised.value)
