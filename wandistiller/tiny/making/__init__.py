"""The scripts that trained the embedded teachers; no part of an installation."""
