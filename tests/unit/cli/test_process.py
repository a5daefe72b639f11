"""The process around a command: closed streams, signals, and too little memory."""

import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from background_run import PATIENCE
from ranks import ROOT, environment, free_port, run
from slow_cases import slow_but

from wandistiller.cli.main import READING
from wandistiller.cli.process import cpu_digest, set_defaults

WORDS = [sys.executable, "-m", "wandistiller"]
QUICKSTART = ["--recipe", str(ROOT / "ds_configs" / "recipes" / "quickstart.json")]
SIGNALS = [signal.SIGTERM, signal.SIGINT]
LIBRARIES = ["libtorch_global_deps", "_multiarray_umath", "_safetensors_rust"]
"""The first of torch, numpy, and one of the last of those that a command imports."""


@pytest.mark.parametrize(
    ("words", "code"),
    slow_but(
        [(["plan", "--bad"], 2)],
        [(["plan", *QUICKSTART], 0), (["plan", "--bad"], 2), (["report", "nowhere"], 2)],
    ),
    ids=str,
)
def test_a_command_with_all_standard_streams_closed_has_the_exit_code_of_one_with_them(
    words: list[str], code: int, tmp_path: Path
) -> None:
    words = words + ["--output_dir", "run"] * (words[0] == "plan" and not code)
    shell = ["bash", "-c", 'exec 0<&- 1>&- 2>&-; exec "$@"', "bash", *WORDS, *words]
    assert run(shell, code=code, cwd=tmp_path).returncode == code


def started(
    words: list[str], cwd: Path = ROOT, start_new_session: bool = False, **env: str
) -> subprocess.Popen:
    """Start a command that hears Ctrl-C, even where these tests run in a background that does not."""
    return subprocess.Popen(
        words,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**env),
        cwd=cwd,
        start_new_session=start_new_session,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    ("library", "number"), slow_but([(LIBRARIES[0], signal.SIGINT)], product(LIBRARIES, SIGNALS)), ids=str
)
def test_a_signal_while_libraries_are_imported_ends_the_command_with_one_line(
    number: signal.Signals, library: str, tmp_path: Path
) -> None:
    words = [*WORDS, "train", *QUICKSTART, "--output_dir", str(tmp_path / "run")]
    process = started(words, cwd=tmp_path)
    while process.poll() is None and library not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.001)
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (128 + number, f"{READING}\ninterrupted by {number.name}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGTERM), (1, signal.SIGINT)], ids=str)
def test_a_rank_that_waits_for_another_names_it_and_the_first_signal_ends_it(
    rank: int, number: signal.Signals
) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    process = started([*WORDS, "doctor"], **ranks, **meeting)
    line = process.stderr.readline()
    where = f"127.0.0.1:{meeting['MASTER_PORT']}"
    assert line.startswith(f"waiting for these of 2 ranks: {1 - rank}. They are not at {where} yet")
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    if rank == 0:
        assert err == f"interrupted by {number.name}, waiting for all 2 ranks at {where}\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_signal_while_a_part_is_compiled_ends_the_command(number: signal.Signals, tmp_path: Path) -> None:
    process = started([*WORDS, "doctor"], TORCH_EXTENSIONS_DIR=str(tmp_path), start_new_session=True)
    while not (tmp_path / "cpu_adam" / "build.ninja").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(1)
    if number == signal.SIGINT:  # Ctrl-C goes to the compiler too
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    first, last = err.splitlines()
    assert process.returncode == 128 + number
    assert first.startswith("build     DeepSpeed's cpu_adam is compiled into") and "interrupted by" in last
    assert not (tmp_path / "cpu_adam" / "cpu_adam.so").exists()


def test_a_missing_library_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run([*WORDS, "doctor"], code=1, cwd=tmp_path, PYTHONPATH=path)
    assert done.stderr.startswith("error: a library does not load: no torch here. Install the package")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_command_on_a_machine_without_a_gpu_prints_no_warning_of_deepspeed(tmp_path: Path) -> None:
    env = environment(CUDA_VISIBLE_DEVICES="")
    del env["DS_ACCELERATOR"]
    done = subprocess.run([*WORDS, "doctor"], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert "Setting accelerator" not in done.stderr and "no GPU" in done.stdout


def test_a_crash_inside_a_library_prints_where_python_was() -> None:
    crashing = "from wandistiller.cli import main; main.main = lambda: __import__('ctypes').string_at(0)"
    error = run([sys.executable, "-c", f"{crashing}; main.command()"], code=-signal.SIGSEGV).stderr
    assert "Segmentation fault" in error and "in command" in error


INTEL = "processor : 0\nmodel name : Xeon A\ncpu MHz : 2500.1\nflags : fpu sse avx512f\n"
ARM = "processor : 0\nBogoMIPS : 100.00\nFeatures : fp asimd sve\nCPU part : 0xd40\n"


@pytest.mark.parametrize(
    ("cpuinfo", "other", "same"),
    [
        (INTEL, INTEL.replace("2500.1", "800.0") + INTEL.replace("processor : 0", "processor : 1"), True),
        (INTEL, INTEL.replace(" avx512f", ""), False),
        (INTEL, INTEL.replace("Xeon A", "Xeon B"), False),
        (ARM, ARM.replace("100.00", "50.00"), True),
        (ARM, ARM.replace(" sve", ""), False),
    ],
)
def test_nodes_that_share_a_disk_share_builds_only_if_their_cpus_are_of_one_kind(
    cpuinfo: str, other: str, same: bool
) -> None:
    assert (cpu_digest(cpuinfo) == cpu_digest(other)) is same


def test_the_scripts_and_the_commands_build_into_the_same_folder() -> None:
    env: dict[str, str] = {}
    set_defaults(env)
    lines = (ROOT / "launch" / "env.sh").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("TORCH_EXTENSIONS_DIR=")]
    usual = {key: value for key, value in os.environ.items() if key != "TORCH_EXTENSIONS_DIR"}
    shell = ["bash", "-c", f'{line}; echo "$TORCH_EXTENSIONS_DIR"']
    for own in ({}, {"TORCH_EXTENSIONS_DIR": "/own"}):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env_of = usual | {"PATH": path, "PYTHONPATH": str(ROOT)} | own
        done = subprocess.run(shell, capture_output=True, text=True, cwd=ROOT, env=env_of)
        assert done.stdout.strip() == (own or env)["TORCH_EXTENSIONS_DIR"]
