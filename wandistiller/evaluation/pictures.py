"""Pictures of an evaluation: middle frames, frames, animations, and quality against seconds."""

from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from wandistiller.data.conditions import still
from wandistiller.evaluation.evaluator import Evaluation
from wandistiller.monitoring.charts import Chart, Line, svg
from wandistiller.monitoring.evaluated import Figures
from wandistiller.monitoring.headline import SCORES
from wandistiller.utils.images import can_write_mp4, save_clips, save_frames, save_grid

IN_FRAMES = 3
"""Prompts whose frames are shown one by one."""


def write_pictures(settings: Evaluation, file: Path, rows: dict[str, list[Tensor]]) -> dict[str, Path]:
    """Write middle frames, and of clips all frames and an animation; return the files of those two."""
    prompts, stem = [settings.prompts[i] for i in settings.shown], file.with_suffix("")
    if (folder := settings.teacher).config.takes_image:
        reader, samples = settings.reader, settings.samples
        rows = {"given": [still(folder, reader, samples[i]) for i in settings.shown]} | rows
    middle = {label: [clip[:, clip.shape[1] // 2] for clip in clips] for label, clips in rows.items()}
    save_grid(file, middle, prompts)
    if settings.student_sampling.num_frames == 1:
        return {}
    files = {"frames": stem.with_name(f"{stem.name}_frames.png")}
    save_frames(files["frames"], rows, prompts[:IN_FRAMES])
    if can_write_mp4():
        files["animation"] = stem.with_suffix(".mp4")
        save_clips(files["animation"], rows, prompts, settings.student.fps)
    return files


def quality_chart(by_steps: dict[str, dict[str, Figures]]) -> bytes | None:
    """Draw quality against seconds, SVG; None without matplotlib or a score."""
    has = next(iter(by_steps["teacher"].values()))
    name = next((name for name in SCORES if name in has), None)
    if not (name and find_spec("matplotlib")):
        return None
    lines = [
        Line(
            side,
            [(figures["denoising_seconds"]["value"], figures[name]["value"]) for figures in numbers.values()],
            [f"{n} step{'s' * (n != '1')}" for n in numbers],
        )
        for side, numbers in by_steps.items()
    ]
    return svg(Chart(SCORES[name], "by sampling steps", lines, along="seconds of denoising a sample"))
