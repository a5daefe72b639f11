"""The recipes in ds_configs/machines/ fit the machines that they are named after."""

from dataclasses import replace
from pathlib import Path

import pytest
from comfy_files import sparse_file
from image_data import image_data
from markdown_pages import VIDEOS
from planned import EIGHT_80, gpus, published_job
from published_wan import IMAGE_TO_VIDEO, PUBLISHED
from ranks import ROOT
from shipped import placement
from styles import write_users_files

from wandistiller.cli.main import main
from wandistiller.cli.plan_report import duration
from wandistiller.config.job import Job
from wandistiller.config.recipe import read_recipe
from wandistiller.config.stages import read_jobs
from wandistiller.evaluation.sampling import Sampling
from wandistiller.network.adapters import TARGETS
from wandistiller.network.folder import Folder
from wandistiller.planner.free_memory import with_free_memory
from wandistiller.planner.machine import demands, moments, most
from wandistiller.planner.peak_memory import plan
from wandistiller.planner.sampling import Drawing, choices
from wandistiller.planner.time import Times, usual_rates
from wandistiller.teacher.teacher_json import with_keys
from wandistiller.utils.files import read_json
from wandistiller.utils.parameter_patterns import any_names
from wandistiller.utils.system_memory import GIB
from wandistiller.wan.added_lora import AddedLora

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
    "1x24_wan2.1_14b_any_step_lora": 64,
    "8x80_wan2.1_1.3b_any_step": 1000,
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
MADE = [name for name in CPU_MEMORY if name.endswith(("_lora", "_style"))]


def data_of(name: str, published: Path, folder: Path) -> Path:
    """Prompts, or, written into `folder`, prompts with first frames."""
    return image_data(folder) if "_i2v_" in name else published / "prompts.txt"


@pytest.fixture
def flags(name: str, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A shipped recipe with the paths of files that are here, and its machine."""
    recipe, (count, each) = FOLDER / f"{name}.json", name.split("_")[0].split("x")
    monkeypatch.chdir(published)  # where LoRA files are that recipes name
    write_users_files(published)
    wan, data = published / read_json(recipe)["teacher_path"], data_of(name, published, tmp_path)
    paths = f"--recipe {recipe} --output_dir {tmp_path} --teacher_path {wan} --data_path {data}"
    machine = f"--gpus {count} --gpu_memory {each} --host_memory {CPU_MEMORY[name]} --disk 1800"
    return [*paths.split(), *machine.split()]


@pytest.mark.slow  # test_readme.py has one
@pytest.mark.parametrize("name", CPU_MEMORY)
@pytest.mark.usefixtures("quiet_logging")
def test_a_shipped_recipe_fits_its_machine(
    name: str, flags: list[str], capsys: pytest.CaptureFixture
) -> None:
    recipe = FOLDER / f"{name}.json"
    teacher = read_json(recipe)["teacher_path"]
    assert teacher in PUBLISHED | IMAGE_TO_VIDEO and len(recipe.read_text().splitlines()) <= 24
    assert main(["plan", *flags]) == 0
    output, count = capsys.readouterr().out, int(name.split("x")[0])
    batch = {"video": 8, "lora": max(4, count), "style": 4}.get(name.rpartition("_")[2], 64)
    assert "\nfits: " in output and "NOT fit" not in output and f" {batch} samples a step" in output


def with_its_lora(job: Job, file: Path) -> Folder:
    """The teacher with a LoRA of the run's size, and of a style of rank 32, whose zeros take no disk."""
    config, shapes = job.folder.config, {}
    rank = job.run.lora["rank"] + 32 * bool(job.run.teacher_lora)
    targets = job.run.lora.get("targets", TARGETS)
    for layer in (layer for layer in config.linear_layers if any_names(targets, layer)):
        outputs, inputs = config.shapes[f"{layer}.weight"]
        for part, shape in (("A", [rank, inputs]), ("B", [outputs, rank])):
            shapes[f"transformer.{layer}.lora_{part}.weight"] = shape
    sparse_file(file, shapes)
    return replace(job.folder, added=(AddedLora(file=str(file)),))


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
@pytest.mark.usefixtures("quiet_logging")
def test_a_lora_is_drawn_on_the_gpus_that_made_it_in_no_more_cpu_memory_than_its_run_took(
    name: str, flags: list[str], tmp_path: Path
) -> None:
    count, each = map(int, name.split("_")[0].split("x"))
    paths = {key.removeprefix("--"): value for key, value in zip(flags[2:8:2], flags[3:8:2], strict=True)}
    machine = gpus(count, each, CPU_MEMORY[name])
    stages = read_jobs(read_recipe(flags[1], paths), count, here=False)
    runs = (plan(with_free_memory(job, machine)[0], machine) for job in stages)
    took = max(demands(moments(phases), machine)[1].need for phases in runs)
    *_, last = stages
    how = Sampling(height=480, width=832, num_frames=last.run.num_frames, steps=4)
    drawing = Drawing([with_its_lora(last, tmp_path / "lora.safetensors")], how, 1, 1)
    auto = with_keys(placement("auto"), weights=last.teacher.weights)
    chosen = next(choice for choice in choices(auto, drawing, machine) if choice.over <= 0)
    assert chosen.needs[1].need <= took, f"{chosen}, its run {took / GIB:.1f} GiB"


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
