"""The rank of a process under each launcher."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from ranks import ROOT, losses, run, train_words
from recipes import recipe_file, train
from slow_cases import slow_but

from wandistiller.distributed.launchers import (
    PORTS,
    first_host,
    own_programs_first,
    set_rank_variables,
    share_cores,
    started_by,
)
from wandistiller.utils.errors import ConfigError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "247529473",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
}
FIFTH = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


def adopted(**env: str) -> dict[str, str]:
    set_rank_variables(env)
    return env


@pytest.mark.parametrize(
    ("env", "threads"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, "4"),
        (OPEN_MPI, "4"),
        (SLURM, "4"),
        (SLURM | {"SLURM_CPUS_PER_TASK": "12"}, "12"),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}, "1"),
        ({}, None),
    ],
)
def test_ranks_of_a_node_share_its_16_cores_unless_a_number_is_set(
    env: dict[str, str], threads: str | None
) -> None:
    found = dict(env)
    share_cores(found, 16)
    assert found.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize("env", [SLURM, OPEN_MPI | {"MASTER_ADDR": "gpu07"}])
def test_a_rank_of_two_nodes_knows_its_place_and_the_first_node(env: dict[str, str]) -> None:
    found = adopted(**env)
    assert found.items() >= (FIFTH | {"MASTER_ADDR": "gpu07"}).items() and int(found["MASTER_PORT"]) in PORTS


@pytest.mark.parametrize(
    "env", [SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8"}, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}]
)
def test_ranks_of_one_node_meet_on_it(env: dict[str, str]) -> None:
    assert adopted(**env)["MASTER_ADDR"] == "127.0.0.1"


def test_mpirun_on_two_nodes_needs_the_address_of_the_first() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        adopted(**OPEN_MPI)


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({}, "none"),
        (FIFTH, "another"),
        (SLURM, "srun"),
        (OPEN_MPI | SLURM, "Open MPI's mpirun"),
        (SLURM | {"CROSS_RANK": "1"}, "deepspeed"),
        (SLURM | {"TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
    ],
)
def test_the_launcher_is_known_by_its_variables(env: dict[str, str], launcher: str) -> None:
    assert started_by(env) == launcher


def test_variables_of_deepspeed_or_torchrun_are_kept() -> None:
    assert adopted(**SLURM, RANK="0", WORLD_SIZE="2") == SLURM | {"RANK": "0", "WORLD_SIZE": "2"}


def test_a_process_that_ssh_started_finds_its_environment_s_own_programs_first() -> None:
    env, own = {"PATH": "/usr/bin:/bin"}, str(Path(sys.executable).parent)
    for _ in range(2):
        own_programs_first(env)
    assert env["PATH"] == f"{own}:/usr/bin:/bin"


def test_a_shell_in_an_allocation_is_no_rank() -> None:
    """sbatch and salloc set the job's variables, srun those of a step too."""
    shell = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1234"}
    assert adopted(**shell) == shell


def test_mpirun_that_reaches_its_nodes_by_srun_is_the_one_that_counts() -> None:
    proxies = SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    assert adopted(**proxies, **OPEN_MPI, MASTER_ADDR="gpu07").items() >= FIFTH.items()


def test_two_steps_of_a_job_meet_at_ports_of_their_own() -> None:
    assert adopted(**SLURM)["MASTER_PORT"] != adopted(**SLURM | {"SLURM_STEP_ID": "1"})["MASTER_PORT"]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09,12],login", "gpu07"),
        ("a1,b2", "a1"),
        ("rack[2-3]-gpu[01-04]", "rack2-gpu01"),
        ("n[3,5-7]", "n3"),
    ],
)
def test_the_first_of_slurm_s_nodes_is_found(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("command", "restarts", "added"),
    [("train", None, ""), ("train", "0", ""), ("train", "2", " --resume auto"), ("doctor", "2", "")],
)
def test_a_job_that_slurm_starts_again_goes_on_whatever_it_began_with(
    command: str, restarts: str | None, added: str, tmp_path: Path
) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$*"\n')
    srun.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "1"}
    env |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    words = ["bash", "launch/slurm.sbatch", command, "--resume", "never"]
    assert run(words, **env).stdout.strip().endswith(f"{command} --resume never{added}")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs mpirun (Debian: apt install openmpi-bin)")
def test_a_run_under_mpirun_has_the_losses_of_one_under_torchrun(wan1: Path, tmp_path: Path) -> None:
    file = recipe_file(tmp_path, wan1, "mpi", max_steps=2)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    run(["mpirun", "--oversubscribe", "-n", "2", *train_words(file)], cwd=ROOT, **root)
    assert losses(tmp_path / "mpi") == losses(train(tmp_path, wan1, "plain", max_steps=2))
    assert len(json.loads((tmp_path / "mpi" / "memory.json").read_text())["train"]["host"]) == 2


def nvidia_smi(folder: Path, driver: str, capability: str) -> dict[str, str]:
    """Environment variables with which a program of this name describes GPUs."""
    file = folder / "nvidia-smi"
    file.write_text(f'#!/bin/sh\n[ "$1" = -L ] || echo "{driver}, {capability}"\n')
    file.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable}


@pytest.mark.parametrize(("driver", "capability"), [("550.54.15", "9.0"), ("580.65.06", "7.0")])
def test_a_driver_or_gpu_that_torch_s_cuda_cannot_use_is_refused_before_anything_is_fetched(
    driver: str, capability: str, tmp_path: Path
) -> None:
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "env.sh", tmp_path / "launch")
    given = nvidia_smi(tmp_path, driver, capability) | {"CUDA_VISIBLE_DEVICES": "0"}
    done = run(["bash", "launch/env.sh"], cwd=tmp_path, code=2, **given)
    assert f"here are {driver} and {capability}" in done.stderr and "TORCH_INDEX=" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("visible", "code", "words"),
    slow_but(
        [("7,5,3", 0, "--include localhost:7,5"), ("GPU-1", 2, "deepspeed takes numbers alone")],
        [
            ("3,5", 0, "--include localhost:3,5"),
            ("7,5,3", 0, "--include localhost:7,5"),
            ("", 0, "--num_gpus 2"),
            ("GPU-1", 2, "deepspeed takes numbers alone"),
        ],
    ),
)
@pytest.mark.skipif(
    not (ROOT / ".venv" / "wanted").exists(), reason="the environment of the scripts is not there"
)
def test_the_quick_start_takes_the_gpus_of_cuda_visible_devices(
    visible: str, code: int, words: str, tmp_path: Path
) -> None:
    given = nvidia_smi(tmp_path, "580.65.06", "9.0") | {"CUDA_VISIBLE_DEVICES": visible}
    del given["PYTHON"]  # that of the environment, which is there
    done = run(["bash", "-c", 'source launch/env.sh; echo "${here[@]}"'], cwd=ROOT, code=code, **given)
    assert words in (done.stderr if code else done.stdout)


def test_an_interpreter_that_the_libraries_have_no_release_for_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "env.sh", tmp_path / "launch")
    old = tmp_path / "old_python"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.10.13 && exit\nexit 1\n')
    old.chmod(0o755)
    done = run(["bash", "launch/env.sh"], cwd=tmp_path, code=2, PYTHON=str(old))
    first, then = done.stderr.strip().splitlines()
    assert first.startswith(f"error: {old} is Python 3.10.13. Python 3.11 to 3.13 is needed")
    assert then.startswith("Type: PYTHON=") or "apt install" in then
    assert not (tmp_path / ".venv").exists()
