"""Memory, disk and time of a run before it starts, and the JSONs that fit."""
