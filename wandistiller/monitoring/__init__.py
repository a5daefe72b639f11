"""Metrics, alarms, memory use, report."""
