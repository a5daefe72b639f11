"""Ranks: launchers, collectives, watchdog, graceful shutdown."""
