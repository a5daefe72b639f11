"""What a JSON switches on beside training is tried before anything is loaded."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from wandistiller.engine import monitors
from wandistiller.engine.ds_config import load, student_engine
from wandistiller.engine.preflight import config_problems

STUDENT = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}}
ON = {"enabled": True}


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Neither a key of this machine's user nor a terminal, and nothing that was found before."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monitors._refusal.cache_clear()
    yield
    monitors._refusal.cache_clear()


def problems(**sections: Any) -> list[str]:
    return config_problems(student_engine(load(STUDENT | sections), 1))


@pytest.mark.parametrize(
    "monitor", [name for name, package in monitors.MONITORS.items() if not find_spec(package)]
)
def test_a_monitor_whose_package_is_missing_is_refused(monitor: str) -> None:
    (message,) = problems(**{monitor: ON})
    assert message.startswith(f"recipe: `{monitor}.enabled` is true. It needs: pip install")


def test_weights_and_biases_without_a_key_is_refused_unless_it_is_offline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    (message,) = problems(wandb=ON | {"project": "x", "team": None})
    assert message.startswith("recipe: `wandb.enabled` is true. wandb does not start: No API key")
    assert message.endswith("Mend that, or write false. WANDB_MODE=offline needs no key.")
    monitors._refusal.cache_clear()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert not problems(wandb=ON)


def test_rank_0_alone_tries_what_it_alone_will_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not problems(wandb=ON)


@pytest.mark.parametrize("section", monitors.IN_FOLDERS)
def test_a_monitor_s_folder_that_cannot_be_made_is_refused(section: str, tmp_path: Path) -> None:
    if section in monitors.MONITORS:
        pytest.importorskip(monitors.MONITORS[section])
    (tmp_path / "file").touch()
    assert not problems(**{section: ON | {"output_path": str(tmp_path / "new")}})
    (message,) = problems(**{section: ON | {"output_path": str(tmp_path / "file")}})
    place = f"{tmp_path}/file/DeepSpeedJobName"
    assert (
        message
        == f"recipe: `{section}.output_path` is {place}, but {tmp_path}/file is a file. Name a folder."
    )
    assert not (tmp_path / "new").exists()


def test_compiled_blocks_without_a_compiler_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (message,) = problems(wandistiller={"compile": True})
    assert message.startswith("recipe: `wandistiller.compile` is true. It needs a C and C++ compiler")
