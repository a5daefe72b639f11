"""A run's data: one shape a step, the same on any number of ranks, only used samples, none corrupt."""

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_ranks.data import digest_of, samples_by_step
from PIL import Image
from ranks import call, wandistiller, write_json
from recipes import recipe
from safetensors import safe_open
from slow_cases import slow_but

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.data.cached_dataset import AllSamples, SampleSelection
from wandistiller.data.dataset import MediaType, PromptDataset
from wandistiller.data.media import Size
from wandistiller.training.prepare import prepare
from wandistiller.utils.errors import ConfigError

BUCKETS = [[32, 32], [32, 64], [64, 32]]
SHAPES = [(40, 40), (30, 80), (90, 30), (200, 201), (50, 100)]  # height and width of the media, in turn
LATENT = {(32, 32): [16, 1, 4, 4], (32, 64): [16, 1, 4, 8], (64, 32): [16, 1, 8, 4]}


def write_media(folder: Path, number: int, corrupt: tuple[int, ...] = ()) -> None:
    """`data.jsonl` with images of SHAPES in turn, and two prompts without media."""
    folder.mkdir(parents=True, exist_ok=True)
    random, lines = np.random.default_rng(0), []
    for i in range(number):
        file = folder / f"{i}.png"
        Image.fromarray(random.integers(0, 256, (*SHAPES[i % len(SHAPES)], 3), dtype=np.uint8)).save(file)
        if i in corrupt:
            file.write_bytes(file.read_bytes()[:100])
        lines.append({"prompt": f"a red circle {i}", "image": file.name})
    lines += [{"prompt": "a blue square"}, {"prompt": "a green circle"}]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))


def a_run(folder: Path, wan: Path, name: str = "out", **more: Any) -> dict[str, Any]:
    """A recipe for the media in `folder`, with a cache of its own."""
    own = {
        "data_path": str(folder / "data.jsonl"),
        "output_dir": str(folder / name),
        "cache_dir": str(folder / f"{name}_cache"),
        "max_steps": 5,
        "buckets": BUCKETS,
    }
    return recipe(folder, wan, **(own | more))


