"""`wandistiller report`: a run's curves, pictures, evaluation, settings and machine in one HTML file that needs nothing else."""

import base64
import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from wandistiller import hardware
from wandistiller.charts import png, svg
from wandistiller.files import atomic
from wandistiller.memory_picture import COLOURS
from wandistiller.metrics import clock, read_lines
from wandistiller.pictures import drawn
from wandistiller.problems import ConfigError, readable
from wandistiller.run_charts import KINDS, read_if_there, run_charts

SHOWN = 6
"""Sample grids of a run that are shown: the first, the last, and between."""
STYLE = """
:root { color-scheme: light dark; --fg: #1b1b1b; --dim: #666; --bg: #fff; --rule: #ddd; }
@media (prefers-color-scheme: dark) { :root { --fg: #e8e8e8; --dim: #a0a0a0; --bg: #16181c; --rule: #3a3d44; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); max-width: 75rem; margin: 0 auto;
  padding: 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
svg text { font-size: 12px; fill: var(--dim); } .grid { stroke: var(--rule); } .line { fill: none; stroke-width: 1.6; }
@media (prefers-color-scheme: dark) { polyline, .key::before { filter: brightness(1.3); } }
.charts { display: grid; gap: 1.5rem; margin-top: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
.key { display: inline-block; margin-right: 1rem; font-size: .85rem; } .key::before { content: ""; display: inline-block;
  width: .7em; height: .7em; margin-right: .35em; background: currentColor; }
.wide { overflow-x: auto; } img { width: max(100%, 44rem); height: auto; background: #fff; }
pre { font-size: .8rem; overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; } td, th { padding: .25rem .8rem .25rem 0; text-align: left;
  border-bottom: 1px solid var(--rule); } .dim { color: var(--dim); }
"""


def report(output: Path) -> list[Path]:
    """Write OUTPUT/report/index.html and its charts as PNG files; what is not there yet is left out.

    Raises:
        ConfigError: `output` is no folder of a run.
    """
    lines = _metrics(output)
    charts = run_charts(output, lines)
    folder = output / "report"
    files = [folder / f"{name}.png" for name in charts]
    for chart, file in zip(charts.values(), files, strict=True):
        png(chart, file)
    colours = "".join(f".l{n} {{ stroke: {c}; }} .k{n}::before {{ background: {c}; }}\n" for n, c in enumerate(COLOURS))
    body = [f"<h1>{escape(output.resolve().name)}</h1>", _summary(output, lines),
            *_alarms(output), '<div class="charts">', *map(svg, charts.values()), "</div>",
            *_pictures(output), *_evaluation(output), *_machine(output), _memory(output), *_settings(output)]  # fmt: skip
    page = ('<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{escape(output.resolve().name)}</title><style>{STYLE}{colours}</style>\n" + "\n".join(body) + "</html>\n")
    with atomic(folder / "index.html") as temporary:
        temporary.write_text(page, encoding="utf-8")
    return [folder / "index.html", *files]


def _metrics(output: Path) -> list[dict[str, Any]]:
    """Each step's line; one that is just being written is left out."""
    file = output / "metrics.jsonl"
    if not file.is_file():
        raise ConfigError(f"{output}: no metrics.jsonl in it. Name the --output_dir of a run that has done a step.")
    with readable(file):
        found = read_lines(file)
    if not found:
        raise ConfigError(f"{file}: has no step yet. Wait for the first.")
    return found


def _summary(output: Path, lines: list[dict[str, Any]]) -> str:
    last, run = lines[-1], read_if_there(output / "resolved" / "run.json")
    seconds = sum(line["seconds"] for line in lines)
    done = "done" if (output / "DONE").is_file() else f"of {run.get('max_steps', '?')}"
    loss = f"{last['loss']:.5g}" if last["loss"] is not None else "not finite"
    told = {"steps": f"{last['step']} {done}", "loss, last step": loss, "time in steps": clock(seconds),
            "teacher": run.get("teacher_path", "?"),
            "objective": json.dumps(run.get("objective", "velocity")).strip('"')}  # fmt: skip
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in told.items())
    return f"<table>{rows}</table>"


def _alarms(output: Path) -> list[str]:
    """What health.py has said."""
    said = read_lines(output / "alarms.jsonl")
    rows = "".join(f"<tr><td>step {entry['step']}</td><td>{escape(entry['alarm'])}</td></tr>" for entry in said)
    return [f"<h2>Alarms</h2><table>{rows}</table>"] if said else []


def _pictures(output: Path) -> list[str]:
    files = drawn(output)
    if not files:
        return []
    picked = sorted({round(i * (len(files) - 1) / max(1, SHOWN - 1)) for i in range(SHOWN)})
    shown = [(int(files[i].stem.partition("_")[2]), _image(files[i])) for i in picked]
    grids = (f'<p>step {step}</p><div class="wide">{image}</div>' for step, image in shown)
    return ["<h2>Teacher above, student below</h2>", *grids]


def _image(file: Path) -> str:
    return f'<img alt="{escape(file.stem)}" src="data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}">'


def _evaluation(output: Path) -> list[str]:
    """The tables of evaluation.md, and its picture."""
    file, picture = output / "evaluation.md", output / "evaluation.png"
    if not file.is_file():
        how = "wandistiller evaluate --student_path OUTPUT/student"
        return [f'<p class="dim">No evaluation yet: <code>{how}</code> adds it here.</p>']
    tables = [block for block in file.read_text(encoding="utf-8").split("\n\n") if block.startswith("|")]
    found = ["<h2>Evaluation</h2>", *(f'<div class="wide">{_table(block)}</div><br>' for block in tables)]
    return found + ([f'<div class="wide">{_image(picture)}</div>'] if picture.is_file() else [])


def _table(block: str) -> str:
    """A Markdown table as HTML."""
    rows = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in block.splitlines()]
    cells = [("th", rows[0]), *(("td", row) for row in rows[2:])]
    return _html(cells)


def _html(rows: Iterable[tuple[str, list[str]]]) -> str:
    """A table of rows whose cells are of one kind each, th or td."""
    made = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in made)}</table>"


def _settings(output: Path) -> list[str]:
    files = sorted((output / "resolved").glob("*.json"))
    return ["<h2>Settings as they ran</h2>"] * bool(files) + [
        f"<details><summary>{escape(file.name)}</summary><pre>{escape(file.read_text(encoding='utf-8'))}</pre></details>"
        for file in files
    ]  # fmt: skip


def _machine(output: Path) -> list[str]:
    """What the run ran on when it was last started."""
    said = read_if_there(output / "resolved" / "machine.json")
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in hardware.rows(said)) if said else ""
    return [f'<h2>Machine</h2><div class="wide"><table>{rows}</table></div>'] if said else []


def _memory(output: Path) -> str:
    memory = read_if_there(output / "memory.json")
    ranks = max((len(v) for kinds in memory.values() for v in kinds.values()), default=0)
    shown = [kind for kind in KINDS if any(kind in kinds for kinds in memory.values())]
    rows = [("th", ["phase", *(KINDS[kind] for kind in shown)])]
    rows += [("td", [phase, *(f"{max(kinds[kind]):.2f}" if kind in kinds else "-" for kind in shown)])
             for phase, kinds in memory.items()]  # fmt: skip
    return (f"<h2>Memory by phase, GiB of the rank with most, {ranks} rank(s)</h2>"
            f'<div class="wide">{_html(rows)}</div>')  # fmt: skip
