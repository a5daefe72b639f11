"""Small image-to-video teachers with their data, and short runs of them."""

from pathlib import Path
from typing import Any

from image_data import image_data, with_last_images
from recipes import student_engine, train
from small_wan import IMAGE_FORMS, make_wan

A14B, WAN21, BOTH_ENDS, TI2V = "Wan2.2-I2V-A14B", "Wan2.1-I2V-14B", "Wan2.1-FLF2V-14B", "Wan2.2-TI2V-5B"
SIZE = {"height": 32, "width": 64, "num_frames": 5}
ENGINE = student_engine(2) | {"train_batch_size": 4}
del ENGINE["train_micro_batch_size_per_gpu"]


class Wans(dict[str, Path]):
    """Small teachers by form, made when they are asked for, with their data."""

    def __init__(self, folder: Path):
        self.folder, self.data = folder, image_data(folder / "data")

    def __missing__(self, form: str) -> Path:
        self[form] = make_wan(self.folder / form, **IMAGE_FORMS[form])
        return self[form]

    def settings(self, form: str, **more: Any) -> dict[str, Any]:
        """A recipe's keys for a run of two steps."""
        data = with_last_images(self.data) if form == BOTH_ENDS else self.data
        settings = {"data_path": str(data), "sample_prompts": ["left"], "max_steps": 2, "rollout_steps": 2}
        settings |= SIZE | {"deepspeed_config": ENGINE, "cache_dir": str(self.folder / f"cache {form}")}
        return settings | more

    def train(self, form: str, name: str, ranks: int = 1, **more: Any) -> Path:
        return train(self.folder, self[form], name, ranks=ranks, **self.settings(form, **more))
