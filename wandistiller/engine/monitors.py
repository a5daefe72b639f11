"""TensorBoard, Weights & Biases, Comet and CSV as in the student's JSON: metrics.jsonl and the pictures."""

import atexit
import os
import uuid
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from wandistiller.distributed.collectives import rank
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.utils.errors import folder_problems
from wandistiller.utils.files import atomic

MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Section -> the package that DeepSpeed imports for it on rank 0 alone."""
IN_FOLDERS = ("tensorboard", "csv_monitor")
"""Sections whose files lie in a folder."""
WANDB_RUN = "wandb_run"
"""File of an output folder: the id by which Weights & Biases continues the curves of a resumed run."""
_named = [""]
"""The ids that this process gave to its runs."""


def monitor_problems(engine: EngineConfig) -> list[str]:
    """List what stops the monitors of a JSON, by trying them on rank 0, which alone has them."""
    problems = []
    for key in (*MONITORS, "csv_monitor"):
        section = engine.section(key)
        if rank() or not section.get("enabled"):
            continue
        if key in IN_FOLDERS:  # as DeepSpeed (0.19.8) names them
            folder = Path(section.get("output_path", ""), section.get("job_name", "DeepSpeedJobName"))
            problems += [f"{engine.where}: {p}" for p in folder_problems(f"{key}.output_path", folder)]
        if key in MONITORS and (refusal := _refusal(key, section.get("online", True))):
            problems.append(engine.problem(f"{key}.enabled", True, refusal))
    return problems


@cache
def _refusal(key: str, online: bool) -> str:
    """Try what a section switches on; return why it does not work, and what to do, or nothing."""
    package = MONITORS[key]
    if not find_spec(package):
        return f"It needs: pip install {package}"
    try:
        if key == "tensorboard":
            import torch.utils.tensorboard  # noqa: F401
        elif key == "comet":
            if online and not import_module("comet_ml.config").get_config("comet.api_key"):
                return "Comet has no API key here. Write `comet login`, or set COMET_API_KEY."
        elif os.environ.get("WANDB_MODE", "online") == "online":
            import wandb

            wandb.login(verify=True)
            wandb.teardown()  # or it would know no variable that is set after this (wandb 0.31)
    except Exception as error:  # of the library, which may raise its own
        reason = " ".join(f"{error}".split())
        offline = " WANDB_MODE=offline needs no key." * (key == "wandb")
        return f"{package} does not start: {reason.rstrip('.')}. Mend that, or write false.{offline}"
    return ""


def without_monitors(engine: EngineConfig) -> EngineConfig:
    """Return the JSON of an engine that writes no curves."""
    return engine.without(*MONITORS, "csv_monitor")


def name_run(output: Path, engine: EngineConfig, *, goes_on: bool) -> None:
    """Name the run for Weights & Biases before DeepSpeed starts it, unless the environment does.

    Args:
        goes_on: the run resumes, and its curves continue.
    """
    if not engine.section("wandb").get("enabled") or rank():
        return
    file = output / WANDB_RUN
    if not (goes_on and file.is_file()):
        with atomic(file) as temporary:
            temporary.write_text(uuid.uuid4().hex[:8])
    if os.environ.get("WANDB_RUN_ID", _named[-1]) == _named[-1]:  # not the user's
        os.environ["WANDB_RUN_ID"] = file.read_text()
        _named.append(file.read_text())
    os.environ.setdefault("WANDB_RESUME", "allow")


class Monitors:
    """The monitors of an engine, detached from it; on ranks other than 0 they write nothing.

    DeepSpeed would write the learning rate over samples, next to ours over steps, and Weights & Biases then
    drops ours: its steps may not go back (deepspeed 0.19.8, wandb 0.31).
    """

    def __init__(self, engine: Any):
        self._all, engine.monitor = engine.monitor, SimpleNamespace(enabled=False)
        comet = self._all.comet_monitor
        if comet and comet.experiment:  # rank 0 has it
            # or its curves are lost: it waits for Python's teardown (comet_ml 3.58)
            atexit.register(comet.experiment.end)

    def close(self) -> None:
        """End the curves of W&B and Comet, so that another run of this process gets its own."""
        if self._all.wandb_monitor and self._all.enabled and not rank():
            import wandb

            wandb.finish()
            wandb.teardown()  # which `name_run` needs, as in `_refusal`
        if self._all.comet_monitor and self._all.comet_monitor.experiment:
            self._all.comet_monitor.experiment.end()

    def record(self, step: int, values: dict[str, float]) -> None:
        if self._all.enabled and not rank():
            self._all.write_events([(f"Train/{name}", value, step) for name, value in values.items()])

    def show(self, step: int, file: Path) -> None:
        """Put a picture into those that take any: TensorBoard and W&B."""
        if self._all.tb_monitor:  # rank 0 has it
            image_HWC = np.asarray(Image.open(file, formats=["PNG"]).convert("RGB"))
            self._all.tb_monitor.summary_writer.add_image("Samples", image_HWC, step, dataformats="HWC")
            self._all.tb_monitor.flush()
        if self._all.wandb_monitor:
            import wandb

            self._all.wandb_monitor.log({"Samples": wandb.Image(str(file))}, step=step)
