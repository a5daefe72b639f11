"""Puts an export on the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wandistiller.problems import ConfigError

NETWORK = ("httpx", "httpcore")
"""Libraries whose errors are of the network (huggingface_hub 1 uses them, under changing names)."""
LOGIN = "Set HF_TOKEN to a token that may write there (https://huggingface.co/settings/tokens), or run `hf auth login`."


def check(repository: str) -> str:
    """Make sure of a repository's name and of the token, before anything is made for it; gives its name with the owner's.

    Raises:
        ConfigError: it can be no name, there is no token, or the hub refuses it or cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import validate_repo_id

    with _refusals(repository, "Nothing was exported", "give the same command again"):
        validate_repo_id(repository)
        if not get_token():
            raise ConfigError(f"--push_to_hub {repository}: there is no token for the hub. {LOGIN}")
        owner = HfApi().whoami()["name"]
    return repository if "/" in repository else f"{owner}/{repository}"


def push(made: list[Path], repository: str, private: bool) -> str:
    """Upload a folder's files, or files, to a model repository, which is made if it is not there; gives its address.

    Raises:
        ConfigError: the hub refuses, or cannot be reached. What was exported stays on the disk.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    files = {str(f.relative_to(top)): f for top in made if top.is_dir() for f in sorted(top.rglob("*")) if f.is_file()}
    files |= {file.name: file for file in made if file.is_file()}
    api = HfApi()
    by_hand = " and ".join(f"`hf upload{' --private' * private} {repository} {path}`" for path in made)
    with _refusals(repository, f"The export is in {', '.join(map(str, made))}", f"{by_hand} uploads it as it is"):
        address = api.create_repo(repository, private=private, exist_ok=True)
        parts = [CommitOperationAdd(name, file) for name, file in files.items()]
        api.create_commit(repository, parts, commit_message="A student distilled with wandistiller")
    return str(address)


@contextmanager
def _refusals(repository: str, state: str, then: str) -> Iterator[None]:
    """What the hub refuses is wrong input; with what there is now, and what to do `then`."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"--push_to_hub {repository}: {error}") from None
    except HfHubHTTPError as error:
        said = error.server_message or str(error).strip().partition("\n")[0]
        raise ConfigError(f"--push_to_hub {repository}: the hub refuses: {said}. {LOGIN} {state}; then {then}.") from None
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith(NETWORK):
            raise
        raise ConfigError(f"--push_to_hub {repository}: {type(error).__name__}: {error}. {state}; once the hub can be reached, "
                          f"{then}.") from None
