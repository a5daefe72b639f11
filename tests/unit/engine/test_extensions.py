"""Extensions that DeepSpeed compiles: which a JSON needs, and how a run ends where they do not build."""

import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, run
from recipes import recipe_file, student_engine

from wandistiller.engine.ds_config import load
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.extensions import needed, reason


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (student_engine(2), ["cpu_adam"]),
        (student_engine(2, offload=False), ["fused_adam"]),
        (student_engine(2, offload=False, optimizer={"type": "Adam", "params": {"torch_adam": True}}), []),
        ("ds_configs/student/zero3_nvme.json", ["cpu_adam", "async_io"]),
        ("ds_configs/teacher/zero_inference_nvme.json", ["async_io"]),
        ("ds_configs/teacher/streamed.json", []),
    ],
)
def test_a_json_needs_what_its_optimizer_and_its_disk_take(
    given: str | dict[str, Any], names: list[str]
) -> None:
    engine = EngineConfig("x.json", load(given).raw)
    assert [builder().name for builder in needed(engine)] == names


def test_a_compiler_s_first_error_tells_most_of_a_failed_build() -> None:
    error = RuntimeError("Error building\n[1/2] c++ a.cpp\na.cpp:1:9: error: no header\nninja: stopped.")
    assert reason(error) == "a.cpp:1:9: error: no header"
    assert reason(RuntimeError("one\nninja: stopped.")) == "ninja: stopped"


@pytest.mark.slow
def test_an_extension_that_does_not_build_ends_the_run_before_anything_is_loaded(
    tmp_path: Path, wan2: Path
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *.cpp*) echo "a.cpp: error: no memory"; exit 1; esac\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    words = ["-m", "wandistiller", "train", "--recipe", str(recipe_file(tmp_path, wan2))]
    env = {"CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    done = run([sys.executable, *words], code=2, cwd=ROOT, **env)
    assert (
        "error: deepspeed_config: DeepSpeed's cpu_adam does not build: a.cpp: error: no memory. `wan"
        in done.stderr
    )
    assert "Traceback" not in done.stderr and not (tmp_path / "cache").exists()
