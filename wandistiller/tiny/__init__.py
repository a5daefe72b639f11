"""The embedded toy teacher: its prompts, its judge, and the scripts that trained it."""
