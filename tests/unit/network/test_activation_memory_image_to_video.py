"""Planned memory and operations of networks that are given frames: measured, counted, summed by hand."""

from dataclasses import replace

import pytest
import torch
from activations import MICRO, SIZES, TEXT, config, network, peak_bytes, student_engine
from published_wan import FIVE, JOINED, STATES
from slow_cases import slow_but
from small_wan import small_transformer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from wandistiller.batch import Conditioning, State
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.experts import Expert
from wandistiller.network.activation_memory import activation_bytes, call_bytes
from wandistiller.network.flops import count_flops
from wandistiller.wan import text_padding
from wandistiller.wan.text_padding import TEXT_TOKENS
from wandistiller.wan.transformer import velocity
from wandistiller.wan.transformer_config import TransformerConfig

LATENT = (16, 3, 24, 32)
ROWS, WIDE = 257, 48
OF_CLIP = {"in_channels": 36, "image_dim": WIDE, "added_kv_proj_dim": 256}
FORMS = {
    "joined": {"in_channels": 36},
    "states": OF_CLIP,
    "both ends": OF_CLIP | {"pos_embed_seq_len": 2 * ROWS},
    "first": {},
}
"""Settings of networks as those of Wan2.2 I2V A14B, Wan2.1 I2V, Wan2.1 FLF2V and Wan2.2 5B."""


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_padding, "TEXT_TOKENS", TEXT)
    monkeypatch.setattr(TransformerConfig, "text_tokens", TEXT)


def form_config(form: str, layers: int) -> TransformerConfig:
    return replace(config(layers, **FORMS[form]), expands_time=form == "first")


def predict(model: torch.nn.Module, form: str, samples: int = MICRO, text: int = TEXT) -> Tensor:
    rows = {"states": ROWS, "both ends": 2 * ROWS}.get(form)
    conditioning = Conditioning(
        torch.randn(samples, text, 32),
        joined_BCFHW=None if form == "first" else torch.randn(samples, 20, *LATENT[1:]),
        first_BCFHW=torch.randn(samples, 16, 1, *LATENT[2:]) if form == "first" else None,
        image_BLD=torch.randn(samples, rows, WIDE) if rows else None,
    )
    x_t_BCFHW, sigma_B = torch.randn(samples, *LATENT), torch.ones(samples)
    made = State(x_t_BCFHW=x_t_BCFHW, sigma_B=sigma_B, conditioning=conditioning, expert=Expert.HIGH_NOISE)
    return velocity(model, made)


USUAL = ["states"]
KINDS = [(form, checkpoint) for form in FORMS for checkpoint in ("blocks", "attention", "")]
IN_BOTH = slow_but(
    [(form, "blocks", "float32") for form in USUAL],  # bf16 is emulated on many CPUs
    [(*kind, dtype) for kind in KINDS for dtype in ("float32", "bfloat16")],
)


@pytest.mark.parametrize(("form", "checkpoint", "dtype"), IN_BOTH)
def test_planned_activations_with_given_frames_are_the_measured_peak(
    one_rank: torch.device, form: str, checkpoint: str, dtype: str
) -> None:
    engine, layers = student_engine(dtype, **({"checkpoint": checkpoint} if checkpoint else {})), 6
    model, _ = network(layers, engine, **FORMS[form])
    planned = activation_bytes(form_config(form, layers), engine, LATENT, MICRO, accelerator=False).transient
    measured = peak_bytes(lambda: predict(model, form).square().mean().backward())
    assert planned == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("form", slow_but(USUAL, FORMS))
def test_planned_memory_of_a_call_with_given_frames_is_the_measured_peak(form: str) -> None:
    model, _ = network(3, student_engine("float32"), **FORMS[form])
    planned, _ = call_bytes(
        form_config(form, 3), EngineConfig("teacher", {}), LATENT, MICRO, accelerator=False
    )
    with torch.no_grad():
        measured = peak_bytes(lambda: predict(model, form))
    assert planned == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("form", FORMS)
def test_operations_with_given_frames_are_torch_s_count_of_all_blocks(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.undo()  # all 512 rows of text, as `blank_state` has them
    model, c = small_transformer(0, 4, **SIZES, **FORMS[form]), form_config(form, 4)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        predict(model, form, 1, TEXT_TOKENS)
    assert count_flops(c, LATENT).forward == pytest.approx(forward.get_total_flops(), rel=1e-3)


def test_a_time_for_each_patch_of_5b_adds_its_maps_and_modulations() -> None:
    """17 frames of 480 x 832: 1950 patches; a block has 6 modulations of each, and 1 + those of 2 scales."""
    latent, patches, d, layers = (48, 5, 30, 52), 1950, 3072, 30
    text, engine = TransformerConfig.usual(**FIVE), student_engine("bfloat16")
    given = replace(text, expands_time=True)
    more = count_flops(given, latent).forward - count_flops(text, latent).forward
    assert more == (patches - 1) * 2 * d * (256 + d + 6 * d)
    how = {"accelerator": True, "recomputes": False}
    saved = [activation_bytes(c, engine, latent, 1, **how).transient for c in (text, given)]
    assert saved[1] - saved[0] == pytest.approx(layers * patches * (6 + 2) * d * 4, rel=0.03)


def test_states_of_clip_add_keys_values_and_an_attention_to_each_block() -> None:
    """Wan2.1 I2V 14B, 17 frames of 480 x 832: 7800 patches attend to 257 states."""
    latent, patches, d, layers = (16, 5, 60, 104), 7800, 5120, 40
    joined, states = TransformerConfig.usual(**JOINED), TransformerConfig.usual(**STATES)
    block = 2 * 2 * ROWS * d * d + 4 * patches * ROWS * d
    more = count_flops(states, latent).forward - count_flops(joined, latent).forward
    assert more == layers * block + 2 * ROWS * 1280 * (1280 + d)
    engine = student_engine("bfloat16")
    how = {"accelerator": True, "recomputes": False}
    saved = [activation_bytes(c, engine, latent, 1, **how).transient for c in (joined, states)]
    # of each state keys, normed keys and values; of each patch the second attention's result, and the sum
    assert saved[1] - saved[0] == pytest.approx(layers * 2 * d * (3 * ROWS + 2 * patches), rel=0.03)
