"""Checkpoints: save, verify, find, resume."""
