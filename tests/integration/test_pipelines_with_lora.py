"""`sample` and `evaluate` with LoRA files; runs of a teacher's adapters, which end with such files."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from drawing import of_stock, stock
from PIL import Image
from ranks import wandistiller
from recipes import train
from safetensors.torch import load_file, save_file
from styles import style

from wandistiller.evaluation.sampling import Sampling

PROMPTS = ["a red circle on a blue background, left", "a blue square on a red background, center"]
SIZE = ["--height", "32", "--width", "32"]


@pytest.fixture(scope="module")
def run(folder: Path, wan1: Path) -> Path:
    """Adapters of the whole teacher for four steps."""
    objective = {"name": "dmd2", "steps": 4, "critic_updates": 1}
    lora = {"rank": 4, "targets": ["to_q", "to_out", "ffn"], "alpha": 8.0}
    given = {"lora": lora, "objective": objective, "max_steps": 3, "student_config": {}, "lr": 0.01}
    engine = {"deepspeed_config": json.loads(json.dumps(ENGINE))}
    return train(folder, wan1, "run", ranks=1, **given, **engine)


ENGINE = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "activation_checkpointing": {},
}


def drawn(folder: Path, name: str, *words: str | Path, code: int = 0) -> dict[str, bytes]:
    given = ["sample", "--prompts", *PROMPTS, "--output", folder / name, *SIZE, *words]
    wandistiller(*given, code=code)
    return {file.name: file.read_bytes() for file in sorted((folder / name).glob("*.png"))}


def refused(*words: str | Path) -> str:
    return wandistiller(*words, "--prompts", *PROMPTS, "--output", "nowhere", code=2).stderr


def test_a_run_of_the_whole_teacher_s_adapters_ends_with_their_file_alone(run: Path) -> None:
    assert (run / "lora.safetensors").is_file() and not (run / "student").exists()
    assert json.loads((run / "DONE").read_text())["student"] == str(run)


def test_a_run_with_a_lora_names_an_evaluation_of_few_of_its_prompts(run: Path) -> None:
    assert " --num_prompts 16 --quick\n" in (run / "logs" / "rank_0.log").read_text()


def test_sampling_a_run_is_sampling_its_teacher_with_its_file_bitwise(
    folder: Path, run: Path, wan1: Path
) -> None:
    of_run = drawn(folder, "of_run", "--model", run)
    assert of_run == drawn(folder, "by_file", "--lora", run / "lora.safetensors", "--model", wan1)
    weights = load_file(run / "lora.safetensors")
    assert all(value.any() for name, value in weights.items() if ".lora_B." in name)


def test_stock_diffusers_draws_the_same_with_the_file_and_the_card_s_scheduler(
    folder: Path, run: Path, wan1: Path
) -> None:
    pipe = stock(wan1)
    card = (run / "lora.card" / "README.md").read_text()
    (line,) = (line for line in card.splitlines() if line.startswith("pipe.scheduler = "))
    exec(line, {"pipe": pipe, "FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler})
    pipe.load_lora_weights(str(run / "lora.safetensors"))
    sampling = Sampling(height=32, width=32, steps=4)
    for number, prompt in enumerate(PROMPTS):
        pixels = of_stock(pipe, [prompt], [number], sampling)[0, :, 0]
        ours = np.asarray(Image.open(folder / "of_run" / f"{number:04d}.png")).transpose(2, 0, 1) / 255
        assert np.abs(ours - pixels.numpy()).max() < 2 / 255


def test_the_code_of_the_card_draws_a_picture(
    run: Path, wan1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is, but for its places, and for the line that needs a GPU (tests/simulated/test_card.py)."""
    code = (run / "lora.card" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (offload,) = (line for line in code.splitlines(keepends=True) if "offload" in line)
    assert offload.startswith("pipe.enable_model_cpu_offload()")
    assert '"default": torch.bfloat16' in code and "torch_dtype=dtypes" in code and "frames = pipe(" in code
    places = {f'"{wan1.name}"': f'"{wan1}"', "FOLDER_OF_THE_FILES": str(run), offload: ""}
    for name, place in places.items():
        code = code.replace(name, place)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert Image.open("image.png").size == (32, 32)


def test_a_run_is_evaluated_by_its_files_in_its_own_and_other_numbers_of_steps(run: Path) -> None:
    words = ["--prompts", *PROMPTS, "--steps", "2", "4", "--quick", *SIZE]
    wandistiller("evaluate", "--student_path", run, *words)
    result = json.loads((run / "evaluation.json").read_text())
    assert result["trained_steps"] == 3
    assert result["steps"] == 4 and result["ratio"]["parameters"]["value"] == 1.0
    assert {"2", "4"} <= result["by_steps"]["student"].keys()


def test_what_cannot_be_sampled_is_refused_with_its_reason(folder: Path, wan1: Path) -> None:
    file = style(wan1, folder / "others.safetensors", "to_q")
    assert "no pipeline is named. Give one, or a LoRA file with --lora." in refused("sample")
    assert f"{file}: `teacher_path` is missing. Say with --teacher_path" in refused("sample", "--lora", file)
    text = refused("sample", "--model", wan1, "--lora", "away.safetensors")
    assert "away.safetensors: no such file." in text
    save_file({name: value * math.inf for name, value in load_file(file).items()}, file)
    text = refused("sample", "--model", wan1, "--lora", file, *SIZE)
    assert f"{file}: tensor `transformer.blocks.0.attn1.to_q" in text and "are not finite" in text
