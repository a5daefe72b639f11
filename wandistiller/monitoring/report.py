"""`wandistiller report`: a run's curves, pictures, evaluation, settings and machine in one HTML file."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from wandistiller.config.start import recorded_stages
from wandistiller.distributed.progress import clock
from wandistiller.monitoring import environment
from wandistiller.monitoring.alarms import FILE, HINTS
from wandistiller.monitoring.charts import Chart, Line, require_matplotlib, smooth, svg
from wandistiller.monitoring.headline import SIDES, headline, read_if_exists
from wandistiller.monitoring.media import image, shown, still, wide
from wandistiller.monitoring.metrics import SAMPLES, read_lines
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
}
"""Key of samples.jsonl -> title and unit."""
NOT_CHARTED = {"step", "seconds", "skipped"}
STACKED_FROM = 3
"""Columns of a table that is too broad for a phone."""
STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --page: #fff; --faint: #595959; --line: #ddd; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --page: #121212; --faint: #a3a3a3; --line: #3a3a3a; }
  .charts img { filter: invert(.93) hue-rotate(180deg); }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); }
body { max-width: 75rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.headline { display: flex; flex-wrap: wrap; gap: 1rem 3rem; margin-bottom: 1.5rem; }
.headline > div { max-width: 22rem; } .headline b { display: block; font-size: 2.2rem; line-height: 1.2; }
.headline small { display: block; color: var(--faint); overflow-wrap: anywhere; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
img, video { height: auto; display: block; margin-bottom: .5rem; } .charts img { width: 100%; }
video { object-fit: cover; object-position: top; }
pre { font-size: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
td, th { padding: .25rem .8rem .25rem 0; text-align: left; border-bottom: 1px solid var(--line); }
td { overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  .stacked tr, .stacked th, .stacked td { display: block; border: 0; padding: .1rem 0; }
  .stacked tr { border-bottom: 1px solid var(--line); padding: .3rem 0; }
  .stacked tr:first-child th + th { display: none; }
  .stacked td::before { content: attr(data-head) ": "; color: var(--faint); }
}
"""


def report(output: Path) -> Path:
    """Write OUTPUT/report/index.html, which needs no other file; parts without data are left out.

    Raises:
        ConfigError: `output` is not the folder of a run or of stages, or matplotlib is not installed.
    """
    require_matplotlib()
    name, file = escape(output.resolve().name), output / "report" / "index.html"
    stages = [folder for folder in recorded_stages(output) if (folder / "metrics.jsonl").is_file()]
    runs = {run: _metrics(run) for run in stages or [output]}
    last = list(runs)[-1]
    body = [f"<h1>{name}</h1>", _headline(output, last, runs[last])]
    if stages:
        body += _evaluation(output)
    for run, lines in runs.items():
        if stages:
            number, _, stage = run.name.partition("_")
            body.append(f"<h1>Stage {number}: {escape(stage)}</h1>")
        body += _of_run(run, lines)
    if stages:
        body += [*_machine(output), *_settings(output)]
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{STYLE}</style>\n" + "\n".join(body) + "</html>\n"
    )
    with atomic(file) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return file


def _of_run(output: Path, lines: list[dict[str, Any]]) -> list[str]:
    """Return the parts about one run, or one stage: what is wrong, pictures and figures, then the rest."""
    charts = (image(svg(chart), "svg+xml", chart.title) for chart in run_charts(output, lines).values())
    return [
        _summary(output, lines),
        *_alarms(output, "Alarms", hints=False),
        *_pictures(output),
        *_evaluation(output),
        f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div>',
        *_alarms(output, "Hints", hints=True),
        *_machine(output),
        _memory_by_phase(output),
        *_settings(output),
    ]


