"""`wandistiller report`: the HTML file of a run."""

from wandistiller.cli.flags import ReportFlags
from wandistiller.monitoring.report import report


def run(flags: ReportFlags) -> None:
    """Write the report and print its path."""
    print(report(flags.output))
