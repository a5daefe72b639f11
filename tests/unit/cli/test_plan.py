"""The output of `wandistiller plan`."""

import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from planned import TWO_NODES, plan_output
from ranks import wandistiller, write_json
from slow_cases import slow_but

from wandistiller.cli.flags import PlanFlags
from wandistiller.cli.main import main
from wandistiller.cli.plan import FITTING, described
from wandistiller.cli.plan_report import next_command
from wandistiller.planner.machine import Machine
from wandistiller.utils.files import read_json
from wandistiller.utils.system_memory import GIB

SMALL = "Wan2.1-T2V-1.3B"
MACHINE_24 = "--gpus 1 --gpu_memory 24 --host_memory 128 --disk 1000"


@pytest.fixture
def output(published: Path, capsys: pytest.CaptureFixture, quiet_logging: None) -> Callable[..., str]:
    """A function that runs `plan` for a machine and returns its output."""
    return partial(plan_output, published, capsys)


def in_seconds(text: str) -> float:
    """The duration that a text begins with."""
    number, unit = text.split()[:2]
    return float(number) * {"h": 3600, "min": 60, "s": 1, "ms": 1e-3}[unit.rstrip(";,")]


def test_hours_prompts_and_cost_of_the_whole_run_follow_from_a_step(output: Callable[..., str]) -> None:
    """Two GPUs, 36,000 steps of 16 samples, 8 prompts with 2 rollouts each."""
    flags = "--price_per_gpu_hour 2.5 --max_steps 36000 --rollouts_per_prompt 2".split()
    machine = "--gpus 2 --gpu_memory 80 --host_memory 500 --disk 1000"
    text = output(machine, *flags, wan=SMALL)
    before = "a step takes about ", "\nin all: about ", "36000 steps, and "
    step, steps, rollouts = (in_seconds(text.partition(words)[2]) for words in before)
    assert steps == pytest.approx(36_000 * step, rel=0.05)  # of two digits
    assert "trains on 576000 samples; the data have 16, so each is seen 36000 times" in text
    cost = float(text.partition("it costs about ")[2].split(":")[0])
    assert cost == pytest.approx(steps / 3600 * 2 * 2.5, rel=0.02) and rollouts < 0.01 * steps


def test_all_stages_take_and_cost_the_sum_of_each_s_with_what_they_share_once(
    published: Path, tmp_path: Path, output: Callable[..., str]
) -> None:
    recipe = {
        "output_dir": str(tmp_path),
        "max_steps": 2000,
        "rollouts_per_prompt": 2000,
        "sample_every": 2000,
    }
    stages = [{"name": "match"}, {"name": "few", "objective": {"name": "consistency", "edges": 4}}]
    file = write_json(tmp_path / "stages.json", recipe | {"stages": stages})
    machine = "--gpus 2 --gpu_memory 80 --host_memory 500 --disk 9000"
    text = output(f"{machine} --price_per_gpu_hour 3 --recipe {file}", wan=SMALL)
    *each, whole = (float(n) for n in re.findall(r"costs? about ([\d.]+): ", text))
    assert len(each) == 2 and whole == pytest.approx(sum(each), abs=0.02)
    made = [stage.count("the teacher's rollouts") for stage in text.split("==== stage ")[1:]]
    assert made == [1, 0]
    line = re.search(r"all 2 stages: about (.*) for their steps and rollouts", text)
    assert in_seconds(line[1]) / 3600 * 2 * 3 == pytest.approx(whole, rel=0.01)


def test_the_simplest_student_json_is_listed_with_each_teacher_json_that_fits(
    output: Callable[..., str],
) -> None:
    text = output("--gpus 8 --gpu_memory 80 --host_memory 1000 --disk 500", wan=SMALL)
    teachers = re.findall(r" a step: student \w+, teacher (\w+)", text)
    assert len(teachers) == len(set(teachers))
    assert {*teachers} >= {"replicated", "streamed", "sharded", "files", "streamed_int8", "streamed_nf4"}


def test_a_step_with_other_json_files_keeps_activations_too(output: Callable[..., str]) -> None:
    flags = ("--lora", '{"rank": 16}', "--deepspeed_config", "ds_configs/student/lora_wan_80.json")
    machine = "--gpus 1 --gpu_memory 80 --host_memory 500 --disk 500 --num_frames 1"
    text = output(machine, *flags, "--teacher_deepspeed_config", "gpu", wan=SMALL)
    assert "of the last 30 of 30 blocks kept" in text
    step = text.partition("a step takes about ")[2].partition(",")[0]
    assert f" {step} a step: student zero0, teacher replicated" in text


