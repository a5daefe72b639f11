"""Adapters of a flow map: on a shared base, resumed, in one file, by the lines of its card in diffusers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import wandistiller
from recipes import ADAM, student_engine, train
from safetensors.torch import load_file, save_file
from torch import Tensor

from wandistiller.batch import Conditioning
from wandistiller.evaluation.candidates import read_candidate
from wandistiller.evaluation.sampling import sampler
from wandistiller.experts import Expert
from wandistiller.export.formats.lora import LoraFormat
from wandistiller.export.source import read_source
from wandistiller.network.network import Network
from wandistiller.network.sampling import denoise
from wandistiller.teacher.base import LocalTeacher
from wandistiller.utils.files import FACTS
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.lora_files import second_time_in

LORA = {"rank": 4, "alpha": 8.0, "targets": ["to_q", "to_out", "ffn", "condition_embedder"]}
SETTINGS: dict[str, Any] = {
    "objective": "flow_map",
    "student_config": {},
    "lora": LORA,
    "max_steps": 2,
    "save_every": 1,
    "guidance_scale": 2.0,
    "sample_prompts": [],
    "lr": 0.01,
}
COPIES, STREAMED = {"wandistiller": {"placement": "owner"}}, {"wandistiller": {"placement": "streamed"}}
FILES = {"wandistiller": {"placement": "files"}}
LEAVES = [f"linear_{n}.{leaf}" for n in (1, 2) for leaf in ("weight", "bias")]
NAMES = {f"condition_embedder.delta_embedder.{leaf}" for leaf in LEAVES}


def trained(
    folder: Path, wan: Path, name: str, teacher: dict[str, Any], *, ranks: int = 1, **more: Any
) -> Path:
    return train(folder, wan, name, ranks=ranks, teacher_deepspeed_config=teacher, **SETTINGS | more)


def learned(output: Path) -> dict[str, Tensor]:
    files = sorted(max((output / "checkpoints").glob("step_*")).rglob("rank_*.safetensors"))
    return {name: t for file in files for name, t in load_file(file).items()}


def assert_same(output: Path, reference: Path) -> None:
    ours, theirs = learned(output), learned(reference)
    assert ours.keys() == theirs.keys()
    assert [name for name, t in theirs.items() if not torch.equal(ours[name], t)] == []


@pytest.fixture(scope="module")
def run(folder: Path, wan1: Path) -> Path:
    return trained(folder, wan1, "streamed", STREAMED)


@pytest.fixture(scope="module")
def exported(folder: Path, run: Path) -> Path:
    """Its files in float32, as diffusers reads them."""
    (made,) = LoraFormat(dtype=torch.float32).write(read_source(run), folder / "lora")
    return made


@torch.no_grad()
def drawn(name: str, lora: Path, steps: int) -> Tensor:
    """Latents of `sample` with its words, from the noise "start"."""
    model = read_candidate(name, [str(lora)])
    folder = model.folder
    network = Network.made(folder.config, folder.reader(Expert.HIGH_NOISE).state(torch.float32).items())
    velocity = LocalTeacher({Expert.HIGH_NOISE: network}).velocity
    noise_BCFHW, text_BLD = keyed_normal((1, 16, 1, 4, 4), "start"), keyed_normal((1, 512, 32), "text")
    start = (folder, folder.shift, noise_BCFHW, Conditioning(text_BLD), steps)
    return denoise(velocity, *start, sampler(folder, model.facts, steps), level_dtype=torch.float64)[0]


@pytest.fixture(scope="module")
def pipe(exported: Path, wan1: Path) -> Callable[..., Any]:
    """The pipeline that the lines of the card make, but for their places, their precision and the GPU."""
    code = (exported / "README.md").read_text().split("```python\n")[1].split("frames = ")[0]
    (offload,) = (line for line in code.splitlines(keepends=True) if "offload" in line)
    places = {f'"{wan1.name}"': f'"{wan1}"', "THIS_FOLDER": str(exported), offload: "", "bfloat16": "float32"}
    for name, place in places.items():
        assert name in code
        code = code.replace(name, place)
    exec(code, made := {})
    return made["pipe"]


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_lines_of_the_card_draw_the_latents_of_sample(
    pipe: Callable[..., Any], exported: Path, wan1: Path, steps: int
) -> None:
    noise_BCFHW, text_BLD = keyed_normal((1, 16, 1, 4, 4), "start"), keyed_normal((1, 512, 32), "text")
    size = {"height": 32, "width": 32, "num_frames": 1, "output_type": "latent"}
    theirs = pipe(prompt_embeds=text_BLD, latents=noise_BCFHW, num_inference_steps=steps, **size).frames
    ours = drawn(str(wan1), exported, steps)
    assert torch.dist(theirs, ours) < 1e-3 * ours.norm()


def test_a_plain_wan_with_the_file_is_the_run_s_student(run: Path, exported: Path, wan1: Path) -> None:
    student = dict(read_source(run).finished("transformer", torch.float32))
    folder = read_candidate(str(wan1), [str(exported)]).folder
    assert folder.config.has_second_time and student.keys() == folder.config.shapes.keys()
    folder.require_weights()
    assert not any(line.startswith("warning") for line in folder.added_lines)
    for name, value in folder.reader(Expert.HIGH_NOISE).state(torch.float32).items():
        torch.testing.assert_close(student[name], value, rtol=1e-6, atol=1e-7)


def test_a_run_ends_with_one_file_for_diffusers_that_has_its_second_time(run: Path, wan1: Path) -> None:
    file = run / "lora.safetensors"
    assert second_time_in(file).keys() == NAMES
    before = load_file(wan1 / "transformer/diffusion_pytorch_model.safetensors")
    for name, value in load_file(file).items():
        if name.removeprefix("transformer.") in NAMES:
            first = before[name.removeprefix("transformer.").replace("delta", "time")]
            assert 0 < torch.dist(value, first) < 0.5 * first.norm()
        else:
            assert ".lora_" in name
    card = (run / "lora.card" / "README.md").read_text()
    assert "any number of steps" in card and "ComfyUI cannot sample with it" in card
    words = ["export", "--checkpoint", run, "--output", run.parent / "a.safetensors", "--adapter"]
    assert "no node of ComfyUI" in wandistiller(*words, "--format", "original", code=2).stderr


def test_a_file_that_has_lost_its_second_time_is_told(exported: Path, wan1: Path, tmp_path: Path) -> None:
    weights = load_file(exported / "pytorch_lora_weights.safetensors")
    left = {name: t for name, t in weights.items() if ".lora_" in name}
    facts = {"wandistiller": (exported / FACTS).read_text()}
    save_file(left, file := tmp_path / "lora.safetensors", facts)
    words = ["sample", "--lora", file, "--prompts", "a red circle", "--output", tmp_path / "none"]
    assert "lacks its `delta_embedder`" in wandistiller(*words, "--model", wan1, code=2).stderr


@pytest.mark.slow
@pytest.mark.parametrize("teacher", [COPIES, FILES])
def test_adapters_on_a_streamed_base_learn_what_they_learn_elsewhere_bitwise(
    folder: Path, wan1: Path, run: Path, teacher: dict[str, Any]
) -> None:
    assert_same(trained(folder, wan1, teacher["wandistiller"]["placement"], teacher), run)


DMD2 = {"name": "dmd2", "sampler": "flow_map", "critic_updates": 1, "critic_lr": 1e-3}
SHARED = DMD2 | {"shared": True, "projected": True}
SUMS = {"dmd2": DMD2, "shared": SHARED, "carried": SHARED | {"carried": True, "critic_start": "teacher"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMS)
def test_beside_dmd2_they_learn_on_a_streamed_base_what_they_learn_on_copies_bitwise_and_go_on(
    folder: Path, wan1: Path, name: str
) -> None:
    given = {"objective": ["flow_map", SUMS[name]]}
    whole = trained(folder, wan1, f"{name}_streamed", STREAMED, **given)
    assert_same(trained(folder, wan1, f"{name}_copies", COPIES, **given), whole)
    middle = str(whole / "checkpoints" / "step_00000001")
    assert_same(trained(folder, wan1, f"{name}_resumed", STREAMED, resume=middle, **given), whole)


@pytest.mark.slow
def test_a_run_begins_with_the_second_time_of_a_file_or_of_an_earlier_run(
    folder: Path, wan1: Path, run: Path
) -> None:
    """It moves by rounding alone, at a learning rate of 0."""
    still = {"deepspeed_config": student_engine(2, optimizer=ADAM | {"params": {"lr": 0.0}}), "lr": None}
    start = {"lora": LORA | {"start": str(run / "lora.safetensors")}, **still}
    by_file = trained(folder, wan1, "by_file", STREAMED, **start)
    by_run = trained(folder, wan1, "by_run", STREAMED, student_config={"init": str(run)}, **still)
    last = load_file(run / "lora.safetensors")
    for output in (by_file, by_run):
        weights = load_file(output / "lora.safetensors")
        assert weights.keys() == last.keys()
        for name, value in last.items():
            torch.testing.assert_close(weights[name], value, rtol=0.02, atol=1e-3)
