"""The choices of `auto` for published Wans on machines of every size, and its messages."""

from dataclasses import replace
from pathlib import Path

import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder
from planned import gpus
from planned import published_job as job
from ranks import wandistiller, write_json
from recipes import recipe

from wandistiller.config.job import Job
from wandistiller.engine.transfers import Topology
from wandistiller.planner.disk import on_its_disk
from wandistiller.planner.hardware_rates import GPU
from wandistiller.planner.machine import Machine
from wandistiller.planner.recommend import chosen, ranked, teachers
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json
from wandistiller.utils.system_memory import GIB
from wandistiller.wan.pipeline import WanFolder

SMALL, LARGE, FIVE, TWO = "Wan2.1-T2V-1.3B", "Wan2.1-T2V-14B", "Wan2.2-TI2V-5B", "Wan2.2-T2V-A14B"
TEACHER = {"teacher_deepspeed_config": "ds_configs/teacher/auto.json"}
BOTH = TEACHER | {"deepspeed_config": "auto"}


def cpus(host: int, ranks: int = 1, disk: int = 1000) -> Machine:
    return Machine(None, host * GIB, disk * GIB, ranks, ranks)


@pytest.mark.parametrize(
    ("wan", "machine", "teacher"),
    [
        (SMALL, gpus(1, 24, 64), "replicated"),
        (LARGE, gpus(1, 40, 256), "zero_inference_cpu"),  # 26.7 GiB beside a student of 13.5
        (LARGE, gpus(1, 48, 256), "replicated"),
        (TWO, gpus(4, 40, 1000), "sharded"),
        (SMALL, cpus(64), "replicated"),
    ],
)
def test_of_the_teacher_the_fastest_placement_that_fits_is_taken(
    published: Path, wan: str, machine: Machine, teacher: str
) -> None:
    found = chosen(job(published, machine, wan, **TEACHER), machine)
    assert (found.student, found.teacher) == ("as given", teacher)


@pytest.mark.parametrize(
    ("wan", "machine", "student", "teacher"),
    [
        (SMALL, gpus(8, 80, 1000), "zero2", "replicated"),
        (SMALL, gpus(1, 24, 64), "zero0", "replicated"),
        (LARGE, gpus(8, 80, 1000), "zero2", "replicated"),
    ],
)
def test_of_both_the_fastest_that_fit_are_taken(
    published: Path, wan: str, machine: Machine, student: str, teacher: str
) -> None:
    found = chosen(job(published, machine, wan, **BOTH), machine)
    assert (found.student, found.teacher) == (student, teacher)


def test_a_teacher_that_only_fills_the_cache_has_its_place_chosen_too(published: Path) -> None:
    machine = gpus(1, 80, 256)
    assert (
        chosen(job(published, machine, LARGE, objective="trajectory", **TEACHER), machine).teacher
        == "replicated"
    )


def test_what_is_swapped_has_room_beside_the_run_s_files(published: Path) -> None:
    fits, not_beside = gpus(1, 24, 128), replace(gpus(1, 24, 128), disk_free=200 * GIB)
    asked = job(published, fits, LARGE, **BOTH)
    assert (
        chosen(asked, not_beside).student
        == chosen(asked, on_its_disk(fits, asked, None)).student
        == "zero3_nvme"
    )
    with pytest.raises(ConfigError, match=r"would need 2\d\d\.\d GiB of disk"):
        chosen(asked, on_its_disk(not_beside, asked, None))


def test_an_average_keeps_the_optimizer_off_nvme(published: Path) -> None:
    machine = gpus(1, 24, 128)
    plain, averaged = (
        names(job(published, machine, LARGE, **BOTH | more), machine) for more in ({}, {"ema": 0.999})
    )
    assert plain - averaged == {name for name in plain if name[0] == "zero3_nvme"} != set()


