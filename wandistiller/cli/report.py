"""`wandistiller report`: the HTML file of a run."""

from wandistiller.cli.flags import ReportFlags
from wandistiller.distributed import collectives
from wandistiller.monitoring.report import report


def run(flags: ReportFlags) -> None:
    collectives.show(report(flags.output))
