"""Preparing data, building the student, the training loop, steps that are not finite."""