def test_what_is_auto_is_chosen_as_train_does_and_planned(output: Callable[..., str]) -> None:
    text = output(MACHINE_24, "--teacher_device_strategy", "auto", wan=SMALL)
    assert "chosen    student as given, teacher replicated, micro-batch 1 x 8\n" in text
    assert " GiB on each GPU" in text and " kept in reserve)\n" in text
    assert "30 layers, replicated, bfloat16" in text and "\nfits: " in text


@pytest.mark.slow
def test_the_weights_of_what_fits_are_named_where_its_own_do_not(output: Callable[..., str]) -> None:
    lora = ("--lora", '{"rank": 16}', "--teacher_deepspeed_config", "stream8")
    text = output("--gpus 1 --gpu_memory 16 --host_memory 18 --disk 1000", *lora, fits=False)
    listed = text.partition(f"\n{FITTING}\n")[2]
    assert ", teacher files, " in listed and "int8" not in listed
    assert re.search(r"streamed_nf4 in nf4, .*, which changes the teacher's outputs\n", listed)


def test_of_a_teacher_that_accelerate_will_place_no_verdict_is_given(output: Callable[..., str]) -> None:
    machine = "--gpus 1 --gpu_memory 24 --host_memory 256 --disk 1000"
    text = output(machine, "--teacher_device_strategy", "sequential")
    why = "accelerate finds a place for the teacher's 26.7 GiB when it loads them"
    assert f"whether it fits is not known: {why}" in text
    assert "\nfits: " not in text and "without the teacher: " in text


def flags_that_fit(text: str) -> list[str]:
    """The flags that the verdict names."""
    return text.partition("it fits with\n")[2].splitlines()[0].split()


@pytest.mark.parametrize(
    ("recipe", "machine", "more", "teacher"),
    slow_but(
        [],
        [
            ("1x16_wan2.2_a14b_lora", "24 --host_memory 64", ["--num_frames", "81"], "streamed"),
            ("1x16_wan2.2_a14b_lora", "24 --host_memory 32", [], "streamed_nf4"),
            ("1x16_wan2.1_14b_lora", "24 --host_memory 32", [], "streamed_int8"),
            ("1x24_wan2.1_14b", "24 --host_memory 96", [], "files"),
        ],
    ),
)
def test_with_the_flags_of_the_verdict_every_stage_fits(
    recipe: str, machine: str, more: list[str], teacher: str, published: Path, output: Callable[..., str]
) -> None:
    """Of a LoRA of A14B at 81 frames those that keep activations in CPU memory."""
    file = f"ds_configs/machines/{recipe}.json"
    words = f"--gpus 1 --gpu_memory {machine} --disk 1000 --recipe {file}"
    wan = read_json(file)["teacher_path"].removeprefix("Wan-AI/").removesuffix("-Diffusers")
    refused = output(words, *more, wan=wan, fits=False)
    assert f", teacher {teacher}" in refused.partition(FITTING)[2]
    text = output(words, *more, *flags_that_fit(refused), wan=wan)
    assert re.search(r"\nverdict: (it fits|all 2 stages fit)\n", text) and "NOT fit" not in text


@pytest.mark.slow
def test_where_no_student_fits_the_recipe_of_a_lora_of_both_experts_is_named(
    published: Path, output: Callable[..., str]
) -> None:
    """A14B on 24 GB with 64 GiB, whose half has no room but on a disk."""
    machine = "--gpus 1 --gpu_memory 24 --host_memory 64 --disk 200"
    refused = output(machine, wan="Wan2.2-T2V-A14B", fits=False)
    assert "\nverdict: it does NOT fit\nno settings fit here. What helps: " in refused
    named = re.search(r"a LoRA needs least: wandistiller plan --recipe (\S+)", refused)[1]
    assert read_json(named)["lora"]["rank"] and "A14B" in read_json(named)["teacher_path"]


def test_where_the_disk_alone_is_short_no_settings_are_named(output: Callable[..., str]) -> None:
    text = output("--gpus 1 --gpu_memory 80 --host_memory 500 --disk 5", wan=SMALL, fits=False)
    assert "\nverdict: it does NOT fit\nit fits with more free disk\n" in text


