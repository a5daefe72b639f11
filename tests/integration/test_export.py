"""The output of a run works without this package."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from PIL import Image
from ranks import edit_json, wandistiller
from safetensors.torch import load_file
from slow_cases import slow_but
from tensors import tensor_bytes

from wandistiller.checkpoint.safetensors_stream import checksum
from wandistiller.cli.main import main
from wandistiller.export.formats.diffusers import DiffusersFormat
from wandistiller.export.source import read_source
from wandistiller.network import network
from wandistiller.network.names import set_parameter
from wandistiller.utils.files import read_json


def test_output_folder_holds_what_is_promised_and_its_recipe_can_be_passed_back_in(finished: Path) -> None:
    resolved = ("run", "student_deepspeed", "teacher_deepspeed", "student", "machine")
    promised = [f"resolved/{name}.json" for name in resolved]
    promised += ["metrics.jsonl", "checkpoints/latest", "samples/step_00000002.png", "student/README.md"]
    assert [name for name in promised if not (finished / name).is_file()] == []
    assert (finished / "checkpoints" / "latest").read_text().strip() == "step_00000004"
    # every sample prompt, in two rows
    assert Image.open(finished / "samples" / "step_00000002.png").width == 7 * 13 + 3 * (128 + 6)
    done = wandistiller("train", "--recipe", finished / "resolved" / "run.json", "--dry_run", ranks=2)
    assert "dry run: nothing was loaded or written" in done.stderr


def test_the_export_is_stored_as_diffusers_would_load_it_in_bfloat16(finished: Path) -> None:
    folder = finished / "student" / "transformer"
    stored = load_file(folder / "diffusion_pytorch_model.safetensors")
    model = WanTransformer3DModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert {n: t.dtype for n, t in stored.items()} == {n: p.dtype for n, p in model.named_parameters()}
    assert {t.dtype for t in stored.values()} == {torch.bfloat16, torch.float32}


def test_an_export_into_a_checkpoint_is_refused(finished: Path, capsys: pytest.CaptureFixture) -> None:
    inside = max((finished / "checkpoints").glob("step_*")) / "export"
    assert main(["export", "--checkpoint", str(finished), "--output", str(inside)]) == 2
    assert "which lies in `checkpoint`" in capsys.readouterr().err and not inside.exists()


def test_a_network_is_only_there_in_the_precision_it_is_written_in(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, before, number = [], tensor_bytes(), itertools.count()

    def watched(*arguments: Any) -> None:
        set_parameter(*arguments)
        if next(number) % 20 == 0:  # to count takes half a second
            held.append(tensor_bytes() - before)

    monkeypatch.setattr(network, "set_parameter", watched)
    DiffusersFormat().write(read_source(finished), tmp_path / "student")
    weights = load_file(finished / "student" / "transformer" / "diffusion_pytorch_model.safetensors").values()
    largest = 4 * max(w.numel() for w in weights)  # one weight as it is read
    assert max(held) <= sum(w.nbytes for w in weights) + largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_file_of_a_checkpoint_stays_mapped_when_a_network_has_been_read(
    finished: Path, dtype: torch.dtype
) -> None:
    _, model = next(read_source(finished).networks(dtype))
    assert str(finished.resolve() / "checkpoints") not in Path("/proc/self/maps").read_text()
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_an_export_says_the_steps_of_its_checkpoint_not_those_of_the_whole_run(
    finished: Path, copy_of: Callable[..., Path]
) -> None:
    checkpoint = copy_of(finished / "checkpoints" / "step_00000002", weights=True)
    state = checkpoint / "run_state.json"
    edit_json(state, facts=read_json(state)["facts"] | {"max_steps": 700})
    files = read_json(checkpoint / "manifest.json")["files"]
    edit_json(checkpoint / "manifest.json", files=files | {state.name: checksum(state)._asdict()})
    assert read_source(checkpoint).published.max_steps == 2


@pytest.fixture(params=slow_but([0o077], [0o022, 0o077]), ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def wrong_modes(folder: Path, umask: int) -> list[str]:
    """All in a folder whose mode is not the umask's, except hard links to a teacher's files."""
    found = []
    for path in folder.rglob("*"):
        about, wanted = path.lstat(), (0o777 if path.is_dir() else 0o666) & ~umask
        if about.st_mode & 0o777 != wanted and (path.is_dir() or about.st_nlink == 1):
            found.append(f"{path.relative_to(folder)} {about.st_mode & 0o777:o}")
    return found


FORMS = [
    "out/student",
    "out/w.safetensors --format original",
    "out/w8.safetensors --format original --dtype float8_e4m3fn",
]


@pytest.mark.usefixtures("quiet_logging")
def test_every_exported_file_has_the_mode_of_the_umask_and_names_no_place_on_the_machine(
    finished: Path, tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for form in FORMS:
        assert main(["export", "--checkpoint", str(finished), "--output", *form.split()]) == 0
    assert wrong_modes(tmp_path, umask) == []
    places = [str(finished.parent), str(finished.parent.parent), str(tmp_path)]
    texts = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(texts) > 15
    assert [str(path) for path, text in texts.items() for place in places if place.encode() in text] == []
    # what others may not read in the teacher's folder is a copy, which they may
    assert all((path.stat().st_mode & 0o444) == 0o444 & ~umask for path in texts if path.stat().st_nlink == 1)


def test_every_file_of_a_run_has_the_mode_of_the_umask(finished: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert wrong_modes(finished, umask) == []
