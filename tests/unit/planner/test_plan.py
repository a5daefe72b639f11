"""What `wandistiller plan` says."""

import json
from pathlib import Path

import pytest
from planned import ONE_24, told
from planned import published_job as job
from ranks import wandistiller

from wandistiller.cli.main import main
from wandistiller.cli.plan import described
from wandistiller.planner import hardware_rates
from wandistiller.planner.hardware_rates import GPU, default_rates, override_rates
from wandistiller.planner.machine import Machine
from wandistiller.planner.peak_memory import activations, plan
from wandistiller.utils.files import read_json
from wandistiller.utils.system_memory import GIB


@pytest.mark.usefixtures("quiet_logging")
def test_a_machine_that_is_not_this_one_can_be_described(
    published: Path, capsys: pytest.CaptureFixture
) -> None:
    said = told(
        published,
        capsys,
        "--gpus 8 --nodes 2 --gpu_memory 80 --host_memory 2000 --disk 300",
        wan="Wan2.2-T2V-A14B",
    )
    assert (
        "2 node(s), each with 8 x 80 GiB of GPU memory, 2000 GiB of CPU memory, 300 GiB of disk; 16 rank(s)"
        in said
    )
    assert "fits: " in said and "a step takes at least" in said


@pytest.mark.usefixtures("quiet_logging")
def test_activations_are_told_with_and_without_checkpointing_whatever_the_json_says(
    published: Path, capsys: pytest.CaptureFixture
) -> None:
    ds = read_json("ds_configs/student/zero3.json")
    found = {}
    for says, json_of in (
        ("with", ds),
        ("without", {k: v for k, v in ds.items() if k != "activation_checkpointing"}),
    ):
        asked = job(published, ONE_24, deepspeed_config=json_of)
        found[says] = plan(asked, ONE_24)["train"].alternatives["student"]["student's activations"].transient
        both = activations(asked, ONE_24)
    assert both == (found["with"], found["without"]) and found["without"] > 5 * found["with"]
    said = told(
        published,
        capsys,
        "--gpus 1 --gpu_memory 24 --host_memory 128 --disk 1000",
        "--deepspeed_config",
        "ds_configs/student/zero3.json",
    )
    with_, without = (f"{n / GIB:.2f} GiB" for n in both)
    assert (
        f"student's activations: {with_} with checkpointing (as its JSON says), {without} without\n" in said
    )


@pytest.mark.usefixtures("quiet_logging")
def test_hours_prompts_and_cost_of_the_whole_run_follow_from_a_step(
    published: Path, capsys: pytest.CaptureFixture
) -> None:
    """Two GPUs, 36,000 steps of 16 samples, 8 prompts with 2 rollouts each."""
    flags = "--price_per_gpu_hour 2.5 --max_steps 36000 --rollouts_per_prompt 2".split()
    machine = "--gpus 2 --gpu_memory 80 --host_memory 500"
    said = told(published, capsys, machine, *flags, wan="Wan2.1-T2V-1.3B")
    seconds, hours, cache, cost = (
        float(said.partition(before)[2].split()[0].rstrip(":"))
        for before in (
            "a step takes at least ",
            "an estimate: at least ",
            " steps, and ",
            "it costs at least ",
        )
    )
    assert hours == pytest.approx(10 * seconds, abs=0.06)
    assert "trains on 576000 samples; the data have 16, so each is seen 36000.0 times" in said
    assert "for each to be seen once bring 288000 prompts" in said
    assert cost == pytest.approx((hours + cache) * 2 * 2.5, abs=0.6)


@pytest.mark.usefixtures("quiet_logging")
def test_what_is_left_to_the_machine_is_chosen_as_train_does_and_planned(
    published: Path, capsys: pytest.CaptureFixture
) -> None:
    machine = "--gpus 1 --gpu_memory 24 --host_memory 128 --disk 1000"
    said = told(published, capsys, machine, "--teacher_device_strategy", "auto", wan="Wan2.1-T2V-1.3B")
    assert (
        "chosen    student as given, teacher replicated, micro-batch 1 x 8\n" in said
        and " kept in reserve); a step" in said
    )
    assert "30 layers, replicated, bfloat16" in said and "\nfits: " in said


@pytest.mark.usefixtures("quiet_logging")
def test_of_a_teacher_that_accelerate_will_place_no_verdict_is_given(
    published: Path, capsys: pytest.CaptureFixture
) -> None:
    machine = "--gpus 1 --gpu_memory 24 --host_memory 256 --disk 1000"
    said = told(published, capsys, machine, "--teacher_device_strategy", "sequential")
    assert (
        "whether it fits is not known: accelerate finds a place for the teacher's 26.7 GiB when it loads them"
        in said
    )
    assert "\nfits: " not in said and "without the teacher: " in said