def skipped(folder: Path, name: str = "out") -> list[dict[str, str]]:
    file = folder / name / "skipped.json"
    return json.loads(file.read_text()) if file.exists() else []


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten images, of which numbers 1, 3 and 6 cannot be read. Do not write into it."""
    folder = tmp_path_factory.mktemp("media")
    write_media(folder, 10, corrupt=(1, 3, 6))
    return folder


@pytest.fixture(scope="module")
def on_one_rank(media: Path, wan1: Path, one_rank: object) -> list:
    return samples_by_step(a_run(media, wan1, "one"))


def test_each_medium_is_cut_to_the_bucket_of_its_shape_and_a_step_has_one_shape(on_one_rank: list) -> None:
    expected = [(32, 32), (32, 64), (64, 32), (32, 32), (32, 64)]
    for number, shape, _ in (sample for step in on_one_rank for sample in step):
        assert shape == LATENT[expected[number % 5] if number < 10 else (32, 32)]
    shapes = [{tuple(shape) for _, shape, _ in step} for step in on_one_rank]
    assert all(len(s) == 1 for s in shapes) and set.union(*shapes) == set(map(tuple, LATENT.values()))


def test_unreadable_media_are_listed_and_replaced_by_others(media: Path, on_one_rank: list) -> None:
    assert [Path(entry["file"]).name for entry in skipped(media, "one")] == ["1.png", "3.png", "6.png"]
    assert all("cannot be read" in entry["reason"] for entry in skipped(media, "one"))
    assert not {1, 3, 6} & {number for step in on_one_rank for number, _, _ in step}


def test_two_ranks_have_bitwise_the_samples_of_one(media: Path, wan1: Path, on_one_rank: list) -> None:
    assert call(samples_by_step, a_run(media, wan1, "two"), ranks=2) == [on_one_rank] * 2
    assert skipped(media, "two") == skipped(media, "one")


def test_examples_have_one_shape_come_around_and_are_samples_of_the_run(
    media: Path, wan1: Path, on_one_rank: list
) -> None:
    data, _, _ = prepare(read_job(RunConfig(**a_run(media, wan1, "one")), 1))
    x0_BCFHW, given = data.examples(list(range(300)))
    text_BLD = given.text_BLD
    used = {sample[2] for step in on_one_rank for sample in step}
    digests = [digest_of(x0[None], text[None]) for x0, text in zip(x0_BCFHW, text_BLD, strict=True)]
    assert len(x0_BCFHW) == 300 and set(digests) <= used and 1 < len(set(digests)) < 10
    assert digests[: len(set(digests))] == digests[len(set(digests)) : 2 * len(set(digests))]


@pytest.mark.usefixtures("one_rank")
def test_a_longer_run_begins_as_the_shorter_one_and_makes_only_new_samples(
    tmp_path: Path, media: Path, wan1: Path
) -> None:
    shutil.copytree(media, tmp_path / "media")
    longer = a_run(tmp_path / "media", wan1, max_steps=4)
    first = samples_by_step(longer | {"max_steps": 2})
    files = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*.safetensors")}
    assert samples_by_step(longer)[:2] == first
    assert files == {f: f.stat().st_mtime_ns for f in files}


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_a_repaired_file_is_used_again_and_all_else_stays(tmp_path: Path, wan1: Path) -> None:
    write_media(tmp_path, 10, corrupt=(3,))
    broken = samples_by_step(a_run(tmp_path, wan1))
    assert len(skipped(tmp_path)) == 1
    write_media(tmp_path, 10)
    repaired = samples_by_step(a_run(tmp_path, wan1))
    assert skipped(tmp_path) == []
    pairs = zip(sum(broken, []), sum(repaired, []), strict=True)
    changed = [(before[0], after[0]) for before, after in pairs if before != after]
    assert changed and all(after == 3 != before for before, after in changed)


@pytest.mark.parametrize("ranks", slow_but([1], [1, 2]))
def test_strict_stops_with_the_files_named(media: Path, wan1: Path, tmp_path: Path, ranks: int) -> None:
    file = write_json(tmp_path / "strict.json", a_run(media, wan1, f"strict{ranks}", strict=True))
    done = wandistiller("prepare", "--recipe", file, ranks=ranks, code=2)
    assert [f"{i}.png: cannot be read" in done.stderr for i in range(10)] == [
        i in (1, 3, 6) for i in range(10)
    ]
    assert done.stderr.count("`strict` is true") == 1
    assert not list((media / f"strict{ranks}_cache").rglob("text"))  # no prompt was encoded before


@pytest.mark.usefixtures("one_rank")
def test_data_without_a_readable_medium_is_an_error(tmp_path: Path, wan1: Path) -> None:
    (tmp_path / "media").mkdir()
    for i in range(3):
        (tmp_path / "media" / f"{i}.png").write_bytes(b"no image")
        (tmp_path / "media" / f"{i}.txt").write_text("a cat")
    with pytest.raises(ConfigError) as raised:
        samples_by_step(a_run(tmp_path, wan1, data_path=str(tmp_path / "media")))
    assert str(raised.value).startswith("None of the images and videos can be used.")
    assert [f"{i}.png: cannot be read: " in str(raised.value) for i in range(4)] == [True] * 3 + [False]
    assert len(skipped(tmp_path)) == 3 and "skipped.json" in str(raised.value)


@pytest.mark.usefixtures("one_rank")
def test_only_the_samples_of_the_run_s_steps_are_encoded(tmp_path: Path, wan1: Path) -> None:
    prompts = [f"a red circle {i}" for i in range(5000)]
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    steps = samples_by_step(a_run(tmp_path, wan1, data_path=str(tmp_path / "p.txt"), max_steps=2))
    used = {number for step in steps for number, _, _ in step}
    stored: dict[str, set[str]] = {"text": set(), "latents": set()}
    for part, names in stored.items():
        for file in (tmp_path / "out_cache" / part).rglob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                names |= {about for key, about in opened.metadata().items() if not key.startswith("crc32 ")}
    assert stored["latents"] == {prompts[n] for n in used} and len(used) == 16
    assert stored["text"] - stored["latents"] == {"a red circle", ""}


@pytest.mark.usefixtures("one_rank")
def test_the_teacher_samples_only_for_the_updates_that_read_its_samples(tmp_path: Path, wan1: Path) -> None:
    """Of each step's three updates the student's, the third."""
    prompts = [f"a red circle {i}" for i in range(5000)]
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    dmd2 = {"name": "dmd2", "sampler": "renoise", "critic_updates": 2}
    given = a_run(tmp_path, wan1, data_path=str(tmp_path / "p.txt"), max_steps=2)
    run = read_job(RunConfig(**given | {"objective": [dmd2, {"name": "consistency"}], "buckets": None}), 1)
    data, _, _ = prepare(run)
    of_student = [update * 8 + slot for update in (2, 5) for slot in range(8)]
    names = set()
    for file in (tmp_path / "out_cache" / "latents").rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= {about for key, about in opened.metadata().items() if not key.startswith("crc32 ")}
    assert names == {data.item_at(i).prompt for i in of_student} and len(names) == 16
    assert data.x0(of_student[:8]).shape == data.examples(list(range(8)))[0].shape


def selection(kinds: list[MediaType], sizes: list[int], steps: int = 50) -> SampleSelection:
    """Of items with media in groups by `sizes`."""
    items = PromptDataset(lambda row: None, kinds, range(len(kinds)))
    samples = AllSamples(items, 1, [Size(s, s, 1) for s in range(max(sizes) + 1)], np.array(sizes))
    return SampleSelection(samples, seed=0, global_batch=4, steps=steps)


@pytest.mark.parametrize(("bad", "others"), [([7, 8], (6, 9)), ([10, 11], range(6))])
def test_a_stand_in_has_the_size_of_what_it_replaces_or_is_of_the_largest_group(
    bad: list[int], others: Collection[int]
) -> None:
    chosen = selection([MediaType.IMAGE] * 12, [0] * 6 + [1] * 4 + [2] * 2)
    before = [chosen.number_at(i) for i in range(200)]
    chosen.replace(bad)
    for was, now in zip(before, map(chosen.number_at, range(200)), strict=True):
        assert now in others if was in bad else now == was
    assert sorted(chosen.used()) == [i for i in range(12) if i not in bad]


def test_an_unusable_stand_in_is_replaced_too() -> None:
    chosen = selection([MediaType.IMAGE] * 100, [0] * 100, steps=1)
    bad, new = set(chosen.numbers[:2]), chosen.numbers[:2]
    for _ in range(3):
        new = chosen.replace(new)
        assert len(new) == 2 and not bad & set(new)
        assert set(new) <= {chosen.number_at(i) for i in range(4)}
        bad |= set(new)
