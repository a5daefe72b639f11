"""A run stops in order on any request and under any launcher; a rank that fails is named."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from background_run import BackgroundRun, background_run
from checkpointed import equal, exported
from ranks import ROOT, launcher, losses, wandistiller
from recipes import recipe_file, student_engine, train
from small_wan import make_wan, small_transformer

STEPS = 40
SETTINGS = {"max_steps": STEPS, "save_every": 10, "ema": 0.9}


@pytest.fixture(scope="module")
def whole(folder: Path, wan1: Path) -> Path:
    """The run that nobody disturbs."""
    return train(folder, wan1, "whole", **SETTINGS)


def training(folder: Path, wan: Path, name: str, **more: object) -> list[str]:
    """Write the recipe `name`; return the words that train by it."""
    return ["wandistiller", "train", "--recipe", str(recipe_file(folder, wan, name, **SETTINGS | more))]


def torchrun() -> list[str]:
    return [*launcher(2), "-m"]


def deepspeed() -> list[str]:
    port = next(w for w in launcher(2) if "master_port" in w).partition("=")[2]
    program = str(Path(sys.executable).parent / "deepspeed")
    return [program, "-q", "--num_gpus", "2", "--master_port", port, "--module"]


def to_launcher(run: BackgroundRun) -> None:
    os.kill(run.process.pid, signal.SIGTERM)


def to_one_rank(run: BackgroundRun) -> None:
    os.kill(run.pid_of_rank(1), signal.SIGUSR1)


def to_launcher_at_once(run: BackgroundRun) -> None:
    os.kill(run.process.pid, signal.SIGKILL)


def to_all(run: BackgroundRun) -> None:
    os.killpg(run.process.pid, signal.SIGINT)


WAYS = [  # name, launcher, what asks the run to stop, and how its message begins
    ("torchrun, SIGTERM", torchrun, to_launcher, "SIGTERM"),
    ("torchrun, SIGUSR1 to one rank", torchrun, to_one_rank, "SIGUSR1"),
    ("torchrun, SIGINT to all, as a terminal's Ctrl-C", torchrun, to_all, "SIGINT"),
    ("deepspeed, SIGTERM", deepspeed, to_launcher, "the end of its launcher"),
    ("deepspeed, SIGKILL", deepspeed, to_launcher_at_once, "the end of its launcher"),
    ("deepspeed, STOP", deepspeed, None, "STOP"),
]


@pytest.mark.slow
def test_a_run_that_was_stopped_in_every_way_ends_as_one_that_was_not(
    folder: Path, wan1: Path, whole: Path
) -> None:
    output, command, done = folder / "cut", training(folder, wan1, "cut"), 0
    for number, (way, launch, ask, reason) in enumerate(WAYS):
        with background_run([*launch(), *command], folder / f"cut_{number}.log") as run:
            run.wait_for(rf"step {done + 1}/{STEPS} ")
            ask(run) if ask else (output / "STOP").touch()
            code = run.end()
            stopped = re.search(rf"stopped after step (\d+) of {STEPS} by .*{reason}", run.output())
        assert stopped and code != 0, f"{way}: {code}\n{run.output()}"
        done = int(stopped[1])
        assert done < STEPS and (output / "checkpoints" / "latest").read_text() == f"step_{done:08d}\n"
        assert not (output / "STOP").exists() and not (output / "DONE").exists()
    wandistiller(*command[1:], ranks=2)
    assert losses(output) == losses(whole) and len(losses(whole)) == STEPS
    assert equal(exported(output), exported(whole))
    assert json.loads((output / "DONE").read_text())["steps"] == STEPS


@pytest.mark.slow
def test_exit_code_75_tells_a_scheduler_to_start_it_again(folder: Path, wan1: Path) -> None:
    words = [sys.executable, "-m", *training(folder, wan1, "alone", resume="never")]
    with background_run(words, folder / "alone.log") as run:
        run.wait_for(rf"step 1/{STEPS} ")
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == 75, run.output()
    assert "; the same command with --resume auto goes on from there" in run.output()
    with background_run([*words, "--resume", "auto"], folder / "alone_on.log") as run:
        run.wait_for(rf"resumed .* of {STEPS} steps are done")


@pytest.mark.slow
def test_a_part_of_deepspeed_that_is_compiled_is_given_up(folder: Path, wan1: Path) -> None:
    words, own = ["-m", *training(folder, wan1, "compiled")], folder / "extensions"
    with background_run(
        [*launcher(2), *words], folder / "compiled.log", TORCH_EXTENSIONS_DIR=str(own)
    ) as run:
        run.wait_for("is compiled into")
        while not any("cc1plus" in words for words in run.processes().values()):
            assert run.still_runs_after(0.05), run.output()
        os.kill(run.pid_of_rank(0), signal.SIGTERM)  # it compiles, or waits for the one that does
        run.end()
        assert "the same command goes on from there" in run.output()
        assert "exitcode  : 75" in run.output(), run.output()
    assert not any(own.rglob("*.so"))
    with background_run(
        [*launcher(2), *words], folder / "compiled2.log", TORCH_EXTENSIONS_DIR=str(own)
    ) as run:
        run.wait_for(rf"step 1/{STEPS} ")


@pytest.mark.slow
@pytest.mark.parametrize("launch", [torchrun, deepspeed])
def test_no_rank_outlives_a_launcher_that_is_killed_while_it_starts_them(
    launch: Callable[[], list[str]], folder: Path, wan1: Path
) -> None:
    name, starters = f"orphans_{launch.__name__}", ("torch.distributed", "bin/deepspeed")
    with background_run([*launch(), *training(folder, wan1, name)], folder / f"{name}.log") as run:
        while all(any(s in words for s in starters) for words in run.processes().values()):
            assert run.still_runs_after(0.02)
        os.kill(run.process.pid, signal.SIGKILL)
        run.end()
    assert "step 1/" not in run.output()


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_killed_is_named_with_what_it_was_doing(gone: int, folder: Path, wan1: Path) -> None:
    name = f"killed{gone}"
    with background_run([*torchrun(), *training(folder, wan1, name)], folder / f"{name}.log") as run:
        run.wait_for(rf"step 3/{STEPS} ")
        os.kill(run.pid_of_rank(gone), signal.SIGKILL)
        assert run.end() == 1
        gone_by = rf"because of rank {gone}\. Rank {gone} is gone \(process \d+ on \S+\)"
        named = rf"rank {1 - gone}: stopped in: .*; {gone_by}"
        assert re.search(rf"{named}, last heard of in: .+\.", run.output()), run.output()
        assert "Error:" not in run.output().partition("torch.distributed.elastic")[0], run.output()


@pytest.mark.slow
def test_memory_that_runs_out_on_one_rank_ends_all_with_advice(folder: Path) -> None:
    wan = make_wan(folder / "bigger", experts=1, layers=1)
    small_transformer(0, 4, num_attention_heads=8, attention_head_dim=64, ffn_dim=2048).save_pretrained(
        wan / "transformer"
    )
    engine = {k: v for k, v in student_engine(2).items() if k != "activation_checkpointing"}
    settings = {"student_config": {"num_layers": 4}, "height": 512, "width": 512, "rollout_steps": 1}
    settings |= {"prepare_batch": 1, "deepspeed_config": engine}
    settings |= {"teacher_deepspeed_config": {"zero_optimization": {"stage": 0}}}
    file = recipe_file(folder, wan, "memory", **settings)
    limited = [ROOT / "tests" / "helpers" / "limited.py", "1", "160", "the student's forward pass"]
    with background_run([*launcher(2), *limited, "train", "--recipe", file], folder / "memory.log") as run:
        run.end()
        output = run.output()
    assert re.search(
        r"Out of memory on rank 1, step 1, the student's forward pass: .*\nrank 1: .* GiB", output
    ), output
    assert re.search(
        r"rank 0: stopped in: step 1, .*; because of rank 1\. Out of memory on rank 1", output
    ), output
    assert "What helps:\n  --gradient_checkpointing\n" in output and "wandistiller plan" in output, output
    assert "exitcode  : 3 " in output, output
