"""In what the output folders of two runs differ, apart from times and memory."""

from collections.abc import Iterator
from pathlib import Path

from ranks import metrics

APART = ("cache/", "resolved/", "logs/", "metrics.jsonl", "memory.json", ".lock", "DONE")
"""Files of times, memory, folder names or metadata in any order; only their presence is compared."""
CLOCKS = ("seconds", "samples_per_second", "memory_gib")
"""Keys of metrics.jsonl that a clock or the machine's memory decides."""
ALARMS = "alarms.jsonl"
"""Of a slow rank, where a machine is busy."""


def differences(reference: Path, output: Path) -> list[str]:
    """Return the differences of an output folder from the undisturbed run's, in all bytes except times."""
    expected, actual = (
        {str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} - {ALARMS} for f in (reference, output)
    )
    for early, replaced in _early_checkpoints(reference, output):
        actual = {name for name in actual if not name.startswith(early)}
        expected = {name for name in expected if not name.startswith(replaced)}
    wrong = [f"{name} is missing" for name in sorted(expected - actual)]
    wrong += [f"{name} is too much" for name in sorted(actual - expected)]
    for name in sorted(expected & actual):
        if not name.startswith(APART) and (reference / name).read_bytes() != (output / name).read_bytes():
            wrong.append(f"{name} differs")
    kept, same = (
        [{k: v for k, v in line.items() if k not in CLOCKS} for line in metrics(f)]
        for f in (reference, output)
    )
    return wrong + ["metrics.jsonl differs"] * (kept != same)


def _early_checkpoints(reference: Path, output: Path) -> Iterator[tuple[str, str]]:
    """Pair checkpoints that ranks without a launcher saved at once with those that they replaced."""
    expected, actual = (
        {f"checkpoints/{p.name}/" for p in (f / "checkpoints").glob("step_*")} for f in (reference, output)
    )
    return zip(sorted(actual - expected), sorted(expected - actual), strict=False)
