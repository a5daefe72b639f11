"""`wandistiller report`: the HTML file of a run."""

from wandistiller.cli.flags import ReportFlags
from wandistiller.distributed import collectives
from wandistiller.monitoring.report import report
from wandistiller.utils.errors import ConfigError, folder_problems


def run(flags: ReportFlags) -> None:
    if problems := folder_problems("output", flags.output):
        raise ConfigError(*problems)
    collectives.show(report(flags.output))
