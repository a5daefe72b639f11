"""A teacher by its hub id: files fetched, revisions, offline machines, messages of refusals."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from published_wan import COMMIT, hub_cache, hub_of
from ranks import run, write_json
from recipes import recipe
from small_wan import FORMS, make_wan

from wandistiller.cli.main import main
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.logging import current, set_activity
from wandistiller.wan import hub
from wandistiller.wan.folder import WanFolder
from wandistiller.wan.pipeline import open_wan

ID = "org/wan"
NEEDED_FIRST = {
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "transformer/config.json",
    "vae/config.json",
    "tokenizer/tokenizer_config.json",
    "README.md",
}
NOT_NEEDED = (
    "Wan2.1_VAE.pth",
    "assets/cat.mp4",
    "text_encoder/pytorch_model.bin",
    "transformer/diffusion_pytorch_model.fp16.safetensors",
    "transformer/diffusion_pytorch_model-00001-of-00002.fp16.safetensors",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pipeline in sharded files. Do not write into it."""
    folder = make_wan(tmp_path_factory.mktemp("hub") / "wan", **FORMS["Wan2.1-14B"])
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Wan\n")
    return folder


@pytest.fixture(scope="module")
def online(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What is found by `seen` in a fresh cache; `downloads`: (file, token) fetched."""
    folder = tmp_path_factory.mktemp("online")
    for file in (*whole.rglob("*"), *(whole / name for name in NOT_NEEDED)):
        if not file.is_dir():
            target = folder / "root" / file.relative_to(whole)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes() if file.exists() else b"not needed")
    with hub_of(folder / "root") as (address, downloads), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_mine")
        files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        settings = {"HF_HUB_OFFLINE": False, "ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": files}
        for name, value in (settings | {"HF_HUB_CACHE": str(folder / "cache")}).items():
            patch.setattr(constants, name, value)
        return seen(patch) | {"downloads": downloads}


def seen(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Open, then require, a pipeline of a hub; return files, bytes to fetch and refusals."""
    download, activities = hub.snapshot_download, []

    def watched(*args: Any, **kwargs: Any) -> str:
        activities.append(current.activity)
        begins = current.heartbeats
        try:
            return download(*args, **kwargs)
        finally:
            activities.append(current.heartbeats - begins)

    def files() -> list[str]:
        return sorted(str(f.relative_to(folder.path)) for f in folder.path.rglob("*") if f.is_file())

    def problems(name: str, revision: str | None = None) -> list[str]:
        return problems_of(lambda: open_wan(name, revision=revision))

    patch.setattr(hub, "snapshot_download", watched)
    set_activity("starting")
    folder = open_wan(ID, revision="v1")
    found = {"revision": folder.revision, "opened": files()}
    found["to_fetch"] = hub.bytes_to_fetch(ID, folder.revision)
    folder.require_weights()
    found["activities"] = activities[2:], current.activity
    found["then_to_fetch"] = hub.bytes_to_fetch(ID, folder.revision)
    found["required"] = files()
    found |= {name: problems(name) for name in ("org/gated", "org/none")}
    return found | {"nosuch": problems(ID, "nosuch")}


def test_opening_a_hub_id_fetches_only_the_card_and_the_json_files_that_are_read(online: dict) -> None:
    assert set(online["opened"]) == NEEDED_FIRST and online["revision"] == COMMIT


def test_weights_are_fetched_when_they_are_required_and_nothing_else_ever(online: dict, whole: Path) -> None:
    assert set(online["required"]) == {str(f.relative_to(whole)) for f in whole.rglob("*") if f.is_file()}
    assert sorted(name for name, _ in online["downloads"]) == online["required"]


def test_what_a_dry_run_says_will_be_fetched_is_what_is_fetched_then(online: dict, whole: Path) -> None:
    fetched_later = set(online["required"]) - set(online["opened"])
    assert online["to_fetch"] == sum((whole / name).stat().st_size for name in fetched_later)
    assert online["then_to_fetch"] == 0


@pytest.mark.slow
def test_a_plan_says_what_a_hub_id_fetches_and_a_dry_run_refuses_a_disk_without_room_for_it(
    whole: Path, tmp_path: Path
) -> None:
    root = shutil.copytree(whole, tmp_path / "root")
    with next((root / "transformer").glob("*.safetensors")).open("r+b") as file:
        file.truncate(10**13)  # sparse
    recipe_file = write_json(tmp_path / "r.json", recipe(tmp_path, Path(ID), output_dir=str(tmp_path / "o")))
    with hub_of(root) as (address, _):
        env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path / "cache")}
        words = [sys.executable, "-m", "wandistiller"]
        planned = run([*words, "plan", "--recipe", str(recipe_file)], **env).stderr
        err = run([*words, "train", "--recipe", str(recipe_file), "--dry_run"], code=2, **env).stderr
    assert all(f"fetch     9313.2 GiB of {ID} into " in text for text in (planned, err))
    assert "error: The teacher from the hub, and what the run writes to the same disk, take 9313.2" in err


