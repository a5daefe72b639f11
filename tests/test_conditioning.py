"""Prompts as they are read, cleaned and encoded: diffusers' own pipeline is the reference."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from PIL import Image
from safetensors import safe_open

from wandistiller import conditioning
from wandistiller.conditioning import Encoder, TextCache, homes, text_stamp
from wandistiller.items import Item, clean, read_items
from wandistiller.problems import ConfigError
from wandistiller.wan import TEXT_TOKENS

NASTY = (
    "  two  spaces\tand\na line ", "&amp;amp; &lt;b&gt;", "&nbsp;a&nbsp;", "schÃ¶n", "“curly” – dash…", "ﬁne ligature",
    "全角，ＡＢＣ", "e\u0301", "zero\u200bwidth", "\ufeffmark", "emoji 🐈‍⬛", "\x1b[31mred\x1b[0m",
    "a\u2028b\x85c", "&amp;quot;x", "",
)  # fmt: skip


def prompts_of(file: Path, content: str | bytes) -> list[str]:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [item.prompt for item in read_items(str(file))]


def refused(path: Path, content: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        prompts_of(path, content)
    return caught.value.problems


def image(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), "red").save(file)
    return file


@pytest.mark.parametrize("prompt", NASTY)
def test_a_prompt_is_cleaned_as_diffusers_cleans_it(prompt: str) -> None:
    assert clean(prompt) == prompt_clean(prompt)


def test_blank_lines_and_comments_are_skipped(tmp_path: Path) -> None:
    assert prompts_of(tmp_path / "p.txt", "# list\n\na cat\n   \n  # more\na dog # here\n") == ["a cat", "a dog # here"]


def test_what_is_given_twice_is_kept_once_in_first_order(tmp_path: Path) -> None:
    assert prompts_of(tmp_path / "p.txt", "b\na\n b \na") == ["b", "a"]


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_prompt(tmp_path: Path) -> None:
    assert prompts_of(tmp_path / "p.txt", b"\xef\xbb\xbfa cat\r\na dog\r\n") == ["a cat", "a dog"]


def test_a_line_that_cleans_to_nothing_is_skipped(tmp_path: Path) -> None:
    assert prompts_of(tmp_path / "p.txt", "a cat\n&nbsp;\n") == ["a cat"]


def test_text_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    assert "Save it as UTF-8" in refused(tmp_path / "p.txt", "schön".encode("latin-1"))[0]


@pytest.mark.parametrize("content", ["", "\n\n", "# only a comment\n"])
@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_a_file_without_a_prompt_is_refused(tmp_path: Path, name: str, content: str) -> None:
    assert refused(tmp_path / name, content) == [f"{tmp_path / name}: no prompt in it. Write one prompt a line."]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        read_items(str(tmp_path / "none.txt"))


def test_the_embedded_prompts_are_1008_and_112_and_share_none() -> None:
    seen, held_out = ({i.prompt for i in read_items(name)} for name in ("tiny", "tiny:held_out"))
    assert (len(seen), len(held_out), len(seen & held_out)) == (1008, 112, 0)


def test_json_lines_give_prompts_and_media_relative_to_the_file(tmp_path: Path) -> None:
    picture = image(tmp_path / "img" / "a.png")
    lines = [
        {"prompt": "one", "image": "img/a.png", "id": 7},
        {"prompt": " two "},
        {"prompt": "3", "video": "img/a.png"},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert list(read_items(str(tmp_path / "p.jsonl"))) == [Item("one", picture), Item("two"), Item("3", picture)]


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "not valid JSON"), ('"a cat"', "no prompt"), ('{"image": "a.png"}', "no prompt"),
     ('{"prompt": 5}', "no prompt"),
     ('{"prompt": " "}', "no prompt"), ('{"prompt": "a", "img": "b"}', "`img` is no key"),
     ('{"prompt": "a", "image": "none.png"}', "no such file"), ('{"prompt": "a", "image": 5}', "image"),
     ('{"prompt": "a", "image": "none.png", "video": "none.mp4"}', "")],
)  # fmt: skip
def test_a_wrong_json_line_is_named_by_its_number(tmp_path: Path, line: str, said: str) -> None:
    (problem,) = refused(tmp_path / "p.jsonl", f'{{"prompt": "a"}}\n\n{line}\n')
    assert problem.startswith(f"{tmp_path}/p.jsonl, line 3: ") and said in problem


def test_all_wrong_json_lines_are_reported_at_once(tmp_path: Path) -> None:
    assert len(refused(tmp_path / "p.jsonl", '{\n{"prompt": "a"}\n[]\n')) == 2


def test_a_line_separator_inside_json_does_not_end_the_line(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a\u2028cat"}, ensure_ascii=False)
    assert prompts_of(tmp_path / "p.jsonl", line) == ["a cat"]


def test_a_folder_gives_each_medium_with_the_text_beside_it(tmp_path: Path) -> None:
    for name in ("b.png", "deep/a.JPG"):
        image(tmp_path / name).with_suffix(".txt").write_text(f"a {name}\n")
    (tmp_path / "notes.md").write_text("no medium")
    assert list(read_items(str(tmp_path))) == [
        Item("a b.png", tmp_path / "b.png"),
        Item("a deep/a.JPG", tmp_path / "deep" / "a.JPG"),
    ]


def test_media_without_text_are_all_named(tmp_path: Path) -> None:
    image(tmp_path / "a.png")
    image(tmp_path / "b.png").with_suffix(".txt").write_text(" ")
    with pytest.raises(ConfigError) as caught:
        read_items(str(tmp_path))
    assert len(caught.value.problems) == 2 and "Write it into a.txt beside it" in caught.value.problems[0]


def test_text_beside_a_medium_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    image(tmp_path / "a.png").with_suffix(".txt").write_bytes("schön".encode("latin-1"))
    with pytest.raises(ConfigError, match="UTF-8"):
        read_items(str(tmp_path))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompt in it"):
        read_items(str(tmp_path))


@cache
def pipeline(wan: Path, dtype: torch.dtype) -> WanPipeline:
    return WanPipeline.from_pretrained(wan, torch_dtype=dtype, transformer=None, transformer_2=None, vae=None)


@torch.no_grad()  # as the pipeline's own call; with gradients attention takes another kernel
def encoded_by_diffusers(wan: Path, dtype: torch.dtype, prompt: str) -> torch.Tensor:
    """text_LD, padded."""
    own = pipeline(wan, dtype)
    return own.encode_prompt(prompt, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS)[0][0]


@pytest.mark.parametrize(
    "prompt", ["a red circle on a blue background , left", "  red&nbsp;square", "", "色", "red " * 600]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_is_bitwise_what_the_pipeline_encodes(wan2: Path, prompt: str, dtype: torch.dtype) -> None:
    expected_LD = encoded_by_diffusers(wan2, dtype, prompt)
    text_LD = Encoder(wan2, dtype, torch.device("cpu")).encode(clean(prompt))
    assert text_LD.dtype is expected_LD.dtype is dtype and len(expected_LD) == TEXT_TOKENS
    assert torch.equal(text_LD, expected_LD[: len(text_LD)]) and not expected_LD[len(text_LD) :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "converted"])
def test_an_encoder_without_room_is_read_from_disk_and_answers_the_same(tmp_path: Path, wan2: Path, dtype: torch.dtype) -> None:
    whole, device = Encoder(wan2, dtype, torch.device("cpu")), torch.device("cpu")
    told = homes(wan2 / "text_encoder", dtype, 10_000, tmp_path)
    assert told and not homes(wan2 / "text_encoder", dtype, 2**30, tmp_path)
    small = Encoder(wan2, dtype, device, **told)
    assert torch.equal(small.encode("a red circle"), whole.encode("a red circle"))
    assert "disk" in small._model.hf_device_map.values()


def cache_of(folder: Path, wan: Path, prompts: list[str], dtype: torch.dtype = torch.float32) -> TextCache:
    return TextCache(folder, wan, prompts, dtype)


def shards(folder: Path) -> dict[Path, int]:
    return {f: f.stat().st_ino for f in folder.rglob("*.safetensors")}


@pytest.fixture
def two_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditioning, "PROMPTS_PER_SHARD", 2)


@pytest.mark.usefixtures("one_rank", "two_a_shard")
def test_cached_text_is_bitwise_what_the_pipeline_encodes_with_zeroed_padding(tmp_path: Path, wan2: Path) -> None:
    prompts = ["a red circle", "blue &amp; green", "", "left", " a  red circle"]
    text = cache_of(tmp_path, wan2, prompts)
    text.fill(torch.device("cpu"))
    for prompt in prompts:
        assert torch.equal(text[prompt], encoded_by_diffusers(wan2, torch.float32, prompt))


@pytest.mark.usefixtures("one_rank", "two_a_shard")
def test_only_a_missing_shard_is_written_again(tmp_path: Path, wan2: Path) -> None:
    prompts = ["a", "red", "blue", "left", "right"]
    cache_of(tmp_path, wan2, prompts).fill(torch.device("cpu"))
    before = shards(tmp_path)
    gone = min(before)
    gone.unlink()
    (tmp_path / "keep").write_text("")  # so that the freed inode may not be the new shard's
    cache_of(tmp_path, wan2, prompts).fill(torch.device("cpu"))
    after = shards(tmp_path)
    assert len(before) == 3 and before.keys() == after.keys()
    assert {f: n for f, n in before.items() if f != gone} == {f: n for f, n in after.items() if f != gone}


@pytest.mark.usefixtures("one_rank", "two_a_shard")
def test_a_complete_cache_loads_no_encoder(tmp_path: Path, wan2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_of(tmp_path, wan2, ["a", "red", "blue"]).fill(torch.device("cpu"))
    before = shards(tmp_path)
    monkeypatch.setattr(conditioning, "Encoder", None)  # to load one would raise
    cache_of(tmp_path, wan2, ["a", "red", "blue"]).fill(torch.device("cpu"))
    assert shards(tmp_path) == before


@pytest.mark.usefixtures("one_rank")
def test_a_file_of_the_cache_names_its_prompts(tmp_path: Path, wan2: Path) -> None:
    cache_of(tmp_path, wan2, ["a", " red"]).fill(torch.device("cpu"))
    (file,) = shards(tmp_path)
    with safe_open(file, "pt") as opened:
        assert sorted(v for k, v in opened.metadata().items() if not k.startswith("crc32 ")) == ["a", "red"]


@pytest.mark.usefixtures("one_rank", "two_a_shard")
def test_prompts_in_another_order_or_number_are_found_again(
    tmp_path: Path, wan2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_of(tmp_path, wan2, ["a", "red", "blue", "left"]).fill(torch.device("cpu"))
    monkeypatch.setattr(conditioning, "Encoder", None)  # to load one would raise
    text = cache_of(tmp_path, wan2, ["left", "red", "a"])
    text.fill(torch.device("cpu"))
    assert torch.equal(text["left"], encoded_by_diffusers(wan2, torch.float32, "left"))


def test_another_encoder_or_precision_gives_another_stamp(wan2: Path, copy_of: Callable[..., Path]) -> None:
    other = copy_of(wan2, weights=True)
    same = text_stamp(other, torch.float32)
    weights = other / "text_encoder" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    stamps = [text_stamp(wan2, d) for d in (torch.float32, torch.bfloat16)]
    assert same == stamps[0] and len({*stamps, text_stamp(other, torch.float32)}) == 3


def test_laying_out_a_cache_writes_nothing(tmp_path: Path, wan2: Path) -> None:
    cache_of(tmp_path, wan2, ["a"])
    assert list(tmp_path.iterdir()) == []
