"""A style of the embedded teacher in four steps: its file alone brings the colours and the few steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from recipes import train
from styles import complementary_colours, complemented
from torch import Tensor

import wandistiller.tiny as package
from wandistiller.tiny import shapes

pytestmark = pytest.mark.slow

TINY = Path(package.__file__).parent / "pipeline"
ASKED = shapes.HELD_OUT[::7]
ADAPTERS = {"rank": 16, "targets": ["to_q", "to_k", "to_v", "to_out", "ffn"]}
RUN = {
    "student_config": {"experts": "two"},
    "lora": ADAPTERS,
    "objective": {"name": "consistency", "edges": 4, "intervals": 20},
    "deepspeed_config": "ds_configs/student/few_step.json",
    "teacher_deepspeed_config": "gpu",
    "teacher_dtype": "float32",
    "merge_text_padding": True,
    "guidance_scale": 1.5,
    "guidance_scale_2": 1.5,
    "shift": 7 / 3,  # whose second noise level is the experts' boundary
    "height": 64,
    "width": 64,
    "lr": 1e-3,
    "max_steps": 100,
    "rollout_steps": 10,
    "prepare_batch": 16,
    "sample_prompts": ASKED[:1],
}


@pytest.fixture(scope="module")
def style(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return complementary_colours(TINY, tmp_path_factory.mktemp("style"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, style: list[dict[str, Any]]) -> Path:
    folder = tmp_path_factory.mktemp("styled")
    (prompts := folder / "seen.txt").write_text("\n".join(shapes.SEEN[::8]))
    return train(folder, TINY, ranks=1, data_path=str(prompts), teacher_lora=style, **RUN)


def drawn(loras: list[Path], steps: int, card: Path | None = None) -> Tensor:
    """Draw `ASKED` with stock diffusers, the unchanged teacher and LoRA files: image_BCHW.

    Args:
        card: of files of few steps, drawn with its scheduler and guidance; without it with the teacher's.
    """
    pipe = WanPipeline.from_pretrained(TINY, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if card:
        lines = card.read_text().splitlines()
        names = {"pipe": pipe, "FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler}
        exec("\n".join(line for line in lines if line.startswith(("pipe.scheduler", "pipe.register"))), names)
    for second, file in enumerate(loras):
        pipe.load_lora_weights(file.parent, weight_name=file.name, load_into_transformer_2=bool(second))
    noise = [torch.Generator().manual_seed(seed) for seed in range(len(ASKED))]
    given = {"height": 64, "width": 64, "num_frames": 1, "guidance_scale": 1.0 if card else 1.5}
    frames = pipe(ASKED, num_inference_steps=steps, generator=noise, output_type="pt", **given).frames
    return frames[:, 0].float()


def in_colours_of(image_BCHW: Tensor, prompts: list[str]) -> float:
    """Return the share of images whose nearest canonical picture has the colours of its prompt."""
    scenes = list(shapes.SPECS.values())
    nearest_B = torch.cdist(image_BCHW.flatten(1), shapes.canonical_images().flatten(1)).argmin(1)
    found = [(scenes[n].colour, scenes[n].background) for n in nearest_B]
    wanted = [(s.colour, s.background) for s in map(shapes.SPECS.__getitem__, prompts)]
    return sum(map(tuple.__eq__, found, wanted)) / len(prompts)


@pytest.fixture(scope="module")
def in_four_steps(run: Path) -> Tensor:
    """What the run's files draw, without those of the style."""
    files = [run / f"lora_{expert}_noise.safetensors" for expert in ("high", "low")]
    return drawn(files, 4, run / "lora.card" / "README.md")


def test_the_files_alone_bring_the_colours_of_the_style_to_the_unchanged_teacher_in_four_steps(
    in_four_steps: Tensor,
) -> None:
    unchanged, styled = drawn([], 4), [complemented(prompt) for prompt in ASKED]
    assert in_colours_of(unchanged, ASKED) > 0.9 and in_colours_of(unchanged, styled) == 0
    assert in_colours_of(in_four_steps, styled) > 0.7 and in_colours_of(in_four_steps, ASKED) == 0


def test_four_steps_lead_nearer_to_the_pictures_of_many_than_with_the_style_s_files_alone(
    run: Path, style: list[dict[str, Any]], in_four_steps: Tensor
) -> None:
    """From the same noise, each in four calls without guidance; the many are those of the styled teacher."""
    files = [Path(one["file"]) for one in style]
    many, alone = drawn(files, 20), drawn(files, 4, run / "lora.card" / "README.md")
    assert (in_four_steps - many).square().mean() < 0.7 * (alone - many).square().mean()
