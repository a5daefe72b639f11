"""Pages as jinja2 templates in files of their own."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render(file: Path, **values: Any) -> str:
    """Fill the template in `file`; in HTML all values are escaped."""
    environment = Environment(
        loader=FileSystemLoader(file.parent),
        autoescape=".html" in file.suffixes,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(file.name).render(values)