@pytest.mark.usefixtures("quiet_logging")
def test_what_does_not_fit_is_said_with_how_much_is_missing(
    published: Path, capsys: pytest.CaptureFixture
) -> None:
    assert "does NOT fit: it needs " in told(published, capsys, "--gpus 1 --gpu_memory 24 --host_memory 16")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpus", "-1"], "`gpus` is -1"),
        (["--gpu_memory", "0"], "`gpu_memory` is 0.0"),
        (["--nodes", "0"], "`nodes` is 0"),
        (["--gpus", "0", "--gpu_memory", "24"], "`--gpus 0` has none"),
        (["--gpus", "4"], "There is no GPU here"),
        (["--price_per_gpu_hour", "-1"], "`price_per_gpu_hour` is -1.0"),
        (["--rates", '{"tflop": 1}'], "`rates.tflop`"),
        (["--rates", '{"pcie": "fast"}'], "`rates.pcie`"),
    ],
)
@pytest.mark.usefixtures("quiet_logging")
def test_a_machine_that_cannot_be_is_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["plan", "--teacher_path", "tiny", "--data_path", "tiny", *flags]) == 2
    assert said in capsys.readouterr().err


def test_rates_that_are_given_replace_the_usual_ones_of_such_a_gpu() -> None:
    assert (
        default_rates(int(23.5 * GIB)) == GPU[24]
        and default_rates(int(79.1 * GIB)) == GPU[80]
        and default_rates(4 * GIB) == GPU[16]
    )
    assert (
        override_rates(GPU[24], {"pcie": 12}).pcie == 12
        and override_rates(GPU[24], {"pcie": 12}).tflops == GPU[24].tflops
    )


def test_a_gpu_that_others_use_too_is_still_of_its_kind() -> None:
    assert default_rates(Machine(60 * GIB, GIB, GIB, 1, 1, device_total=80 * GIB).device_size) == GPU[80]


@pytest.mark.usefixtures("quiet_logging")
def test_each_phase_s_parts_add_up_to_its_height_in_every_kind_of_memory(
    published: Path, capsys: pytest.CaptureFixture
) -> None:
    said = told(
        published, capsys, "--gpus 2 --gpu_memory 24 --host_memory 128 --disk 500", wan="Wan2.1-T2V-1.3B"
    )
    tables = [block.splitlines() for block in said.split("\n\n") if "GiB of one rank" in block]
    assert [rows[0].split(":")[0].split()[-1] for rows in tables][:1] == ["GPU"] and len(tables) == 2
    for rows in tables:
        numbers = [
            [0.0 if n == "-" else float(n) for n in row.split()[-6:]]
            for row in rows[1:]
            if "pinned" not in row
        ]
        for *parts, height in zip(*numbers, strict=True):
            assert sum(parts) == pytest.approx(height, abs=0.005 * len(parts) + 0.006)
    assert "student's float32 weights and optimizer" in said and "reserve: 2.00 GiB on each GPU" in said


def test_a_machine_without_gpus_has_as_many_ranks_as_here() -> None:
    left_out = dict.fromkeys(("gpus", "gpu_memory", "host_memory", "disk", "nodes"))
    for gpus in (None, 0):
        made = described(left_out | {"gpus": gpus, "nodes": 3})
        assert (made.device_free, made.ranks, made.ranks_on_node) == (None, 3, 1)


@pytest.mark.usefixtures("quiet_logging")
def test_what_this_machine_lacks_is_no_fault_of_another(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    ds = tmp_path / "fp16.json"
    zero2 = {k: v for k, v in read_json("ds_configs/student/zero2.json").items() if k != "bf16"}
    ds.write_text(
        json.dumps(
            zero2 | {"fp16": {"enabled": True}, "activation_checkpointing": {"cpu_checkpointing": True}}
        )
    )
    assert "a step takes" in told(
        published, capsys, "--gpus 2 --gpu_memory 80 --host_memory 500", "--deepspeed_config", str(ds)
    )


@pytest.mark.usefixtures("quiet_logging")
def test_rates_are_measured_on_the_swap_folder_s_disk_and_the_others_named(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    read = []
    monkeypatch.setattr(hardware_rates, "_reads", lambda published: read.append(published) or 7.0)
    swap = tmp_path / "swap"
    ds = read_json("ds_configs/student/zero3_nvme.json")
    for section in ("offload_param", "offload_optimizer"):
        ds["zero_optimization"][section]["nvme_path"] = str(swap)
    file = tmp_path / "nvme.json"
    file.write_text(json.dumps(ds))
    said = told(published, capsys, "--host_memory 500 --measure", "--deepspeed_config", str(file))
    assert (
        read == [swap] and "not measured: link and network" in said and "from and to disk at 7 GB/s" in said
    )


def test_under_a_launcher_ranks_and_nodes_are_the_launcher_s() -> None:
    said = wandistiller("plan", "--teacher_path", "tiny", "--data_path", "tiny", ranks=2).stderr
    assert (
        said.count("1 node(s), each with no GPU") == 1
        and "; 2 rank(s)" in said
        and "a step takes at least" in said
    )
