"""Figures of a GPU, each a table and a last line that begins with `=>`.

python tests/gpu/measure.py kernels     # a forward and backward pass by attention backend, compiled or not
python tests/gpu/measure.py overlap     # share of the copies of a streamed teacher that hide behind kernels
python tests/gpu/measure.py coders      # memory of VAE and text encoder, planned and measured
python tests/gpu/measure.py kernels --small  # tiny sizes, to see that it runs
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS.parent)]
os.environ.setdefault("DS_ACCELERATOR", "cuda")

import torch
from gpu import KIND
from new_processes import in_new_processes
from published_wan import VAE21, VAE22
from shipped import placement
from small_wan import make_wan, small_transformer
from states import state
from stream_14b import CONFIG, seconds

from wandistiller.distributed import collectives
from wandistiller.engine.engine_config import Kernels
from wandistiller.engine.patches import patch_deepspeed
from wandistiller.engine.preflight import PACKAGES
from wandistiller.network.names import set_parameter
from wandistiller.teacher.build import build_teacher
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan import pipeline, transformer
from wandistiller.wan.components import UMT5_XXL, decoded, encoded, states, text_encoder_of, vae_of
from wandistiller.wan.fake_tensor_memory import coding, text_encoding
from wandistiller.wan.kernels import use_kernels
from wandistiller.wan.transformer_config import TransformerConfig

MIB = 2**20
BACKENDS = ["native", "_native_cudnn", "flash", "_flash_3"]


def random_wan(config: TransformerConfig, layers: int) -> torch.nn.Module:
    """A random transformer in bf16 on the device."""
    model = config.replaced(num_layers=layers).meta()
    for name, p in list(model.named_parameters()):
        set_parameter(model, name, torch.randn(p.shape, device=KIND, dtype=torch.bfloat16) * 0.02)
    model.rope.to(KIND)
    return model


def kernels(small: bool) -> Iterator[str]:
    """Time four layers of a 14B at one frame and at 81, forward alone and with backward."""
    config = TransformerConfig.usual(**CONFIG | ({"num_attention_heads": 2, "ffn_dim": 256} if small else {}))
    size, best = (8, 8) if small else (60, 104), {}
    can_compile = KIND == "cpu" or find_spec("triton")
    yield "| frames | attention | compiled | forward ms | forward and backward ms |\n|---|---|---|---|---|"
    for frames in (1, 5 if small else 21):
        x, text = (torch.randn(1, *s, device=KIND) for s in ((16, frames, *size), (512, CONFIG["text_dim"])))
        for attention in BACKENDS[:1] if small else BACKENDS:
            module, origin = PACKAGES.get(attention, ("torch", ""))
            if not find_spec(module):
                yield f"| {frames} | {attention} | | not installed: {origin} | |"
                continue
            for compiled in (False, True) if can_compile else (False,):
                model = random_wan(config, 4)
                use_kernels(model, Kernels(attention=attention, compile=compiled))
                call = lambda: transformer.velocity(model, state(x, torch.ones(1, device=KIND), text))  # noqa: B023, E731
                with torch.no_grad():
                    forward = timed(call)
                model.requires_grad_(True)
                both = timed(lambda: call().mean().backward())  # noqa: B023
                best[frames, attention, compiled] = forward + both
                yield f"| {frames} | {attention} | {compiled} | {1e3 * forward:.1f} | {1e3 * both:.1f} |"
    for frames in {frames for frames, *_ in best}:
        of = {key: value for key, value in best.items() if key[0] == frames}
        first = min(of, key=of.get)
        times = of[frames, "native", False] / of[first]
        yield f"=> at {frames} latent frame(s) {first[1:]} is {times:.2f} times as fast as native"


def timed(call: Callable[[], Any]) -> float:
    call()
    call()
    return seconds(call)


def overlap(small: bool) -> Iterator[str]:
    """Trace calls of a streamed teacher of four layers of a 14B's width."""
    sizes = {"num_attention_heads": 2, "ffn_dim": 256} if small else CONFIG
    with tempfile.TemporaryDirectory() as folder:
        made = make_wan(Path(folder) / "wan", experts=1)
        small_transformer(1, 4, **{k: v for k, v in sizes.items() if k != "text_dim"}).save_pretrained(
            made / "transformer"
        )
        for name in ("streamed", "zero_inference_cpu"):
            (found,) = in_new_processes(traced, made, name, 8 if small else 60)
            for micro_steps, (copies, hidden, took) in found.items():
                share = hidden / copies if copies else 1
                ms = f"{copies:.1f} ms of copies hidden, {took:.1f} ms in all"
                yield f"=> {name}, {micro_steps} micro-step(s): {share:.0%} of {ms}"


