"""`wandistiller report`: the HTML file of a run."""

from typing import Any

from wandistiller.monitoring.report import report


def run(flags: dict[str, Any]) -> None:
    """Write the report and print its path."""
    print(report(flags["output"]))
