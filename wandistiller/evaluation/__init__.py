"""Sampling, and comparing student with teacher."""
