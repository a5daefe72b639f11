"""`wandistiller report`: a run's curves, pictures, evaluation, settings and machine in one HTML file."""

import base64
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from wandistiller.config.start import recorded_stages
from wandistiller.distributed.progress import clock
from wandistiller.monitoring import environment
from wandistiller.monitoring.alarms import FILE
from wandistiller.monitoring.charts import Chart, Line, finite, render, smooth, svg
from wandistiller.monitoring.headline import SIDES, headline, outdated, read_if_exists
from wandistiller.monitoring.metrics import SAMPLES, MetricsLine, read_lines
from wandistiller.utils.errors import ConfigError, readable
from wandistiller.utils.files import atomic
from wandistiller.utils.images import drawn

MOST_GRIDS = 6
"""Sample grids in the report: the first, the last, and some between."""
MEMORY = {
    "host": "CPU memory",
    "host_peak": "CPU memory at most",
    "allocated": "GPU, tensors",
    "reserved": "GPU, reserved",
    "peak": "GPU at most",
}
"""Kinds of memory in metrics.jsonl and memory.json, and their names for people."""
CHARTED = {
    "loss": ("loss", True),
    "losses": ("loss of each term", True),
    "loss_by_sigma": ("loss by sigma", True),
    "grad_norm": ("gradient norm", True),
    "lr": ("learning rate", False),
    "samples_per_second": ("samples a second", False),
}
"""Key of metrics.jsonl -> title, and True for a logarithmic axis. Other numbers have their keys as titles."""
OF_SAMPLES = {
    "deviation": ("spread of samples", "standard deviation of the latents"),
    "motion": ("motion of samples", "mean difference of neighbouring latent frames"),
    "distance": ("variety of samples", "latents of two seeds of one prompt, root mean square"),
    "size": ("size of samples", "mean absolute value of the latents"),
    "contrast_spread": ("spread of local contrast", "standard deviation over windows of the pictures"),
    "contrast": ("contrast of samples", "standard deviation of the pictures' pixels"),
    "saturation": ("saturation of samples", "largest channel less the smallest, mean over pixels"),
    "off_colour": ("other colours than the prompt's", "mean distance of pixels from its two colours"),
    "blotched": ("samples with a blotch", "share that has one of another colour in any frame"),
}
"""Key of samples.jsonl -> title and unit."""
NOT_CHARTED = {"step", "seconds", "skipped"}
PAGE = Path(__file__).with_name("report.html.jinja")


class Picture(NamedTuple):
    """A PNG and, if there is one, its animation."""

    name: str
    width: int
    """Pixels."""
    png: str
    """As the address of a page that needs no other file; so is the MP4."""
    mp4: str


