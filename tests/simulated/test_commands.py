"""Commands on a simulated GPU: media, pictures, samples, scores and exports as on a CPU, without a fault."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gpu_runs import take_texts_of_cpus
from grey_videos import video
from ranks import wandistiller
from recipes import train
from safetensors.torch import load_file
from simulated import Simulated, simulated_gpu
from small_wan import make_large_wan, make_wan
from styles import style

from wandistiller.utils.files import read_json

pytestmark = [pytest.mark.simulated, pytest.mark.slow, simulated_gpu]

CPU, GPU = "cpu", "gpu"
STEPS = {"max_steps": 2, "sample_every": 2, "num_frames": 5, "batch_size": 2}


class Runs(NamedTuple):
    """The same run by place, and the devices of the second."""

    folder: Path
    devices: Simulated

    def output(self, place: str) -> Path:
        return self.folder / place / "run"

    def command(self, place: str, *words: Any) -> str:
        """Run a command there; return what it printed."""
        accelerator = self.devices if place == GPU else "cpu"
        done = wandistiller(*words, accelerator=accelerator)
        return done.stdout + done.stderr


def media(folder: Path) -> Path:
    """Two videos with captions and two prompts without."""
    folder.mkdir()
    for name, frames in (("short", 8), ("long", 12)):
        video(folder / f"{name}.mp4", frames)
        (folder / f"{name}.txt").write_text(f"grey, brighter and brighter, {name}")
    for colour in ("red", "blue"):
        (folder / f"{colour}.txt").write_text(f"a {colour} circle")
    return folder


@pytest.fixture(scope="module")
def runs(wan2: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("commands")
    found = Runs(folder, Simulated(folder))
    data = media(folder / "data")
    for place, accelerator in ((CPU, "cpu"), (GPU, found.devices)):
        (folder / place).mkdir()
        if place == GPU:
            take_texts_of_cpus(wan2, folder / CPU / "cache", folder / GPU / "cache")
        how = {"ranks": 1, "accelerator": accelerator, "data_path": str(data)}
        train(folder / place, wan2, "run", **how, **STEPS)
    return found


def files(runs: Runs, pattern: str) -> list[dict[Path, bytes]]:
    """Return a run's files by name, in both places."""
    folders = [runs.folder / place for place in (CPU, GPU)]
    return [{f.relative_to(folder): f.read_bytes() for f in folder.glob(pattern)} for folder in folders]


def tensors(runs: Runs, pattern: str) -> list[list[bytes]]:
    """Return the tensors of a run's files in the order of their bytes, in both places."""
    found = []
    for place in (CPU, GPU):
        of_files = (load_file(file).values() for file in (runs.folder / place).glob(pattern))
        found.append(sorted(t.view(torch.uint8).numpy().tobytes() for of_file in of_files for t in of_file))
    return found


@pytest.mark.parametrize("pattern", ["samples/*.png", "samples/*.mp4", "student/*/*", "checkpoints/*/*/*.s*"])
def test_pictures_student_and_checkpoint_of_a_run_are_those_of_a_cpu_bitwise(
    runs: Runs, pattern: str
) -> None:
    of_cpu, of_gpu = files(runs, f"run/{pattern}")
    assert of_gpu == of_cpu != {} and runs.devices.reports() == ""


def test_latents_of_videos_and_rollouts_are_those_of_a_cpu_bitwise(runs: Runs) -> None:
    """Their files differ in name and notes: by the precision that a teacher has by default, and by paths."""
    of_cpu, of_gpu = tensors(runs, "cache/latents/*/*")
    assert len(of_cpu) == 4 and of_gpu == of_cpu


@pytest.mark.parametrize("form", ["original", "diffusers"])
def test_exports_of_a_checkpoint_are_those_of_a_cpu_bitwise(runs: Runs, form: str) -> None:
    name = {"original": "exported.safetensors", "diffusers": "exported"}[form]
    for place in (CPU, GPU):
        output = runs.folder / place / name
        words = ["--checkpoint", runs.output(place), "--output", output, "--format", form]
        runs.command(place, "export", *words)
    of_cpu, of_gpu = tensors(runs, {"original": name, "diffusers": f"{name}/*/*.safetensors"}[form])
    assert of_gpu == of_cpu != []


def test_a_plan_for_this_machine_knows_its_gpu(runs: Runs) -> None:
    text = runs.command(GPU, "plan", "--recipe", runs.folder / GPU / "run.json")
    assert "each with 1 x 4 GiB of GPU memory" in text and "of 4.0 GiB on each GPU" in text


LITTLE, WEIGHTS = 70, 78
"""MiB of a GPU, and of the networks of a pipeline that therefore stay in CPU memory but for two blocks."""
STREAMED = ["--teacher_deepspeed_config", "stream", "--dtype", "float32", "--height", 32, "--width", 32]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of two transformers of 40 MB."""
    return make_wan(tmp_path_factory.mktemp("wide"), heads=16)


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    return Simulated(tmp_path_factory.mktemp("little"), mib=LITTLE)


def test_samples_on_a_small_gpu_are_those_of_a_cpu_bitwise(
    little: Simulated, wide: Path, tmp_path: Path
) -> None:
    words = ["sample", "--model", wide, "--prompts", "a red circle on a blue background", "--steps", 2]
    found = []
    for name, accelerator in ((CPU, "cpu"), (GPU, little)):
        wandistiller(*words, *STREAMED, "--output", tmp_path / name, accelerator=accelerator)
        found.append([file.read_bytes() for file in sorted((tmp_path / name).glob("*.png"))])
    assert found[0] == found[1] != [] and little.reports() == ""


def test_scores_on_a_small_gpu_are_those_of_a_cpu_bitwise_and_blocks_come_one_by_one(
    little: Simulated, wide: Path, tmp_path: Path
) -> None:
    words = ["evaluate", "--student", wide, "--teacher_path", wide, "--num_prompts", 2, "--steps", 2]
    found = []
    for name, accelerator in ((CPU, "cpu"), (GPU, little)):
        more = ["--quick", *STREAMED, "--output", tmp_path / name]
        wandistiller(*words, *more, accelerator=accelerator)
        found.append(read_json(tmp_path / name / "evaluation.json"))
    errors = [e["relative_velocity_error"]["all"]["value"] for e in found]
    assert errors[1] == errors[0]
    pictures = [(tmp_path / name / "evaluation.png").read_bytes() for name in (CPU, GPU)]
    assert pictures[0] == pictures[1] and little.reports() == ""
    assert 1024 * found[1]["teacher"]["peak_memory_gib"]["gpu"] < 0.6 * WEIGHTS


def test_a_lora_of_a_14b_s_blocks_is_drawn_on_a_gpu_that_has_no_room_for_them(tmp_path: Path) -> None:
    """Four of the forty: 2.9 GB in bf16, beside 0.4 of other weights, on 4 GiB of which 1 is a reserve."""
    sizes = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 4}
    wan = make_large_wan(tmp_path / "wan", torch.bfloat16, "10GB", **sizes)
    file = style(wan, tmp_path / "lora.safetensors", "to_q")
    devices = Simulated(tmp_path, mib=4096)
    words = ["sample", "--model", wan, "--lora", file, "--prompts", "a red circle", "--steps", 1]
    words += ["--height", 32, "--width", 32, "--output", tmp_path / "drawn"]
    said = wandistiller(*words, accelerator=devices).stderr
    assert "placed    streamed, 1 at once: " in said and devices.reports() == ""
    assert (tmp_path / "drawn" / "0000.png").is_file()
