"""Exports: the checkpoint as a source of networks, file formats, model card, hub."""
