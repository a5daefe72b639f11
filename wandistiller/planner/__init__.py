"""Memory, disk and time of a run before it starts; resolve_auto.py decides which JSONs `auto` becomes."""
