"""Puts an export on the Hugging Face hub."""

from pathlib import Path

from wandistiller.problems import ConfigError

NETWORK = ("httpx", "httpcore")
"""Libraries whose errors are of the network (huggingface_hub 1 uses them, under changing names)."""
LOGIN = "Set HF_TOKEN to a token that may write there (https://huggingface.co/settings/tokens), or run `hf auth login`."


def push(made: list[Path], repository: str, private: bool) -> str:
    """Upload a folder's files, or files, to a model repository, which is made if it is not there; gives its address.

    Raises:
        ConfigError: the hub refuses, or cannot be reached. What was exported stays on the disk.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    files = {str(f.relative_to(top)): f for top in made if top.is_dir() for f in sorted(top.rglob("*")) if f.is_file()}
    files |= {file.name: file for file in made if file.is_file()}
    api = HfApi()
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        parts = [CommitOperationAdd(name, file) for name, file in files.items()]
        api.create_commit(repository, parts, commit_message="A student distilled with wandistiller")
    except HFValidationError as error:
        raise ConfigError(f"--push_to_hub {repository}: {error}") from None
    except HfHubHTTPError as error:
        said = error.server_message or str(error).strip().partition("\n")[0]
        raise ConfigError(f"--push_to_hub {repository}: the hub refuses: {said}. {LOGIN} The export is in {made[0]}.") from None
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith(NETWORK):
            raise
        raise ConfigError(f"--push_to_hub {repository}: {type(error).__name__}: {error}. The export is in {made[0]}; give the "
                          "same command again once the hub can be reached.") from None
    return str(address)
