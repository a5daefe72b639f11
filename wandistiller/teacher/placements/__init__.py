"""Placements of the teacher's weights, one class a module; JSONs name the module."""