def test_a_micro_step_never_spans_expert_blocks(published: Path) -> None:
    machine = gpus(1, 80, 512)
    ranks = {
        blocks: ranked(job(published, machine, TWO, expert_blocks=blocks, **BOTH), machine, GPU[80])
        for blocks in (1, 4)
    }
    assert {n: {c.job.batch.micro for c in found} for n, found in ranks.items()} == {
        1: {1, 2, 4, 8},
        4: {1, 2},
    }


def test_what_this_machine_cannot_build_is_passed_over(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    machine = gpus(1, 24, 128)
    asked = job(published, machine, LARGE, **BOTH)
    here, elsewhere = names(asked, machine, here=True), names(asked, machine)
    assert here == {name for name in elsewhere if "nvme" not in "".join(name)} != elsewhere


def names(asked: Job, machine: Machine, here: bool = False) -> set[tuple[str, str]]:
    """The pairs of JSONs that there are to choose from."""
    return {(c.student, c.teacher) for c in ranked(asked, machine, GPU[24], here=here)}


def test_what_is_chosen_keeps_the_run_s_batch_optimizer_and_precision(published: Path) -> None:
    machine = gpus(2, 24, 256)
    asked = job(published, machine, LARGE, **BOTH)
    found = chosen(asked, machine).job
    assert found.batch.total == asked.batch.total and found.identity == asked.identity
    assert found.student_ds["optimizer"] == asked.student_ds["optimizer"]


def test_a_choice_has_two_lines_with_its_numbers(published: Path) -> None:
    machine = gpus(1, 24, 64)
    found = chosen(job(published, machine, SMALL, **BOTH), machine)
    assert str(found).startswith("student zero0, teacher replicated, micro-batch ")
    why = found.why(machine)
    assert "GiB on each GPU" in why and "kept in reserve" in why and " s at least" in why


def test_where_nothing_fits_the_message_has_what_came_nearest_and_what_helps(published: Path) -> None:
    machine = Machine(16 * GIB, 32 * GIB, 10 * GIB, 1, 1)
    words = r"Nothing .* fits. Free are .*16.0 GiB on each GPU.*Nearest come: student .* would need .*"
    with pytest.raises(ConfigError, match=words):
        chosen(job(published, machine, TWO, **BOTH), machine)


def test_a_run_leaves_the_jsons_that_it_chose(tmp_path: Path, wan1: Path) -> None:
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), max_steps=2, **BOTH)
    said = wandistiller("train", "--recipe", write_json(tmp_path / "r.json", given)).stderr
    assert said.count("chosen    student ") == 1 and " kept in reserve" in said
    resolved = read_json(tmp_path / "run" / "resolved" / "student_deepspeed.json")
    assert resolved["train_batch_size"] == 8 and "zero_optimization" in resolved
    assert (
        read_json(tmp_path / "run" / "resolved" / "teacher_deepspeed.json")
        .get("wandistiller", {})
        .get("placement")
        != "auto"
    )


ORDER = ["replicated", "sharded_node", "sharded", "zero_inference_cpu_node", "zero_inference_cpu"]


@pytest.mark.parametrize(
    ("topology", "names"),
    [
        (Topology(16, 8, True), [*ORDER, "zero_inference_nvme", "host_cpu"]),
        (
            Topology(8, 8, True),
            ["replicated", "sharded", "zero_inference_cpu", "zero_inference_nvme", "host_cpu"],
        ),
        (Topology(1, 1, True), ["replicated", "zero_inference_cpu", "zero_inference_nvme", "host_cpu"]),
        (Topology(2, 2, False), ["replicated", "host_cpu", "sharded", "zero_inference_nvme"]),
        (Topology(1, 1, False), ["replicated", "zero_inference_nvme"]),
    ],
)
def test_placements_are_compared_where_they_differ_those_first_that_move_least(
    wans: dict[str, WanFolder], topology: Topology, names: list[str]
) -> None:
    assert [name for name, _ in teachers(wans["1.3B"].config, "bfloat16", topology)] == names
