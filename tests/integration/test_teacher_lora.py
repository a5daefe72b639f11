"""Runs whose teacher has a LoRA added: those of the teacher of merged weights, by every placement."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from ranks import ROOT, losses, wandistiller
from recipes import recipe, recipe_file, train
from safetensors.torch import load_file
from slow_cases import slow_but
from states import state
from styles import style, with_style

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.export.source import read_source
from wandistiller.planner.disk import written
from wandistiller.tiny.making.style import judge, write
from wandistiller.tiny.shapes import HELD_OUT
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.transformer import velocity

EXPERTS = ("transformer", "transformer_2")
RUN = {"max_steps": 2, "save_every": 2, "sample_every": 2}
LORA = {
    "student_config": {},
    "lora": {"rank": 4},
    "objective": {"name": "dmd2", "steps": 4, "critic_updates": 1},
}
ZERO_0, ZERO_3 = (
    {"zero_optimization": {"stage": n, "stage3_param_persistence_threshold": 0}} for n in (0, 3)
)
PLACEMENTS: dict[str, dict[str, Any]] = {
    "replicated": ZERO_0,
    "sharded": ZERO_3,
    "streamed": {"wandistiller": {"placement": "streamed"}},
    "files": {"wandistiller": {"placement": "files"}},
    "owner": {"wandistiller": {"placement": "owner"}},
    "device map": {"wandistiller": {"placement": "device_map", "device_map": {"*": "cpu"}}},
    "int8": ZERO_0 | {"wandistiller": {"weights": "int8"}},
}


@pytest.fixture(scope="module")
def file(folder: Path, wan2: Path) -> Path:
    return style(wan2, folder / "style.safetensors", "to_q", "to_out", "ffn")


@pytest.fixture(scope="module")
def merged(folder: Path, wan2: Path, file: Path) -> Path:
    return with_style(wan2, folder / "merged", (file, 0.5), experts=EXPERTS)


def added(file: Path) -> dict[str, Any]:
    return {"teacher_lora": {"file": str(file), "strength": 0.5, "expert": "both"}}


@pytest.mark.parametrize("placement", slow_but([], PLACEMENTS))
def test_a_run_is_that_of_the_teacher_of_merged_weights_bitwise(
    folder: Path, wan2: Path, file: Path, merged: Path, placement: str
) -> None:
    given = RUN | {"teacher_deepspeed_config": PLACEMENTS[placement], "ranks": 2 - (placement == "streamed")}
    one = train(folder, wan2, f"{placement}_added", **given, **added(file))
    other = train(folder, merged, f"{placement}_merged", **given)
    assert losses(one) == losses(other)
    weights = [load_file(next((run / "student").rglob("transformer/*.safetensors"))) for run in (one, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.fixture(scope="module")
def adapters(folder: Path, wan2: Path, file: Path) -> Path:
    given = RUN | LORA | {"teacher_deepspeed_config": PLACEMENTS["streamed"], "sample_prompts": []}
    return train(folder, wan2, "adapters", ranks=1, **given, **added(file))


@pytest.mark.slow
def test_adapters_learn_what_they_learn_of_the_teacher_of_merged_weights_bitwise(
    folder: Path, adapters: Path, merged: Path
) -> None:
    given = RUN | LORA | {"teacher_deepspeed_config": PLACEMENTS["streamed"]}
    assert losses(adapters) == losses(train(folder, merged, "adapters_merged", ranks=1, **given))


def test_the_file_of_adapters_brings_the_teachers_lora_too_to_the_unchanged_teacher(
    adapters: Path, wan2: Path
) -> None:
    pipe = WanPipeline.from_pretrained(wan2)
    pipe.load_lora_weights(str(adapters / "lora.safetensors"), load_into_transformer_2=True)
    _, student = next(read_source(adapters).networks(torch.float32))
    x, text = keyed_normal((2, 16, 1, 4, 4), "x"), keyed_normal((2, 9, 32), "text")
    given = state(x, torch.tensor([0.9, 0.3]), text)
    with torch.no_grad():
        found, wanted = velocity(pipe.transformer_2, given), velocity(student, given)
        unchanged = velocity(WanPipeline.from_pretrained(wan2).transformer_2, given)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)  # the file is in bf16
    assert (unchanged - wanted).norm() > 10 * (found - wanted).norm()


def test_the_file_has_the_planned_bytes_of_both(adapters: Path, folder: Path, wan2: Path, file: Path) -> None:
    """The student is a pipeline beside it, of one of the teacher's two networks."""
    given = recipe(folder, wan2, **RUN | LORA | {"teacher_deepspeed_config": PLACEMENTS["streamed"]})
    whole = {"student_config": {"num_layers": 4}, "lora": None, "objective": "velocity"}
    both, own, weights = (
        written(read_job(RunConfig(**given | more), 1), accelerator=False).student
        for more in (added(file), {}, whole)
    )
    files = adapters / "lora.safetensors", file
    found = [sum(t.nbytes for t in load_file(one).values()) for one in files]
    assert both - weights == found[0]
    assert both - own == found[1] / 2 > 0  # a file for the style in float32