def test_a_run_that_has_a_lora_is_not_told_to_take_one(output: Callable[..., str]) -> None:
    text = output("--gpus 1 --gpu_memory 3 --host_memory 4 --disk 500", "--lora", wan=SMALL, fits=False)
    assert "\nno settings fit here. What helps: fewer frames, " in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "-1"], "`gpus` is -1"),
        (["--gpus", "0", "--gpu_memory", "24"], "`--gpus 0` has none"),
        (["--gpus", "4"], "There is no GPU here"),
        (["--price_per_gpu_hour", "-1"], "`price_per_gpu_hour` is -1.0"),
    ],
)
@pytest.mark.usefixtures("quiet_logging")
def test_a_machine_that_cannot_be_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["plan", "--teacher_path", "tiny", "--data_path", "tiny", *flags]) == 2
    assert message in capsys.readouterr().err


def test_each_phase_s_parts_add_up_to_its_height_in_every_kind_of_memory(output: Callable[..., str]) -> None:
    text = output("--gpus 2 --gpu_memory 24 --host_memory 128 --disk 500", wan=SMALL)
    each = "each with 2 x 24 GiB of GPU memory, 128 GiB of CPU memory, 500 GiB of disk"
    assert f"1 node(s), {each}; 2 rank(s)" in text
    gpu, cpu = [block.splitlines() for block in text.split("\n\n") if re.search(r"^(GPU|CPU .*), GiB", block)]
    assert gpu[0].startswith("GPU, GiB ")
    for rows in (gpu, cpu):
        columns = [row.replace(" -", " 0").split()[-6:] for row in rows[1:]]
        for *parts, height in zip(*(map(float, column) for column in columns), strict=True):
            assert sum(parts) == pytest.approx(height, abs=0.005 * len(parts) + 0.006)
    assert "student's float32 weights and optimizer" in text and "reserve: 2.00 GiB on each GPU" in text


@pytest.mark.parametrize("gpus", [None, 0])
def test_a_machine_without_gpus_has_as_many_ranks_as_here(gpus: int | None) -> None:
    machine = described(PlanFlags(gpus=gpus, nodes=3))
    assert (machine.device_free, machine.ranks, machine.ranks_on_node) == (None, 3, 1)


@pytest.mark.slow
def test_what_this_machine_lacks_is_no_fault_of_another(output: Callable[..., str], tmp_path: Path) -> None:
    zero2 = {k: v for k, v in read_json("ds_configs/student/zero2.json").items() if k != "bf16"}
    more = {"fp16": {"enabled": True}, "activation_checkpointing": {"cpu_checkpointing": True}}
    file = write_json(tmp_path / "fp16.json", zero2 | more)
    machine = "--gpus 2 --gpu_memory 80 --host_memory 500 --disk 1000"
    text = output(machine, "--deepspeed_config", str(file), fits=False)
    assert "a step takes" in text


@pytest.mark.slow
def test_under_a_launcher_ranks_and_nodes_are_the_launcher_s() -> None:
    text = wandistiller("plan", "--teacher_path", "tiny", "--data_path", "tiny", ranks=2).stdout
    assert text.count("1 node(s), each with no GPU") == 1
    assert "; 2 rank(s)" in text and "a step takes about" in text


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_logging")
def test_the_command_that_is_printed_after_a_recommendation_passes_its_dry_run(
    wan1: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file, usual = tmp_path / "my run.json", f"--teacher_path {wan1} --data_path tiny --height 32 --width 32"
    machine = "--gpus 2 --gpu_memory 80 --host_memory 500 --disk 1000"
    assert main(["plan", *usual.split(), *machine.split(), "--recommend", str(file)]) == 0
    command = shlex.split(capsys.readouterr().out.partition("\nnext: ")[2])
    assert command[:5] == ["deepspeed", "--num_gpus", "2", "--module", "wandistiller"]
    assert main([*command[5:], "--dry_run"]) == 0
    text = capsys.readouterr().err
    assert "into runs/my run\n" in text and "objective velocity" in text


@pytest.mark.parametrize(
    ("machine", "command"),
    [
        (TWO_NODES, "HOSTFILE=launch/hostfile bash launch/deepspeed.sh train --recipe a.json"),
        (Machine(None, GIB, GIB, 1, 1), "wandistiller train --recipe a.json"),
        (Machine(None, GIB, GIB, 2, 2), "deepspeed --num_gpus 2 --module wandistiller train --recipe a.json"),
    ],
)
def test_the_command_after_a_recommendation_is_that_of_its_machine(machine: Machine, command: str) -> None:
    assert next_command("a.json", machine) == command