def run_charts(output: Path, lines: list[dict[str, Any]]) -> dict[str, Chart]:
    """Chart the numbers in `lines` of metrics.jsonl by key, memory, velocity errors by sigma, importance."""
    window = max(1, len(lines) // 50)
    charts: dict[str, Chart] = {}
    for key in dict.fromkeys(key for line in lines for key in line if key not in NOT_CHARTED):
        title, logarithmic = CHARTED.get(key, (key.replace("_", " "), False))
        values = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        parts = sorted({name for _, value in values if isinstance(value, dict) for name in value})
        if key == "memory_gib":
            charts[key] = Chart("memory while training", "GiB of the rank with most", _memory_lines(values))
        elif parts:
            of = {name: [(step, value[name]) for step, value in values if name in value] for name in parts}
            curves = [Line(name, smooth(points, window)) for name, points in of.items()]
            charts[key] = Chart(title, f"mean of {window} steps", curves, logarithmic)
        elif all(isinstance(value, int | float) for _, value in values):
            mean = [Line(f"mean of {window}", smooth(values, window))] * (window > 1 and logarithmic)
            charts[key] = Chart(title, "each step", [Line("each step", values), *mean], logarithmic)
    samples = read_lines(output / SAMPLES)
    for key, (title, unit) in OF_SAMPLES.items():
        of = {side: [(one["step"], one[key].get(side)) for one in samples if key in one] for side in SIDES}
        charts[key] = Chart(title, unit, [Line(side, points) for side, points in of.items()])
    unit = "squared, over the teacher's squared"
    charts["error_by_sigma"] = Chart("velocity error by sigma", unit, _errors(output), True)
    charts["importance"] = Chart("importance by block", "velocity error without it", _importance(output))
    for chart in charts.values():
        chart.lines[:] = [line for line in chart.lines if line.points]
    return {name: chart for name, chart in charts.items() if chart.lines}


def _memory_lines(values: list[tuple[int, dict[str, Any]]]) -> list[Line]:
    """Return a line for each kind of memory: the largest of all ranks while they train."""
    used = [(step, phases["train"]) for step, phases in values if "train" in phases]
    return [
        Line(name, [(step, max(kinds[kind])) for step, kinds in used if kind in kinds])
        for kind, name in MEMORY.items()
    ]


def _errors(output: Path) -> list[Line]:
    """Return the squared velocity errors before training, whose file has the roots, and as evaluated."""
    start = read_if_exists(output / "student_start.json").get("relative_velocity_error_by_sigma", {})
    end = read_if_exists(output / "evaluation.json").get("relative_velocity_error", {}).get("bands", {})
    squares = {band: error**2 for band, error in start.items()}
    evaluated = {band: estimate["value"] for band, estimate in end.items() if estimate["value"] is not None}
    return [
        Line("at the start, teacher without guidance", _stairs(squares)),
        Line("evaluated, teacher with guidance", _stairs(evaluated)),
    ]


def _stairs(bands: dict[str, float]) -> list[tuple[float, float]]:
    """Return the two ends of a level for each band LOW-HIGH."""
    ends = [(float(end), value) for band, value in bands.items() for end in band.rsplit("-", 1)]
    return sorted(ends, key=lambda point: point[0])


def _importance(output: Path) -> list[Line]:
    """Return the teacher's velocity error without each of its blocks, in the rounds that chose the layers."""
    rounds = read_if_exists(output / "importance.json").get("relative_error_without", [])
    curves = ([(int(block), error) for block, error in errors.items()] for errors in rounds)
    return [Line(f"round {n}", curve) for n, curve in enumerate(curves, 1)]


def _metrics(output: Path) -> list[dict[str, Any]]:
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


def _headline(output: Path, run: Path, lines: list[dict[str, Any]]) -> str:
    figures = [[escape(text) for text in figure] for figure in headline(output, run, lines)]
    boxes = (f"<div><b>{value}</b>{label}<small>{detail}</small></div>" for value, label, detail in figures)
    return f'<div class="headline">{"".join(boxes)}</div>'


def _summary(output: Path, lines: list[dict[str, Any]]) -> str:
    last, run = lines[-1], read_if_exists(output / "resolved" / "run.json")
    done = "done" if (output / "DONE").is_file() else f"of {run.get('max_steps', '?')}"
    rows = {
        "steps": f"{last['step']} {done}",
        "loss, last step": "not finite" if last["loss"] is None else f"{last['loss']:.5g}",
        "time in steps": clock(sum(line["seconds"] for line in lines)),
        "teacher": run.get("teacher_path", "?"),
        "objective": json.dumps(run.get("objective", "velocity")).strip('"'),
    }
    return _table(rows.items())


def _alarms(output: Path, title: str, *, hints: bool) -> list[str]:
    entries = [entry for entry in read_lines(output / FILE) if (entry["kind"] in HINTS) is hints]
    raised = [(f"step {entry['step']}", entry["alarm"]) for entry in entries]
    return [f"<h2>{title}</h2>", _table(raised)] if raised else []


def _pictures(output: Path) -> list[str]:
    if not (files := drawn(output)):
        return []
    spread = {files[round(i * (len(files) - 1) / (MOST_GRIDS - 1))] for i in range(MOST_GRIDS)}
    last, *earlier = sorted(spread, reverse=True)
    parts = [_at_step(last), shown(last)]
    if last.with_suffix(".mp4").is_file():  # and its frames one by one
        parts.append(still(last))
    if earlier:
        older = "".join(_at_step(file) + shown(file, plays_at_once=False) for file in earlier)
        parts.append(f"<details><summary>earlier pictures</summary>{older}</details>")
    return ["<h2>Teacher above, student below</h2>", *parts]


def _at_step(picture: Path) -> str:
    return f"<p>step {int(picture.stem.partition('_')[2])}</p>"


def _evaluation(output: Path) -> list[str]:
    """Show the picture of an evaluation or, of clips, its animation, and the tables of evaluation.md."""
    file, picture = output / "evaluation.md", output / "evaluation.png"
    if not file.is_file():
        return []
    tables = []
    for block in map(str.strip, file.read_text(encoding="utf-8").split("\n\n")):
        if block.startswith("|"):
            head, _, *rows = [line.strip().strip("|").split("|") for line in block.splitlines()]
            tables.append(f"{_table(rows, head)}<br>")
        elif block.startswith("**"):  # a warning
            tables.append(f"<p>{escape(block.replace('*', ''))}</p>")
    pictures = [shown(picture)] if picture.is_file() else []
    return ["<h2>Evaluation</h2>", *pictures, *tables]


def _machine(output: Path) -> list[str]:
    """Describe the machine on which the run was last started."""
    machine = read_if_exists(output / "resolved" / "machine.json")
    return [f"<h2>Machine</h2>{_table(environment.rows(machine))}"] if machine else []


def _memory_by_phase(output: Path) -> str:
    memory = read_if_exists(output / "memory.json")
    ranks = max((len(v) for kinds in memory.values() for v in kinds.values()), default=0)
    shown = [kind for kind in MEMORY if any(kind in kinds for kinds in memory.values())]
    rows = [
        [phase, *(f"{max(kinds[kind]):.2f}" if kind in kinds else "-" for kind in shown)]
        for phase, kinds in memory.items()
    ]
    title = f"Memory by phase, GiB of the rank with most, {ranks} rank(s)"
    return f"<h2>{title}</h2>{_table(rows, ['phase', *(MEMORY[kind] for kind in shown)])}"


def _settings(output: Path) -> list[str]:
    files = sorted((output / "resolved").glob("*.json"))
    texts = {file.name: escape(file.read_text(encoding="utf-8")) for file in files}
    folded = [f"<details><summary>{f}</summary><pre>{text}</pre></details>" for f, text in texts.items()]
    return ["<h2>Settings as they ran</h2>", *folded] if files else []


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Format a table whose rows begin with a name; on a phone a broad one has its cells below each other."""
    texts = [[escape(cell.strip()) for cell in cells] for cells in [head, *rows] if cells]
    names = texts[0] if head else []

    def row(cells: Sequence[str]) -> str:
        of = [f' data-head="{name}"' for name in names] or [""] * len(cells)
        others = (f"<td{which}>{cell}</td>" for which, cell in zip(of[1:], cells[1:], strict=False))
        return f"<tr><th>{cells[0]}</th>{''.join(others)}</tr>"

    lines = [f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"] if head else []
    lines += [row(cells) for cells in texts[len(lines) :]]
    kind = ' class="stacked"' if len(names) >= STACKED_FROM else ""
    return wide(f"<table{kind}>{''.join(lines)}</table>")
