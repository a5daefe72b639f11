"""The embedded toy teacher: its prompts and its judge; `making/` has the scripts that trained it."""
