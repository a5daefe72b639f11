"""Results alone on stdout, and none of the libraries' lines of every run."""

import subprocess
import sys

import pytest
from ranks import ROOT, environment, run

IMPORTS = """
from wandistiller.utils.logging import drop_noise, setup_logging
drop_noise()
import deepspeed, diffusers, peft, torch, torchao
from diffusers import WanImageToVideoPipeline
from diffusers.quantizers.torchao import torchao_quantizer
from transformers import CLIPImageProcessor
import wandistiller.wan.components
setup_logging("info")
from deepspeed.utils import logger
logger.warning("of DeepSpeed")
"""


@pytest.mark.slow
def test_imports_of_a_run_print_nothing_and_deepspeed_warns_on_stderr() -> None:
    done = run([sys.executable, "-c", IMPORTS])
    assert (done.stdout, done.stderr) == ("", "of DeepSpeed\n")


def test_a_reader_that_has_left_is_no_error() -> None:
    words = "from wandistiller.utils.logging import write_result as w; [w('x' * 9999) for _ in range(99)]"
    shell = ["bash", "-c", 'set -o pipefail; "$@" | head -c 5', "bash", sys.executable, "-c", words]
    done = subprocess.run(shell, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "xxxxx", "")
