"""Wrong input that only a run meets (skipped media, non-finite weights); odd input that must work."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpointed import exported
from PIL import Image
from ranks import wandistiller
from recipes import recipe
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from wrong_input.cases import ENGINE, JSONS, RECIPE, SOUND, Case, Outcome, faults, outcome
from wrong_input.weights import TRANSFORMER, WEIGHTS, linked

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.training.prepare import prepare
from wandistiller.utils.errors import ConfigError

SIDE = 32


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def spoilt_media(folder: Path) -> dict[str, str]:
    """Media that cannot be used: name -> a part of the reason."""
    noise(SIDE, SIDE).save(folder / "cut.png")
    halved(folder / "cut.png")
    (folder / "page.jpg").write_text("<!DOCTYPE html><html></html>")
    (folder / "noise.mp4").write_bytes(os.urandom(5000))
    (folder / "gone.png").symlink_to(folder / "none.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    noise(1, 1).save(folder / "dot.png")
    noise(20_000, 1).save(folder / "line.png")
    frames = {"save_all": True, "append_images": [Image.new("RGB", (SIDE, SIDE))], "duration": 100}
    noise(SIDE, SIDE).save(folder / "moves.webp", **frames)
    unread = ("cut.png", "page.jpg", "noise.mp4", "gone.png", "loop.png")
    reasons = dict.fromkeys(unread, "cannot be read: ") | {"moves.webp": "is animated; save one picture"}
    return reasons | dict.fromkeys(("dot.png", "line.png"), " pixels, under 1/16 of the run's 32 x 32")


def usable_media(folder: Path) -> list[str]:
    noise(SIDE, SIDE).save(folder / "ok.png")
    noise(SIDE, SIDE).save(folder / "a png.jpg", format="PNG")
    noise(20_000, 40).save(folder / "wide.png")
    frames = {"save_all": True, "append_images": [noise(SIDE, SIDE)], "duration": 100}
    noise(SIDE, SIDE).save(folder / "moves.gif", **frames)
    return ["ok.png", "a png.jpg", "wide.png", "moves.gif"]


def a_run(tmp_path: Path, wan: Path, **more: object) -> RunConfig:
    usual = {"output_dir": str(tmp_path / "out"), "num_epochs": 1, "max_steps": None, "sample_prompts": ["a"]}
    usual |= {"deepspeed_config": ENGINE, "teacher_deepspeed_config": {"zero_optimization": {"stage": 0}}}
    return RunConfig(**recipe(tmp_path, wan, **usual | more))


@pytest.mark.usefixtures("one_rank")
def test_media_that_cannot_be_used_are_listed_with_the_reason(tmp_path: Path, wan1: Path) -> None:
    (folder := tmp_path / "media").mkdir()
    reasons = spoilt_media(folder)
    for name in [*reasons, *usable_media(folder)]:
        (folder / name).with_suffix(".txt").write_text("a red circle")
    prepare(read_job(a_run(tmp_path, wan1, data_path=str(folder)), 1))
    entries = json.loads((tmp_path / "out" / "skipped.json").read_text())
    assert {entry["prompt"] for entry in entries} == {"a red circle"}
    listed = {entry["file"]: entry["reason"] for entry in entries}
    assert listed.keys() == {str(folder / name) for name in reasons}
    assert {name: text for name, text in reasons.items() if text not in listed[str(folder / name)]} == {}


@pytest.mark.usefixtures("one_rank")
def test_files_that_are_not_used_are_named_and_their_captions_are_no_sample_prompts(
    tmp_path: Path, wan1: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("bad.png", "good.png", "raw.psd"):
        noise(SIDE, SIDE).save(folder / name, "PNG")
        (folder / name).with_suffix(".txt").write_text(f"a {name}")
    halved(folder / "bad.png")
    given = {"data_path": str(folder), "sample_prompts": None}
    data, *_ = prepare(read_job(a_run(tmp_path, wan1, **given), 1))
    entries = json.loads((tmp_path / "out" / "skipped.json").read_text())
    assert [(Path(e["file"]).name, e["prompt"]) for e in entries] == [
        ("bad.png", "a bad.png"),
        ("raw.psd", ""),
    ]
    assert [item.prompt for item in data.sample_items] == ["a good.png"]
    with pytest.raises(ConfigError, match=r"`strict` is true, and 1 file.*raw\.psd"):
        read_job(a_run(tmp_path, wan1, **given, strict=True), 1)


def unfinite(number: float) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        state = load_file(file)
        name = max(state, key=lambda key: state[key].numel())
        state[name].view(-1)[-1 if file.parent.name != "text_encoder" else slice(None)] = number
        save_file(state, file)

    return spoil


def zeroed(file: Path) -> None:
    """Leave a hole in a file, as an unfinished download does: its largest tensor, or all of a teacher."""
    state = load_file(file)
    names = state if file.parent.name == "transformer" else [max(state, key=lambda key: state[key].numel())]
    save_file(state | {name: torch.zeros_like(state[name]) for name in names}, file)


OF_T = {"teacher_path": "{here}/t"}
IN_FILE = "t/transformer/...holds numbers that are not finite in float32. Fetch this file again"
NOT_FINITE = "holds numbers that are not finite. Fetch the folder again."
ZEROS = "tensor(s) hold nothing but zeros: `...A download left holes in it"
SPOILT = [  # how, and the case; its name says which part
    (unfinite(math.nan), Case("text encoder", (f"t/text_encoder: tensor `...{NOT_FINITE}",), recipe=OF_T)),
    (unfinite(math.nan), Case("vae", (IN_FILE.replace("transformer", "vae"),), recipe=OF_T)),
    (unfinite(math.inf), Case("student's folder", (IN_FILE,), {"student.json": {"init": "{here}/t"}})),
    (zeroed, Case("transformer", (f"t/transformer: ...{ZEROS}",), recipe=OF_T)),
    (zeroed, Case("text encoder", (f"t/text_encoder: ...{ZEROS}",), recipe=OF_T)),
    (zeroed, Case("vae", (f"t/vae: ...{ZEROS}",), recipe=OF_T)),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("spoil", "case"),
    slow_but(SPOILT[1:4:2], SPOILT),
    ids=lambda value: getattr(value, "name", "not finite"),
)
def test_weights_that_are_not_finite_or_zeros_are_named_before_training(
    spoil: Callable[[Path], None], case: Case, tmp_path: Path, wan1: Path
) -> None:
    here, short = tmp_path / "case", {"height": SIDE, "width": SIDE, "rollout_steps": 1}
    words = replace(case, recipe=case.recipe | short | {"cache_dir": "{here}/../cache"}).write(here, wan1)
    spoil(linked(wan1, here / "t", without=WEIGHTS.get(case.name, TRANSFORMER)))
    found = outcome(words, here)
    wrong = [fault for fault in faults(case, found, here, wan1) if not fault.startswith("wrote")]
    assert wrong == [], found.printed


def dry_run(case: Case, here: Path, wan: Path) -> Outcome:
    return outcome([*case.write(here, wan), "--dry_run"], here)


@pytest.mark.usefixtures("one_rank")
def test_a_byte_order_mark_is_no_fault_in_any_file(tmp_path: Path, wan1: Path) -> None:
    texts = {name: text if isinstance(text, str) else json.dumps(text) for name, text in SOUND.items()}
    small = RECIPE | {"height": SIDE, "width": SIDE}
    texts["recipe.json"] = Case.fill(json.dumps(small), tmp_path / "case", wan1)
    marked = {name: b"\xef\xbb\xbf" + text.encode() for name, text in texts.items()}
    found = dry_run(Case("marked", (), marked), tmp_path / "case", wan1)
    assert (found.code, found.errors) == (0, []), found.printed


NO_WRITE = "`output_dir` is {here}/shut/out, but {here}/shut may not be written to. Change"
SHUT = [("shut", 0o500, NO_WRITE)]
SHUT += [
    (name, 0, f"{{here}}/{name}: cannot be read: Permission denied.") for name in (*JSONS, "prompts.txt")
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize(("name", "mode", "message"), SHUT)
def test_what_may_not_be_read_or_written_to_is_named(
    name: str, mode: int, message: str, tmp_path: Path, wan1: Path
) -> None:
    here, output = tmp_path / "case", "{here}/shut/out" if name == "shut" else "{here}/out"
    case = Case("", (message,), {"shut/x": ""}, {"output_dir": output})
    words = case.write(here, wan1)
    (here / name).chmod(mode)
    assert faults(case, outcome(words, here), here, wan1) == []


@pytest.mark.slow
def test_spaces_and_other_scripts_in_every_path_work(tmp_path: Path, wan1: Path) -> None:
    here = tmp_path / "räume 空白 🎈"
    linked(wan1, here / "мой учитель", without="model_index.json")
    (here / "data 数").mkdir()
    noise(SIDE, SIDE).save(here / "data 数" / "ein Bild ☕.png")
    (here / "data 数" / "ein Bild ☕.txt").write_text("a red circle")
    (here / "data 数" / "more é.txt").write_text("a blue square\n")
    names = {
        "student_config": "Schüler.json",
        "deepspeed_config": "the ⚙.json",
        "teacher_deepspeed_config": "lehrer ß.json",
    }
    values = a_run(tmp_path, wan1)
    for key, name in names.items():
        (here / name).write_text(json.dumps(getattr(values, key)))
    names |= {"teacher_path": "мой учитель", "data_path": "data 数", "output_dir": "out π"}
    names |= {"cache_dir": "ca che", "sample_dir": "bil der"}
    paths = [word for key, name in names.items() for word in (f"--{key}", here / name)]
    sizes = f"--height {SIDE} --width {SIDE} --max_steps 1 --rollout_steps 1 --sample_steps 1"
    wandistiller("train", *paths, *sizes.split(), "--negative_prompt", "", cwd=here)
    assert all(value.isfinite().all() for value in exported(here / "out π").values())
    assert len(list((here / "bil der").glob("*.png"))) == 1
