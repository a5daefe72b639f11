"""Errors, files, logging and other helpers without ranks or DeepSpeed."""
