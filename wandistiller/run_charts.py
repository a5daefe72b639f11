"""The charts of a run: what it wrote at each step, and how far the student was, and is, from the teacher."""

from pathlib import Path
from typing import Any

from wandistiller.charts import Chart, Line, smooth
from wandistiller.config import read_json

KINDS = {"host": "CPU memory", "host_peak": "CPU memory at most", "allocated": "GPU, tensors", "reserved": "GPU, reserved",
         "peak": "GPU at most"}  # fmt: skip
"""Of memory, in metrics.jsonl and memory.json: their names for people."""


def run_charts(output: Path, lines: list[dict[str, Any]]) -> dict[str, Chart]:
    """By the name of their files; what there are no numbers of is left out."""
    def of(key: str) -> list[tuple[float, Any]]:
        return [(line["step"], line.get(key)) for line in lines if line.get(key) is not None]

    over = max(1, len(lines) // 50)
    loss = [Line("each step", of("loss"))] + [Line(f"mean of {over}", smooth(of("loss"), over))] * (over > 1)
    bands = sorted({band for line in lines for band in line.get("loss_by_sigma", {})})
    by_band = [Line(f"sigma {band}", smooth([(line["step"], line["loss_by_sigma"][band]) for line in lines
                                             if band in line.get("loss_by_sigma", {})], over)) for band in bands]  # fmt: skip
    terms = sorted({name for line in lines for name in line.get("losses", {})})
    by_term = [Line(name, smooth([(line["step"], line["losses"][name]) for line in lines if "losses" in line], over))
               for name in terms]  # fmt: skip
    found = {
        "loss": Chart("loss", "a step", loss, True),
        "loss_by_sigma": Chart("loss by sigma", f"mean of {over}", by_band, True),
        "error_by_sigma": Chart("velocity error by sigma", "squared, over the teacher's squared", _error_by_sigma(output), True),
        "terms": Chart("loss of each term", f"mean of {over}", by_term, True),
        "grad_norm": Chart("gradient norm", "a step", [Line("gradient norm", of("grad_norm"))], True),
        "lr": Chart("learning rate", "a step", [Line("learning rate", of("lr"))]),
        "throughput": Chart("throughput", "samples a second", [Line("samples a second", of("samples_per_second"))]),
        "memory": Chart("memory", "GiB of the rank with most", _memory(lines)),
    }
    return {name: chart for name, chart in found.items() if any(line.points for line in chart.lines)}


def _memory(lines: list[dict[str, Any]]) -> list[Line]:
    """What each kind takes while it trains."""
    held = [(line["step"], line.get("memory_gib", {}).get("train")) for line in lines]
    held = [(step, kinds) for step, kinds in held if isinstance(kinds, dict)]
    return [Line(words, [(step, max(kinds[kind])) for step, kinds in held if kind in kinds]) for kind, words in KINDS.items()]


def _error_by_sigma(output: Path) -> list[Line]:
    """student_start.json has the root of this quotient, and asks the teacher without guidance; evaluation.json with it."""
    start = read_if_there(output / "student_start.json").get("relative_velocity_error_by_sigma", {})
    end = read_if_there(output / "evaluation.json").get("relative_velocity_error", {}).get("bands", {})
    return [Line("at the start, teacher without guidance", _stairs({band: error**2 for band, error in start.items()})),
            Line("evaluated, teacher with guidance", _stairs({band: found["value"] for band, found in end.items()}))]  # fmt: skip


def _stairs(bands: dict[str, float | None]) -> list[tuple[float, float]]:
    """One level for each band LOW-HIGH."""
    ends = [(float(end), value) for band, value in bands.items() if value is not None for end in band.rsplit("-", 1)]
    return sorted(ends, key=lambda point: point[0])


def read_if_there(file: Path) -> dict[str, Any]:
    """What a JSON file says; nothing, where it is not there."""
    return read_json(str(file)) if file.is_file() else {}
