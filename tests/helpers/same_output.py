"""In what the output folders of two runs differ, apart from times and memory."""

import json
from pathlib import Path

APART = ("cache/", "resolved/", "logs/", "metrics.jsonl", "memory.json", ".lock", "DONE")
"""Files of times, memory, folder names or metadata in any order; only their presence is compared."""


ALARMS = "alarms.jsonl"
"""Of a slow rank, where a machine is busy."""


def differences(reference: Path, output: Path) -> list[str]:
    """Return the differences of an output folder from the undisturbed run's, in all bytes except times."""
    wanted, found = (
        {str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} - {ALARMS} for f in (reference, output)
    )
    for extra, replaced in _between(
        reference, output
    ).items():  # saved where it was, by ranks whose launcher was killed
        found = {name for name in found if not name.startswith(extra)}
        wanted = {name for name in wanted if not name.startswith(replaced)}
    wrong = [f"{name} is missing" for name in sorted(wanted - found)] + [
        f"{name} is too much" for name in sorted(found - wanted)
    ]
    for name in sorted(wanted & found):
        if not name.startswith(APART) and (reference / name).read_bytes() != (output / name).read_bytes():
            wrong.append(f"{name} differs")
    if metrics(reference) != metrics(output):
        wrong.append("metrics.jsonl differs")
    return wrong


def _between(reference: Path, output: Path) -> dict[str, str]:
    """Return checkpoints that were saved early, each with the older one that it replaced."""
    wanted, found = (
        {f"checkpoints/{p.name}/" for p in (f / "checkpoints").glob("step_*")} for f in (reference, output)
    )
    return dict(zip(sorted(found - wanted), sorted(wanted - found), strict=False))


def metrics(output: Path) -> list[dict]:
    """The lines of metrics.jsonl, without what a clock or the machine's memory says."""
    clocks = ("seconds", "samples_per_second", "memory_gib")
    rows = (json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in clocks} for row in rows]