def test_export_and_evaluation_are_refused_once_the_teachers_lora_has_changed(
    folder: Path, adapters: Path, wan2: Path, file: Path
) -> None:
    before = file.read_bytes()
    style(wan2, file, "to_q", seed=1)
    export = ["export", "--checkpoint", adapters, "--output", folder / "again"]
    for words in (export, [*export, "--adapter"]):
        assert "not as they were when they were trained" in wandistiller(*words, code=2).stderr
    words = ["--prompts", "a red circle on a blue background, left", "--quick"]
    error = wandistiller("evaluate", "--student_path", adapters, *words, code=2).stderr
    assert f"{file}: was added to the teacher, and is not as it was" in error
    file.write_bytes(before)


@pytest.mark.slow
def test_a_smaller_student_is_exported_without_the_file_that_its_teacher_had(
    folder: Path, wan2: Path, file: Path
) -> None:
    own = file.rename(folder / "own.safetensors")
    output = train(folder, wan2, "smaller", ranks=1, **RUN | {"max_steps": 1}, **added(own))
    own.rename(file)
    wandistiller("export", "--checkpoint", output, "--output", folder / "of_smaller")
    assert (folder / "of_smaller" / "model_index.json").is_file()


def test_the_card_of_adapters_of_the_low_noise_expert_has_it_at_all_noise_levels(
    adapters: Path, wan2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one network of this student is made of that expert."""
    card = (adapters / "lora.card" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace("FOLDER_OF_THE_FILES", str(adapters))
    first = next(line for line in code.splitlines() if "from_pretrained" in line)
    code, *_ = code.partition("pipe.enable_")
    pipe = WanPipeline.from_pretrained(wan2)
    monkeypatch.chdir(adapters)
    exec(code.replace(first, ""), {"pipe": pipe})
    assert pipe.transformer_2 is None and pipe.config.boundary_ratio is None
    _, student = next(read_source(adapters).networks(torch.float32))
    x, text = keyed_normal((2, 16, 1, 4, 4), "x"), keyed_normal((2, 9, 32), "text")
    at = state(x, torch.tensor([0.95, 0.3]), text)
    with torch.no_grad():
        found, wanted = velocity(pipe.transformer, at), velocity(student, at)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)  # the file is in bf16
    assert "the teacher's low-noise model alone" in card


def test_another_strength_is_another_teacher_for_a_run_that_goes_on(
    folder: Path, wan2: Path, adapters: Path, file: Path
) -> None:
    more = RUN | LORA | {"max_steps": 3, "teacher_deepspeed_config": PLACEMENTS["streamed"]}
    given = recipe_file(folder, wan2, "adapters", **more, teacher_lora=f"both={file}")
    error = wandistiller("train", "--recipe", given, code=2).stderr
    assert "teacher" in error and "teacher_lora" in error


def test_a_placement_that_may_leave_weights_on_disk_is_refused(folder: Path, wan2: Path, file: Path) -> None:
    teacher = {"wandistiller": {"placement": "device_map", "device_map": "sequential"}}
    given = recipe_file(folder, wan2, "disk", **RUN, **added(file), teacher_deepspeed_config=teacher)
    error = wandistiller("train", "--recipe", given, code=2).stderr
    assert "It may leave modules on disk, from where they are read without `teacher_lora`" in error


@pytest.mark.slow
def test_the_quick_start_of_a_style_ends_with_a_table_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Its commands, with two steps of each training."""
    recipes, short = ROOT / "ds_configs" / "recipes", "--max_steps 2 --sample_steps 2 --rollout_steps 1"
    write(tmp_path / "runs" / "style_pictures")
    for name, output in (("style_lora", "style_lora"), ("lora", "style_start"), ("style", "style")):
        words = f"--recipe {recipes / name}.json --output_dir runs/{output} {short}"
        wandistiller("train", *words.split(), cwd=tmp_path)
    prompts = ["--prompts", *HELD_OUT[:2]]
    for loras in (["runs/style_start", "runs/style_lora"], ["runs/style"]):
        drawn = ["--output", f"runs/drawn/{len(loras)}_in_4_steps"]
        wandistiller("sample", "--lora", *loras, *prompts, *drawn, cwd=tmp_path)
    folders = sorted((tmp_path / "runs" / "drawn").iterdir())
    judge(folders, tmp_path / "style.png", folders[0])
    assert "| 1 in 4 steps | " in capsys.readouterr().out and (tmp_path / "style.png").is_file()
