"""Fetches a teacher from the Hugging Face hub: first the files that describe it, later its weights."""

import shlex
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import constants, errors, snapshot_download
from huggingface_hub.utils import tqdm

from wandistiller.network.weight_reader import DIFFUSERS_STEM
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import FACTS
from wandistiller.utils.logging import current, heartbeat, set_activity

CONFIG_FILES = [
    *("model_index.json", "scheduler/scheduler_config.json", "vae/config.json", "text_encoder/config.json"),
    *("transformer/config.json", "transformer_2/config.json", "README.md", FACTS),
    *("image_encoder/config.json", "image_processor/preprocessor_config.json"),
    *(f"tokenizer/{name}.json" for name in ("tokenizer_config", "special_tokens_map", "added_tokens")),
]
"""The files that `open_wan` reads, the README for its licence, also the student's, and a student's facts."""
STEMS = dict.fromkeys(("text_encoder", "image_encoder"), "model")
STEMS |= dict.fromkeys(("transformer", "transformer_2", "vae"), DIFFUSERS_STEM)
WEIGHT_FILES = ["tokenizer/tokenizer.json", "tokenizer/spiece.model"] + [
    f"{part}/{stem}{end}"
    for part, stem in STEMS.items()
    for end in (".safetensors", "-?????-of-?????.safetensors", ".safetensors.index.json")
]
"""All weights in safetensors: no .bin, .pth, fp16 copies, videos, code."""


def is_used(file: str) -> bool:
    """Tell whether a file of a pipeline, named FOLDER/NAME, is ever read; a student gets no others."""
    return any(fnmatchcase(file, pattern) for pattern in CONFIG_FILES + WEIGHT_FILES)


class _Arrived(tqdm):
    """The hub's bar, shown or not: bytes that arrive are progress to the watchdog."""

    def update(self, n: float | None = 1) -> Any:
        heartbeat()
        return super().update(n)


def fetch(hub_id: str, revision: str, files: list[str]) -> Path:
    """Return the snapshot of a hub repository in the hub's cache; only missing files are fetched."""
    before = current.activity
    set_activity(f"fetching {hub_id}")
    try:
        wanted = {"revision": revision, "allow_patterns": files}
        snapshot = Path(snapshot_download(hub_id, **wanted, tqdm_class=_Arrived))
        set_activity(before)
        return snapshot
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:
        why = _why_not(error, hub_id, revision, files)
        raise ConfigError(f"{hub_id}: no such folder here, and {why}") from None


def bytes_to_fetch(hub_id: str, revision: str) -> int | None:
    """Return the size of the files of a hub repository that are not in the cache; None if offline."""
    try:
        patterns = CONFIG_FILES + WEIGHT_FILES
        files = snapshot_download(hub_id, revision=revision, allow_patterns=patterns, dry_run=True)
    except (errors.HTTPError, OSError):
        return None
    return sum(file.file_size or 0 for file in files if file.will_download)


def fetch_elsewhere(hub_id: str, revision: str, weights: bool) -> str:
    """Return the remedy for a machine without network: the command, where to run it, where its files go."""
    patterns = ["*.json", "*.safetensors", "*spiece.model", "README.md"] if weights else ["*.json"]
    wanted = [word for pattern in patterns for word in ("--include", pattern)]
    command = ["hf", "download", hub_id, "--revision", revision, *wanted, "--cache-dir", "hub"]
    enough = "" if weights else " (the JSON files are enough for plan and dry runs)"
    return (
        f"Where there is a network, run: {shlex.join(command)}{enough}; then copy what is in the folder "
        f"hub/ into {constants.HF_HUB_CACHE} of this machine."
    )


def _why_not(error: Exception, hub_id: str, revision: str, files: list[str]) -> str:
    """Return the hub's reason, and the remedy."""
    endpoint = constants.ENDPOINT
    if isinstance(error, errors.LocalEntryNotFoundError):
        offline = "this machine is offline (HF_HUB_OFFLINE)"
        cause = offline if constants.HF_HUB_OFFLINE else f"{endpoint} cannot be reached"
        lacking = f"revision `{revision}` of that hub id is not in {constants.HF_HUB_CACHE}"
        elsewhere = fetch_elsewhere(hub_id, revision, weights=files != CONFIG_FILES)
        return f"{lacking}, and {cause}. {elsewhere}"
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    remedy = f"Fix its name or revision. For a private or gated one accept its terms at {endpoint}/{hub_id}"
    return f"the hub refuses it: {reason}. {remedy}, and put a token into HF_TOKEN."
