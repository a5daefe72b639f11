"""Fetches a teacher from the Hugging Face hub: first the files that describe it, later its weights."""

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from wandistiller.utils.errors import ConfigError
from wandistiller.wan.weight_reader import DIFFUSERS_STEM

CONFIG_FILES = [
    *("model_index.json", "scheduler/*.json", "vae/config.json", "text_encoder/config.json"),
    *("transformer*/config.json", "README.md"),
]
"""The files that `open_wan` reads, and the README for its licence, which is also the student's."""
STEMS = {"text_encoder": "model"} | dict.fromkeys(("transformer", "transformer_2", "vae"), DIFFUSERS_STEM)
WEIGHT_FILES = ["tokenizer/*", "text_encoder/*.json"] + [
    f"{part}/{stem}{end}"
    for part, stem in STEMS.items()
    for end in (".safetensors", "-?????-of-?????.safetensors", ".safetensors.index.json")
]
"""All weights in safetensors: no .bin, .pth, fp16 copies, videos."""


def fetch(hub_id: str, revision: str, files: list[str]) -> Path:
    """Return the snapshot of a hub repository in the hub's cache; only missing files are fetched."""
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=files))
    except (HTTPError, HFValidationError, OSError) as error:
        raise ConfigError(f"{hub_id}: no such folder here, and {_why_not(error, hub_id, revision)}") from None


def _why_not(error: Exception, hub_id: str, revision: str) -> str:
    """The meaning of the hub's error, and the remedy."""
    endpoint = constants.ENDPOINT
    if isinstance(error, LocalEntryNotFoundError):
        offline = "this machine is offline (HF_HUB_OFFLINE)"
        cause = offline if constants.HF_HUB_OFFLINE else f"{endpoint} cannot be reached"
        lacking = f"revision `{revision}` of that hub id is not in {constants.HF_HUB_CACHE}"
        return f"{lacking}, and {cause}. Fetch it elsewhere, or give a folder."
    if isinstance(error, GatedRepoError):
        return (
            f"that hub id is gated. Accept its terms at {endpoint}/{hub_id} and put your token into HF_TOKEN."
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is no such hub id, or it is private. Fix the name, or put a token that may read it into "
            "HF_TOKEN."
        )
    if isinstance(error, RevisionNotFoundError):
        return f"that hub id has no revision `{revision}`. Give one of its branches, tags or commits."
    return f"the hub refused it: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
