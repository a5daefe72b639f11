"""`wandistiller report`: the HTML file of a run."""

from wandistiller.cli.flags import ReportFlags
from wandistiller.monitoring.report import report


def run(flags: ReportFlags) -> None:
    print(report(flags.output))
