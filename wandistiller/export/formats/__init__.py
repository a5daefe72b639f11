"""Export formats, one module each; a module's name is what `export --format` takes."""
