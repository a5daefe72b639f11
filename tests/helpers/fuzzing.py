"""Settings of hypothesis."""

from hypothesis import HealthCheck, settings


def fuzz(examples: int) -> settings:
    """Draw the same examples in every run."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
