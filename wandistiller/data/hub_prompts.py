"""Prompts of a data set of the Hugging Face hub: a column that is streamed once into a file of the cache."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub.errors import HTTPError

from wandistiller.data.lines import PROMPT_COLUMNS, has_prompt
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import atomic, digest, wait_for_lock
from wandistiller.utils.logging import heartbeat, log, set_activity

HUB = "hub:"
COUNT = 10_000
"""Prompts that are taken unless a number is given."""
BUFFER = 10_000
"""Rows among which the shuffle draws the next one."""


def prompts_file(source: str, column: str | None, count: int | None, seed: int, cache: Path) -> Path:
    """Return the file of the cache that has, or will have, the prompts of `source`."""
    return cache / f"prompts_{digest(source, column, count, seed)}.jsonl"


def fetch_prompts(source: str, column: str | None, count: int | None, seed: int, cache: Path) -> Path:
    """Write the prompts of a data set into a file of the cache, if it is not there; return that file.

    They depend on the data set and these arguments alone. One process fetches, others that share the cache
    wait. A resumed run finds the file.

    Args:
        source: hub:OWNER/NAME, or hub:OWNER/NAME:SUBSET.
        column: of the prompts; None: the first of PROMPT_COLUMNS, in any case.
        count: prompts to take, all different; None: COUNT; fewer if there are no more.

    Raises:
        ConfigError: the library is missing, the data set cannot be read, or it has no such column.
    """
    file = prompts_file(source, column, count, seed, cache)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".prompts.lock").open("a") as lock:
        wait_for_lock(lock, f"data      waiting for the process that fetches prompts of {source}")
        if not file.is_file():
            set_activity(f"fetching prompts of {source}")
            try:
                lines = [json.dumps({"prompt": p}) for p in _stream(source, column, count, seed)]
            except (OSError, ValueError, RuntimeError, HTTPError) as error:  # RuntimeError: code of a set
                raise ConfigError(f"{source}: {error}") from None
            with atomic(file) as temporary:
                temporary.write_text("\n".join([*lines, ""]), encoding="utf-8")
            log.info("data      %d prompts of %s are in %s", len(lines), source, file)
    return file


def _stream(source: str, column: str | None, count: int | None, seed: int) -> Iterator[str]:
    """Yield different prompts of the shuffled part "train", or of the first one."""
    if not find_spec("datasets"):
        raise ConfigError(f"{source}: data sets of the hub need: pip install datasets.")
    from datasets import load_dataset

    name, _, subset = source.removeprefix(HUB).partition(":")
    parts = load_dataset(name, subset or None, streaming=True)  # runs no code of a data set (datasets 4.0 on)
    rows = parts[min(parts, key=lambda part: part != "train")]
    there = rows.column_names or [*next(iter(rows))]
    usual = {known.strip().lower(): known for known in there}
    column = column or next((usual[key] for key in PROMPT_COLUMNS if key in usual), None)
    if column not in there:
        raise ConfigError(f"{source}: `hub_column` is {column}. Write one of: {', '.join(there)}.")
    seen: set[str] = set()
    for row in rows.select_columns([column]).shuffle(seed=seed, buffer_size=BUFFER):
        heartbeat()
        if isinstance(text := row[column], str) and has_prompt(text) and text not in seen:
            seen.add(text)
            yield text
        if len(seen) == (count or COUNT):
            return
