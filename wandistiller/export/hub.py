"""Upload of an export to the Hugging Face hub."""

import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from wandistiller.utils.errors import ConfigError

NETWORK = ("httpx", "httpcore")
"""Libraries whose errors come from the network (huggingface_hub 1 raises them, under changing names)."""
WEIGHTS_FILE = re.compile(r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?$")
"""End of the name of a file of weights: whole, a shard, or the index of shards."""
LOGIN = (
    "Set HF_TOKEN to a token that may write there (https://huggingface.co/settings/tokens), "
    "or run `hf auth login`."
)


def check(repository: str) -> str:
    """Check a repository's name and the token before anything is exported; return the name with its owner.

    Raises:
        ConfigError: the name is invalid, there is no token, or the hub refuses it or cannot be reached.
    """
    with _hub_errors(repository, "Nothing was exported", "give the same command again"):
        validate_repo_id(repository)
        if not get_token():
            raise ConfigError(f"--push_to_hub {repository}: there is no token for the hub. {LOGIN}")
        owner = HfApi().whoami()["name"]
    return repository if "/" in repository else f"{owner}/{repository}"


def push(exported: list[Path], repository: str, private: bool) -> str:
    """Upload files and the contents of folders to a model repository, made if missing; return its address.

    Weights of the same name that an earlier push left there in other shards are deleted: loaders prefer an
    index to the one file beside it.

    Raises:
        ConfigError: the hub refuses, or cannot be reached. The export stays on the disk.
    """
    files = {file.name: file for file in exported if file.is_file()}
    for folder in filter(Path.is_dir, exported):
        inside = filter(Path.is_file, sorted(folder.rglob("*")))
        files = {str(file.relative_to(folder)): file for file in inside} | files
    api, options = HfApi(), " --private" * private
    by_hand = " and ".join(f"`hf upload{options} {repository} {shlex.quote(str(path))}`" for path in exported)
    where = ", ".join(map(str, exported))
    with _hub_errors(repository, f"The export is in {where}", f"{by_hand} uploads it as it is"):
        address = api.create_repo(repository, private=private, exist_ok=True)
        stale = outdated(api.list_repo_files(repository), files)
        parts = [CommitOperationAdd(name, file) for name, file in files.items()]
        deleted = [CommitOperationDelete(name) for name in stale]
        api.create_commit(repository, parts + deleted, commit_message="A student distilled with wandistiller")
    return str(address)


def outdated(there: Iterable[str], pushed: Iterable[str]) -> list[str]:
    """List the files of weights in a repository that others of the same weights replace, by their names."""
    new = set(pushed)
    stems = {WEIGHTS_FILE.sub("", name) for name in new if WEIGHTS_FILE.search(name)}
    return [n for n in there if WEIGHTS_FILE.search(n) and n not in new and WEIGHTS_FILE.sub("", n) in stems]


@contextmanager
def _hub_errors(repository: str, state: str, then: str) -> Iterator[None]:
    """Raise errors of the hub and the network as wrong input, with the export's `state` and the next step."""
    where = f"--push_to_hub {repository}:"
    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"{where} {error}") from None
    except HfHubHTTPError as error:
        reason = error.server_message or str(error).strip().partition("\n")[0]
        raise ConfigError(f"{where} the hub refuses: {reason}. {LOGIN} {state}; then {then}.") from None
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith(NETWORK):
            raise
        raise ConfigError(
            f"{where} {type(error).__name__}: {error}. {state}; once the hub can be reached, {then}."
        ) from None