def test_what_arrives_of_a_download_is_progress_to_the_watchdog(online: dict) -> None:
    (_, _, name, beats), after = online["activities"]
    assert name == "fetching org/wan" and after == "starting"
    assert beats >= len(set(online["required"]) - set(online["opened"]))


def test_the_token_of_the_environment_is_sent(online: dict) -> None:
    assert {token for _, token in online["downloads"]} == {"Bearer hf_mine"}


@pytest.mark.parametrize(("key", "code"), [("org/gated", 403), ("org/none", 404), ("nosuch", 404)])
def test_a_refusal_of_the_hub_is_told_in_its_words_with_a_remedy(online: dict, key: str, code: int) -> None:
    (problem,) = online[key]
    name = ID if key == "nosuch" else key
    assert problem.startswith(f"{name}: no such folder here, and the hub refuses it: {code} Client Error.")


@pytest.fixture
def cached(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub cache of this offline process, with that pipeline as org/wan, branch main and tag v1."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return hub_cache(tmp_path / "hub", ID, whole, "main", "v1")


def snapshot(cached: Path) -> Path:
    return cached / "models--org--wan" / "snapshots" / COMMIT


@pytest.mark.parametrize("revision", [None, "main", "v1", COMMIT])
def test_an_offline_cache_serves_branch_tag_and_commit(cached: Path, revision: str | None) -> None:
    folder = open_wan(ID, weights=True, revision=revision)
    folder.require_weights()
    assert (folder.path, folder.name, folder.revision) == (snapshot(cached), ID, COMMIT)


def test_a_hub_id_without_a_card_opens(cached: Path) -> None:
    (snapshot(cached) / "README.md").unlink()
    assert open_wan(ID).revision == COMMIT


def test_a_branch_that_moves_on_changes_nothing_for_what_was_opened(cached: Path) -> None:
    folder: WanFolder = open_wan(ID)
    (cached / "models--org--wan" / "refs" / "main").write_text("f" * 40)  # a commit that is not here
    folder.require_weights()  # an unpinned branch would need the commit that is not here
    assert (folder.path, folder.revision) == (snapshot(cached), COMMIT)


def problems_of(act: Callable[[], object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        act()
    return caught.value.problems


@pytest.mark.parametrize(("name", "revision"), [(ID, "v2"), ("org/other", None), (ID, "f" * 40)])
def test_what_an_offline_cache_lacks_is_named(cached: Path, name: str, revision: str | None) -> None:
    (problem,) = problems_of(lambda: open_wan(name, revision=revision))
    assert problem.startswith(
        f"{name}: no such folder here, and revision `{revision or 'main'}` of that hub id"
    )
    assert f"run: hf download {name} --revision {revision or 'main'} --include '*.json' " in problem


def test_weights_that_an_offline_cache_lacks_are_named_by_their_part(cached: Path) -> None:
    for file in (snapshot(cached) / "vae").glob("*.safetensors"):
        file.unlink()
    (problem,) = problems_of(lambda: open_wan(ID).require_weights())
    assert problem.startswith(
        f"{ID}: no .safetensors file in vae/. It is not in {cached}, and this machine is off"
    )
    assert (
        f"run: hf download {ID} --revision {COMMIT} --include '*.json' --include '*.safetensors' " in problem
    )


def test_a_hub_that_cannot_be_reached_is_named(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens on the discard port
    assert open_wan(ID).revision == COMMIT  # the cache serves
    (problem,) = problems_of(lambda: open_wan(ID, revision="v2"))
    assert f"`v2` of that hub id is not in {cached}, and http://127.0.0.1:9 cannot be reached." in problem


def test_a_folder_has_no_revision(whole: Path) -> None:
    assert problems_of(lambda: open_wan(str(whole), revision="v1")) == [
        f'{whole}: `teacher_revision` is "v1". Only a hub id has revisions; leave it out.'
    ]


@pytest.mark.parametrize(("revision", "code"), [("v1", 0), ("v2", 2)])
@pytest.mark.usefixtures("one_rank", "cached")
def test_the_command_line_takes_a_hub_id_and_its_revision(
    tmp_path: Path, revision: str, code: int, capsys: pytest.CaptureFixture
) -> None:
    file = write_json(tmp_path / "r.json", recipe(tmp_path, Path(ID), output_dir=str(tmp_path / "out")))
    assert main(f"train --recipe {file} --teacher_revision {revision} --dry_run".split()) == code
    assert (f"error: {ID}: " in capsys.readouterr().err) is (code == 2)