def traced(folder: Path, name: str, size: int) -> dict[int, tuple[float, float, float]]:
    """Milliseconds of copies to the GPU, of those behind kernels, and in all, by micro-steps."""
    patch_deepspeed()
    collectives.init("warning")
    device, wan = collectives.device(), pipeline.open_wan(str(folder))
    made = build_teacher(wan, placement(name))
    found = {}
    for micro_steps in (1, 16):
        x_t = keyed_normal((1, 16, 1, size, size), "x").to(device)
        text = keyed_normal((1, 512, wan.config.text_dim), "text").to(device)
        batch = state(x_t, torch.full((1,), 0.5, device=device), text)
        took = timed(lambda batch=batch: made.predict_all([batch] * micro_steps, ()))  # noqa: B023
        with torch.profiler.profile() as profile:
            made.predict_all([batch] * micro_steps, ())
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        spans = [[], []]
        for e in events:
            spans["Memcpy HtoD" in e.name].append((e.time_range.start, e.time_range.end))
        hidden = sum(max(0, min(b, d) - max(a, c)) for a, b in spans[1] for c, d in spans[0])
        copies = sum(b - a for a, b in spans[1])
        found[micro_steps] = copies / 1e3, hidden / 1e3, 1e3 * took
    collectives.destroy()
    return found


def coders(small: bool) -> Iterator[str]:
    """Memory of single calls, weights left out."""
    yield "| model | call | planned MiB | measured MiB | seconds |\n|---|---|---|---|---|"
    ratios = []
    for name, config in {"Wan2.1": VAE21, "Wan2.2": VAE22}.items():
        for frames in (1,) if small else (1, 81):
            size = (64, 64) if small else (480, 832)
            spatial, vae = config.get("scale_factor_spatial", 8), vae_of(config).to(KIND)
            pixels = (1, 3, frames, *size)
            latents = (1, config["z_dim"], 1 + (frames - 1) // 4, *(n // spatial for n in size))
            for what, shape, call in (
                ("encode", pixels, encoded),
                ("decode", latents, decoded),
            ):
                x = torch.randn(shape)
                planned = coding(what, config, shape, accelerator=True).work
                measured, took = peak_of(lambda: call(vae, x.to(KIND)))  # noqa: B023
                ratios.append(planned / measured if measured else 1)
                yield f"| {name} | {what} {frames} | {planned // MIB} | {measured // MIB} | {took:.2f} |"
    config = UMT5_XXL | ({"num_layers": 1, "vocab_size": 1000, "d_ff": 64, "d_model": 64} if small else {})
    with torch.device("meta"):  # 5.7 billion random numbers take minutes on a CPU
        encoder = text_encoder_of(config, torch.bfloat16)
    for p in encoder.to_empty(device=KIND).parameters():
        torch.nn.init.normal_(p, std=0.02)
    token_BL = torch.zeros(1, 512, dtype=torch.long)
    planned = text_encoding(config, "bfloat16", accelerator=True).work
    measured, took = peak_of(lambda: states(encoder, token_BL.to(KIND), torch.ones_like(token_BL).to(KIND)))
    yield f"| UMT5 | a prompt | {planned // MIB} | {measured // MIB} | {took:.2f} |"
    yield f"=> planned over measured: {min(ratios):.2f} to {max(ratios):.2f}"


@torch.no_grad()
def peak_of(call: Callable[[], Any]) -> tuple[int, float]:
    """Bytes on top of what there is (0 on a CPU), and seconds of the second call."""
    call()
    before = 0
    if KIND == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    call()
    if KIND == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - start
    return (torch.cuda.max_memory_allocated() - before if KIND == "cuda" else 0), took


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = {f.__name__: f for f in (kernels, overlap, coders)}
    made.add_argument("what", choices=what)
    made.add_argument("--small", action="store_true")
    args = made.parse_args()
    for line in what[args.what](args.small):
        print(line, flush=True)


if __name__ == "__main__":
    main()