def report(output: Path) -> Path:
    """Write OUTPUT/report/index.html, which needs no other file; parts without data are left out.

    Raises:
        ConfigError: `output` is not the folder of a run or of stages, or matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        remedy = "Write: pip install 'wandistiller[report]'."
        raise ConfigError(f"matplotlib, which draws the charts, is missing. {remedy}")
    file = output / "report" / "index.html"
    stages = [folder for folder in recorded_stages(output) if (folder / "metrics.jsonl").is_file()]
    runs = {run: _metrics(run) for run in stages or [output]}
    last = list(runs)[-1]
    page = render(
        PAGE,
        name=output.resolve().name,
        figures=headline(output, last, runs[last]),
        runs=[_of_run(run, lines) for run, lines in runs.items()],
        whole={"evaluation": _evaluation(output, runs[last])} | _of_start(output) if stages else None,
    )
    with atomic(file) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return file


def _of_run(output: Path, lines: list[MetricsLine]) -> dict[str, Any]:
    return {
        "stage": output.name.partition("_"),
        "summary": _summary(output, lines),
        "alarms": [(f"step {e['step']}", e["alarm"]) for e in read_lines(output / FILE)],
        "samples": _samples(output),
        "evaluation": _evaluation(output, lines),
        "charts": [(c.title, _address(svg(c), "image/svg+xml")) for c in run_charts(output, lines).values()],
        "memory": _memory_by_phase(output),
    } | _of_start(output)


def _of_start(output: Path) -> dict[str, Any]:
    """Return the machine on which the run was last started, and its settings by file."""
    machine = read_if_exists(output / "resolved" / "machine.json")
    files = sorted((output / "resolved").glob("*.json"))
    return {
        "machine": environment.rows(machine) if machine else [],
        "settings": {file.name: file.read_text(encoding="utf-8") for file in files},
    }


def run_charts(output: Path, lines: list[MetricsLine]) -> dict[str, Chart]:
    """Chart the numbers in `lines` of metrics.jsonl by key, memory, velocity errors by sigma, importance."""
    window = max(1, len(lines) // 50)
    charts: dict[str, Chart] = {}
    for key in dict.fromkeys(key for line in lines for key in line if key not in NOT_CHARTED):
        title, logarithmic = CHARTED.get(key, (key.replace("_", " "), False))
        values = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        parts = sorted({name for _, value in values if isinstance(value, dict) for name in value})
        if key == "memory_gib":
            used = [(step, phases["train"]) for step, phases in values if "train" in phases]
            curves = [
                Line(name, [(step, max(kinds[kind])) for step, kinds in used if kind in kinds])
                for kind, name in MEMORY.items()
            ]
            charts[key] = Chart("memory while training", "GiB of the rank with most", curves)
        elif parts:
            of = {name: [(step, value[name]) for step, value in values if name in value] for name in parts}
            curves = [Line(name, smooth(points, window)) for name, points in of.items()]
            charts[key] = Chart(title, f"mean of {window} steps", curves, logarithmic)
        elif all(isinstance(value, int | float) for _, value in values):
            mean = [Line(f"mean of {window}", smooth(values, window))] * (window > 1 and logarithmic)
            charts[key] = Chart(title, "each step", [Line("each step", values), *mean], logarithmic)
    samples = read_lines(output / SAMPLES)
    for key, (title, unit) in OF_SAMPLES.items():
        rows = [(line["step"], line[key]) for line in samples if key in line]
        curves = [Line(side, [(step, values.get(side)) for step, values in rows]) for side in SIDES]
        charts[key] = Chart(title, unit, curves)
    unit = "squared, over the teacher's squared"
    charts["error_by_sigma"] = Chart("velocity error by sigma", unit, _errors(output, lines), True)
    rounds = read_if_exists(output / "importance.json").get("relative_error_without", [])
    curves = ([(int(block), error) for block, error in errors.items()] for errors in rounds)
    lines_of_rounds = [Line(f"round {n}", curve) for n, curve in enumerate(curves, 1)]
    charts["importance"] = Chart("importance by block", "velocity error without it", lines_of_rounds)
    for chart in charts.values():
        chart.lines[:] = [line for line in chart.lines if finite(line.points)]
    return {name: chart for name, chart in charts.items() if chart.lines}


def _errors(output: Path, lines: list[MetricsLine]) -> list[Line]:
    """Return the squared velocity errors before training, whose file has the roots, and as evaluated."""
    start = read_if_exists(output / "student_start.json").get("relative_velocity_error_by_sigma", {})
    figures = read_if_exists(output / "evaluation.json")
    end, older = figures.get("relative_velocity_error", {}).get("bands", {}), outdated(figures, lines)
    squares = {band: error**2 for band, error in start.items()}
    evaluated = {band: estimate["value"] for band, estimate in end.items() if estimate["value"] is not None}
    return [
        Line("at the start, teacher without guidance", _stairs(squares)),
        Line(f"evaluated{older and f' {older}'}, teacher with guidance", _stairs(evaluated)),
    ]


def _stairs(bands: dict[str, float]) -> list[tuple[float, float]]:
    ends = [(float(end), value) for band, value in bands.items() for end in band.rsplit("-", 1)]
    return sorted(ends, key=lambda point: point[0])


def _metrics(output: Path) -> list[MetricsLine]:
    """Read the entries of all steps; an incomplete last line is left out."""
    file = output / "metrics.jsonl"
    if not file.is_file():
        remedy = "Name the --output_dir of a run that has done a step."
        raise ConfigError(f"{output}: no metrics.jsonl in it. {remedy}")
    with readable(file):
        entries = read_lines(file)
    if not entries:
        raise ConfigError(f"{file}: has no step yet. Wait for the first.")
    return entries


def _summary(output: Path, lines: list[MetricsLine]) -> dict[str, str]:
    last, run = lines[-1], read_if_exists(output / "resolved" / "run.json")
    done = "done" if (output / "DONE").is_file() else f"of {run.get('max_steps', '?')}"
    return {
        "steps": f"{last['step']} {done}",
        "loss, last step": "not finite" if last["loss"] is None else f"{last['loss']:.5g}",
        "time in steps": clock(sum(line["seconds"] for line in lines)),
        "teacher": run.get("teacher_path", "?"),
        "objective": json.dumps(run.get("objective", "velocity")).strip('"'),
    }


def _samples(output: Path) -> dict[int, Picture]:
    if not (files := drawn(output)):
        return {}
    spread = {files[round(i * (len(files) - 1) / (MOST_GRIDS - 1))] for i in range(MOST_GRIDS)}
    return {int(file.stem.partition("_")[2]): _picture(file) for file in sorted(spread, reverse=True)}


def _picture(file: Path) -> Picture:
    animation = file.with_suffix(".mp4")
    with Image.open(file, formats=["PNG"]) as opened:
        width = opened.width
    mp4 = _address(animation.read_bytes(), "video/mp4") if animation.is_file() else ""
    return Picture(file.stem, width, _address(file.read_bytes(), "image/png"), mp4)


def _address(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _evaluation(output: Path, lines: list[MetricsLine]) -> dict[str, Any] | None:
    """Return the picture of an evaluation, and the tables and warnings of evaluation.md."""
    file, picture = output / "evaluation.md", output / "evaluation.png"
    if not file.is_file():
        return None
    older = outdated(read_if_exists(output / "evaluation.json"), lines)
    parts: list[dict[str, Any]] = [{"warning": f"Evaluated {older}: evaluate it again."}] * bool(older)
    for block in map(str.strip, file.read_text(encoding="utf-8").split("\n\n")):
        if block.startswith("|"):
            head, _, *rows = [line.strip().strip("|").split("|") for line in block.splitlines()]
            parts.append({"head": head, "rows": rows})
        elif block.startswith("**"):  # a warning
            parts.append({"warning": block.replace("*", "")})
    return {"picture": _picture(picture) if picture.is_file() else None, "parts": parts}


def _memory_by_phase(output: Path) -> dict[str, Any]:
    memory = read_if_exists(output / "memory.json")
    shown = [kind for kind in MEMORY if any(kind in kinds for kinds in memory.values())]
    rows = [
        [phase, *(f"{max(kinds[kind]):.2f}" if kind in kinds else "-" for kind in shown)]
        for phase, kinds in memory.items()
    ]
    ranks = max((len(v) for kinds in memory.values() for v in kinds.values()), default=0)
    return {"ranks": ranks, "head": ["phase", *(MEMORY[kind] for kind in shown)], "rows": rows}
