"""Prompts as they are cleaned and encoded: diffusers' own pipeline is the reference."""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from wandistiller.batch import padded
from wandistiller.data import conditions
from wandistiller.data.conditions import TextCache, text_fingerprint
from wandistiller.data.lines import clean
from wandistiller.wan.loaded_components import Encoder, offload_kwargs
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.text_padding import TEXT_TOKENS

NASTY = (
    "  two  spaces\tand\na line ",
    "&amp;amp; &lt;b&gt;",
    "&nbsp;a&nbsp;",
    "schÃ¶n",
    "“curly” – dash…",
    "ﬁne ligature",
    "全角，ＡＢＣ",
    "e\u0301",
    "zero\u200bwidth",
    "\ufeffmark",
    "emoji 🐈‍⬛",
    "\x1b[31mred\x1b[0m",
    "a\u2028b\x85c",
    "&amp;quot;x",
    "",
)


@pytest.mark.parametrize("prompt", NASTY)
def test_a_prompt_is_cleaned_as_diffusers_cleans_it(prompt: str) -> None:
    assert clean(prompt) == prompt_clean(prompt)


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
def test_text_is_what_the_pipeline_encodes_with_512_tokens(
    wan2: Path, prompt: str, dtype: torch.dtype
) -> None:
    expected_LD = encoded_by_diffusers(wan2, dtype, prompt)
    text_LD = Encoder(wan2, dtype, torch.device("cpu")).encode(clean(prompt))
    assert text_LD.dtype is expected_LD.dtype is dtype and len(expected_LD) == TEXT_TOKENS
    assert near(text_LD, expected_LD[: len(text_LD)]) and not expected_LD[len(text_LD) :].any()


def near(text_LD: torch.Tensor, expected_LD: torch.Tensor) -> bool:
    """Equal but for the rounding of sums over other numbers of tokens."""
    error, norm = (t.double().norm() for t in (text_LD - expected_LD, expected_LD))
    return bool(error <= norm * (7e-6 if text_LD.dtype is torch.float32 else 1e-2))


def test_a_prompt_costs_its_own_tokens(wan2: Path) -> None:
    encoder, lengths = Encoder(wan2, torch.float32, torch.device("cpu")), []
    encoder._model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    encoded = [encoder.encode(prompt) for prompt in ("", "a red circle", "red " * 600)]
    assert lengths == [len(text_LD) for text_LD in encoded] == [1, 4, TEXT_TOKENS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "converted"])
def test_an_encoder_without_room_is_read_from_disk_with_equal_outputs(
    tmp_path: Path, wan2: Path, dtype: torch.dtype
) -> None:
    whole, device = Encoder(wan2, dtype, torch.device("cpu")), torch.device("cpu")
    kwargs = offload_kwargs(wan2 / "text_encoder", dtype, 10_000, tmp_path)
    assert kwargs and not offload_kwargs(wan2 / "text_encoder", dtype, 2**30, tmp_path)
    small = Encoder(wan2, dtype, device, **kwargs)
    assert torch.equal(small.encode("a red circle"), whole.encode("a red circle"))
    assert "disk" in small._model.hf_device_map.values()


@pytest.mark.usefixtures("one_rank")
def test_prompts_that_are_cut_are_counted_once(
    tmp_path: Path, wan2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prompts = ["red " * 511, "blue " * 512, "green " * 600]  # and one token for the end
    for _ in range(2):
        filled(tmp_path, wan2, prompts)
    (said,) = [m for m in caplog.messages if "not read" in m]
    assert said.startswith("text: 2 prompt(s) have over 512 tokens") and "the first: blue blue" in said


def filled(folder: Path, wan: Path, prompts: list[str]) -> TextCache:
    text = TextCache(folder, open_wan(str(wan)), torch.device("cpu"))
    text.fill(prompts)
    return text


def shards(folder: Path) -> dict[Path, int]:
    return {f: f.stat().st_ino for f in folder.rglob("*.safetensors")}


@pytest.fixture
def two_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "PROMPTS_PER_FILE", 2)


@pytest.mark.usefixtures("one_rank", "two_a_shard")
def test_cached_text_is_what_the_pipeline_encodes_with_zeroed_padding(tmp_path: Path, wan2: Path) -> None:
    prompts = ["a red circle", "blue &amp; green", "", "left", " a  red circle"]
    text = filled(tmp_path, wan2, prompts)
    for prompt, text_LD in zip(
        prompts, padded(text.batch([*map(text.key, prompts)]).text_BLD, TEXT_TOKENS), strict=True
    ):
        assert near(text_LD, encoded_by_diffusers(wan2, torch.float32, prompt))
        assert text[prompt].any(-1).all()


@pytest.mark.usefixtures("one_rank", "two_a_shard")
def test_only_a_missing_shard_is_written_again(tmp_path: Path, wan2: Path) -> None:
    prompts = ["a", "red", "blue", "left", "right"]
    TextCache(tmp_path, open_wan(str(wan2)), torch.device("cpu"))
    assert list(tmp_path.iterdir()) == []  # to lay out a cache writes nothing
    filled(tmp_path, wan2, prompts)
    before = shards(tmp_path)
    gone = min(before)
    gone.unlink()
    (tmp_path / "keep").write_text("")  # so that the freed inode may not be the new shard's
    filled(tmp_path, wan2, prompts)
    after = shards(tmp_path)
    assert len(before) == 3 and before.keys() == after.keys()
    assert {f: n for f, n in before.items() if f != gone} == {f: n for f, n in after.items() if f != gone}


@pytest.mark.usefixtures("one_rank", "two_a_shard")
def test_a_cache_that_has_all_prompts_in_whatever_order_loads_no_encoder(
    tmp_path: Path, wan2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, wan2, ["a", "red", "blue", "left"])
    before = shards(tmp_path)
    monkeypatch.setattr("wandistiller.wan.loaded_components.Encoder", None)  # to load one would raise
    text = filled(tmp_path, wan2, ["left", "red", "a"])
    assert shards(tmp_path) == before
    assert near(
        padded(text.batch([text.key("left")]).text_BLD, TEXT_TOKENS)[0],
        encoded_by_diffusers(wan2, torch.float32, "left"),
    )


def test_another_encoder_or_precision_has_another_fingerprint(
    wan2: Path, copy_of: Callable[..., Path]
) -> None:
    other = copy_of(wan2, weights=True)
    same = text_fingerprint(open_wan(str(other)), torch.float32)
    weights = other / "text_encoder" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    prints = [text_fingerprint(open_wan(str(wan2)), d) for d in (torch.float32, torch.bfloat16)]
    assert same == prints[0] and len({*prints, text_fingerprint(open_wan(str(other)), torch.float32)}) == 3
