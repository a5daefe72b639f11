"""Names for --teacher_deepspeed_config: the shipped teacher JSONs and their short names. Without torch."""

from functools import cache
from typing import Any

from wandistiller.utils.files import SHIPPED, read_json

SHORT_NAME = "short_name"
"""Key of a teacher JSON's block "wandistiller"."""


@cache
def teacher_jsons() -> list[str]:
    return sorted(file.stem for file in (SHIPPED / "teacher").glob("*.json"))


@cache
def strategies() -> dict[str, str]:
    """The JSON's name by its short name and by itself."""
    blocks = {
        name: read_json(SHIPPED / "teacher" / f"{name}.json").get("wandistiller", {})
        for name in teacher_jsons()
    }
    short = {block[SHORT_NAME]: name for name, block in blocks.items() if SHORT_NAME in block}
    return dict(sorted(short.items())) | {name: name for name in blocks}


def teacher_file(source: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return the file of a shipped teacher JSON, by one of its names; another name is a file itself."""
    is_name = isinstance(source, str) and source in strategies()
    return f"ds_configs/teacher/{strategies()[source]}.json" if is_name else source
