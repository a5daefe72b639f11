"""The recipes in ds_configs/machines/ fit the machines that they are named after."""

from pathlib import Path

import pytest
from image_data import image_data
from markdown_pages import VIDEOS
from planned import EIGHT_80, gpus, published_job
from published_wan import IMAGE_TO_VIDEO, PUBLISHED
from ranks import ROOT
from shipped import placement
from slow_cases import slow_but
from styles import write_users_files

from wandistiller.cli.main import main
from wandistiller.cli.plan_report import duration
from wandistiller.config.recipe import read_recipe
from wandistiller.config.validate import read_job
from wandistiller.evaluation.sampling import Sampling
from wandistiller.planner.machine import demands, moments, most
from wandistiller.planner.peak_memory import plan
from wandistiller.planner.sampling import Drawing, choices
from wandistiller.planner.time import Times, usual_rates
from wandistiller.utils.files import read_json
from wandistiller.utils.system_memory import GIB

FOLDER = ROOT / "ds_configs" / "machines"
PATHS = ("teacher_path", "data_path", "output_dir")
CPU_MEMORY = {
    "1x12_wan2.1_1.3b_lora": 32,
    "1x12_wan2.2_5b_lora": 32,
    "1x16_wan2.1_14b_lora": 64,
    "1x16_wan2.2_a14b_lora": 64,
    "1x12_wan2.2_5b_clips_lora": 32,
    "1x24_wan2.2_a14b_clips_lora": 64,
    "8x80_wan2.1_14b_clips_lora": 1000,
    "1x16_wan2.1_14b_style": 64,
    "1x24_wan2.2_a14b_style": 64,
    "1x24_wan2.1_14b": 128,
    "1x24_wan2.2_a14b": 192,
    "4x24_wan2.1_14b": 256,
    "4x24_wan2.2_a14b": 256,
    "8x80_wan2.1_14b": 1000,
    "8x80_wan2.2_a14b": 1000,
    "1x24_wan2.1_1.3b_few_step": 64,
    "1x24_wan2.1_14b_few_step": 128,
    "1x24_wan2.2_a14b_few_step": 192,
    "8x80_wan2.1_1.3b_few_step": 1000,
    "8x80_wan2.1_14b_few_step": 1000,
    "8x80_wan2.2_a14b_few_step": 1000,
    "8x80_wan2.1_14b_lora": 1000,
    "8x80_wan2.2_a14b_lora": 1000,
    "8x80_wan2.1_14b_video": 1000,
    "8x80_wan2.2_a14b_video": 1000,
    "1x24_wan2.2_i2v_5b_lora": 64,
    "1x24_wan2.2_i2v_a14b_lora": 64,
    "8x80_wan2.2_i2v_a14b": 1000,
    "8x80_wan2.2_i2v_a14b_lora": 1000,
}
"""Recipe -> GiB of its machine; the name says how many GPUs there are, and how many GiB each has."""
MADE = [name for name in CPU_MEMORY if name.startswith("1x") and name.endswith(("_lora", "_style"))]


def data_of(name: str, published: Path, folder: Path) -> Path:
    """Prompts, or, written into `folder`, prompts with first frames."""
    return image_data(folder) if "_i2v_" in name else published / "prompts.txt"


@pytest.mark.slow  # test_readme.py has one
@pytest.mark.parametrize("name", CPU_MEMORY)
@pytest.mark.usefixtures("quiet_logging")
def test_a_shipped_recipe_fits_its_machine(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    recipe, (gpus, each) = FOLDER / f"{name}.json", name.split("_")[0].split("x")
    teacher = read_json(recipe)["teacher_path"]
    assert teacher in PUBLISHED | IMAGE_TO_VIDEO and len(recipe.read_text().splitlines()) <= 24
    monkeypatch.chdir(published)  # where LoRA files are that recipes name
    write_users_files(published)
    paths = f"--teacher_path {published / teacher} --data_path {data_of(name, published, tmp_path)}"
    flags = ["--recipe", str(recipe), "--output_dir", str(tmp_path), *paths.split()]
    machine = f"--gpus {gpus} --gpu_memory {each} --host_memory {CPU_MEMORY[name]} --disk 1800"
    assert main(["plan", *flags, *machine.split()]) == 0
    output = capsys.readouterr().out
    batch = {"video": 8, "lora": max(4, int(gpus)), "style": 4}.get(name.rpartition("_")[2], 64)
    assert "\nfits: " in output and "NOT fit" not in output and f" {batch} a step" in output


@pytest.mark.parametrize("name", slow_but(["1x16_wan2.1_14b_lora"], MADE))
def test_a_lora_is_drawn_on_the_gpu_that_made_it_in_no_more_memory_than_its_run_took(
    name: str, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(published)
    write_users_files(published)
    recipe, each = FOLDER / f"{name}.json", int(name.split("_")[0].split("x")[1])
    teacher = published / read_json(recipe)["teacher_path"]
    paths = {"teacher_path": str(teacher), "data_path": str(data_of(name, published, tmp_path))}
    first, *_ = read_recipe(str(recipe), paths | {"output_dir": str(tmp_path)}).runs.values()
    job, machine = read_job(first, 1), gpus(1, each, CPU_MEMORY[name])
    took = demands(moments(plan(job, machine)), machine)
    how = Sampling(height=480, width=832, num_frames=first.num_frames, steps=4)
    drawing = Drawing([job.folder], how, 1, 1)
    (as_trained,) = choices(job.teacher, drawing, machine)
    needs = [(of_sample.need, of_run.need) for of_sample, of_run in zip(as_trained.needs, took, strict=False)]
    assert all(of_sample <= of_run for of_sample, of_run in needs), needs
    assert any(choice.over <= 0 for choice in choices(placement("auto"), drawing, machine))


def test_every_shipped_recipe_is_checked() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(CPU_MEMORY)


@pytest.mark.slow
def test_a_row_of_a_video_recipe_is_what_plan_computes(published: Path) -> None:
    for name, row in VIDEOS.items():
        given = read_json(FOLDER / f"{name}.json")
        wan = given["teacher_path"].removeprefix("Wan-AI/").removesuffix("-Diffusers")
        run = published_job(published, EIGHT_80, wan, **{k: v for k, v in given.items() if k not in PATHS})
        takes = most(plan(run, EIGHT_80))
        step = duration(Times(run, EIGHT_80, usual_rates(EIGHT_80)).step())
        assert row[-2:] == [f"{(takes.device + takes.transient) / GIB:.0f}", step]
