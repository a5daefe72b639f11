"""Shared by all tests: the environment, two small random pipelines, and one rank to run collectives on."""

import fcntl
import gc
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"  # servers of tests are on this machine

import pytest
import torch
import traces

traces.share()

if TYPE_CHECKING:
    from wandistiller.wan.folder import WanFolder

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # tests marked gpu start processes that have another


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Import all files of tests without scanning for garbage, and never scan what was imported again."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what would begin after `TESTS_UNTIL`, in seconds since 1970."""
    if time.time() > float(os.environ.get("TESTS_UNTIL", "inf")):
        pytest.skip(f"no time is left for those of {item.location[0]}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available() and not os.environ.get("REHEARSAL"):
            item.add_marker(pytest.mark.skip(reason="no accelerator here"))


class FailuresAtOnce:
    """Print a line for each failure at once; pytest prints it only at the end of the run."""

    def __init__(self, config: pytest.Config):
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal:
            crash = getattr(report.longrepr, "reprcrash", report.longrepr)
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {str(crash)[:500]}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    # a shell starts a job in the background with the signal ignored; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(FailuresAtOnce(config))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all tests of a module share."""
    return tmp_path_factory.mktemp(request.module.__name__.rpartition("test_")[2])


@pytest.fixture(scope="session")
def wan2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random pipeline with two experts that meet at 0.875, as Wan2.2 A14B. Do not write into it."""
    from small_wan import make_wan

    return make_wan(tmp_path_factory.mktemp("wan") / "wan2")


@pytest.fixture(scope="session")
def wan1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random pipeline with one expert, as Wan2.1. Do not write into it."""
    from small_wan import make_wan

    return make_wan(tmp_path_factory.mktemp("wan") / "wan1", experts=1)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, wan2: Path) -> Path:
    """The output of four steps on two ranks: a student of one expert and two layers. Do not write into it.

    `stderr` beside it has what the command said.
    """
    from ranks import wandistiller
    from recipes import recipe_file

    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # one run for all workers
    with (base / "finished.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / "finished" / "run" / "DONE").exists():
            (base / "finished").mkdir(exist_ok=True)
            more = {"objective": ["velocity", "feature"], "max_steps": 4, "save_every": 2, "sample_every": 2}
            more |= {
                "sample_prompts": ["a red circle", "a blue square", "a green circle"],
                "rollout_steps": 4,
            }
            file = recipe_file(base / "finished", wan2, shift=4.0, **more)
            (base / "finished" / "stderr").write_text(wandistiller("train", "--recipe", file, ranks=2).stderr)
    return base / "finished" / "run"


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with parts over 1 MB on two ranks: DeepSpeed swaps no smaller ones. Do not write into it."""
    from small_wan import make_wan, small_transformer

    folder = make_wan(tmp_path_factory.mktemp("wan") / "wide", layers=1)
    sizes = {"num_attention_heads": 8, "attention_head_dim": 128, "ffn_dim": 1024}
    for seed, name in enumerate(("transformer", "transformer_2")):
        small_transformer(seed, 1, **sizes).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the published pipelines' JSON files, `Wan-AI/...`, and prompts.txt, for the planner."""
    from published_wan import write_wans

    return write_wans(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="session")
def wans(published: Path) -> dict[str, "WanFolder"]:
    """The published pipelines without weights: 1.3B, 14B, 5B and A14B."""
    from published_wan import PUBLISHED

    from wandistiller.wan.pipeline import open_wan

    opened = [open_wan(str(published / name)) for name in PUBLISHED]
    return dict(zip(("1.3B", "14B", "5B", "A14B"), opened, strict=True))


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[..., Path]:
    """A function that copies a pipeline folder, with or without its weights, for a test that changes it."""

    def copy(folder: Path, *, weights: bool = False) -> Path:
        left_out = () if weights else ("*.safetensors",)
        return Path(shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns(*left_out)))

    return copy


@pytest.fixture(scope="session")
def one_rank() -> Iterator[torch.device]:
    """The process group of a run without a launcher, in this process; gives the device."""
    from wandistiller.distributed import collectives
    from wandistiller.engine.patches import patch_deepspeed

    before = dict(os.environ)
    patch_deepspeed()
    collectives.init("warning")
    yield collectives.device()
    collectives.destroy()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def own_random_numbers() -> None:
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def as_many_threads_as_before() -> Iterator[None]:
    """A teacher in CPU memory takes all cores, and the last bit of a sum depends on the number of threads."""
    yield
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture
def quiet_logging() -> Iterator[None]:
    """A command sets up logging for its process; put back what was there."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture
def said_by_diffusers(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """What diffusers has logged."""
    import diffusers

    diffusers.utils.logging.enable_propagation()
    yield lambda: "".join(r.getMessage() for r in caplog.records if r.name.startswith("diffusers"))
    diffusers.utils.logging.disable_propagation()
