"""The recipe, its checks, and the Job that all commands read."""
