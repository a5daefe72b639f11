"""Distils a large Wan text-to-video transformer into a small, fast student."""

__version__ = "0.1.0"
