"""Command line: parser, one entry for each command, exit codes."""
