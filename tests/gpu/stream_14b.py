"""A random bf16 teacher of Wan 14B's size, streamed from CPU memory: seconds a call next to the floor.

    python tests/gpu/stream_14b.py       # one GPU, 40 GB of CPU memory, 30 GB of disk in --folder, 10 minutes
    python tests/gpu/stream_14b.py --layers 1 --small  # tiny sizes, to see that it runs

One-frame latents of 480x832 (1560 tokens a sample), without guidance. A batch is SAMPLES x MICRO-STEPS of an
update. Two floors: `bytes`, the weights over the bandwidth measured from page-locked memory; `operations`,
the products over the measured bf16 rate. `share` is the larger floor over the time.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS.parent)]

import torch
from new_processes import in_new_processes
from small_wan import make_large_wan
from states import state

CONFIG = {
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "ffn_dim": 13824,
    "text_dim": 32,  # of the small text encoder beside it
    "freq_dim": 256,
    "in_channels": 16,
    "out_channels": 16,
    "rope_max_seq_len": 1024,
}
STREAMED = "streamed"
SETTINGS = (STREAMED, "ZeRO-Inference")
LATENT, SMALL_LATENT = (16, 1, 60, 104), (16, 1, 8, 8)
SMALL = {"num_attention_heads": 2, "ffn_dim": 256}
CALLS = 3
GIB = 2**30


def seconds(call: Callable[[], Any], times: int = CALLS) -> float:
    """The fastest of some calls, the accelerator waited for."""
    from deepspeed.accelerator import get_accelerator

    best = float("inf")
    for _ in range(times):
        get_accelerator().synchronize()
        start = time.perf_counter()
        call()
        get_accelerator().synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def machine_rates(device: torch.device, small: bool) -> tuple[float, float]:
    """Bytes a second from page-locked memory, and bf16 operations a second."""
    host = torch.empty(GIB // 8 if small else GIB, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there, n = torch.empty_like(host, device=device), 512 if small else 8192
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    copying, multiplying = (
        seconds(lambda: there.copy_(host, non_blocking=True), 5),
        seconds(lambda: a @ a, 10),
    )
    return len(host) / copying, 2 * n**3 / multiplying


def operations(config: Any, tokens: int, text: int = 512) -> float:
    """Return the multiplications and additions of one sample: weights, then the two attentions."""
    width, layers = config.width, config.num_layers
    per_token = 6 * width**2 + 2 * width * config.ffn_dim
    attention = 2 * width * tokens * (tokens + text)
    return 2 * layers * (tokens * per_token + text * 2 * width**2 + attention)


def measure(folder: Path, setting: str, batches: list[tuple[int, int]], small: bool) -> dict[str, Any]:
    """In a process of its own: load, then time an update's calls for each batch, a row of the table."""
    from shipped import placement

    from wandistiller.distributed import collectives
    from wandistiller.engine.patches import patch_deepspeed
    from wandistiller.teacher.build import build_teacher
    from wandistiller.utils.keyed_random import keyed_normal
    from wandistiller.wan import pipeline

    patch_deepspeed()
    collectives.init("warning")
    device, teacher = collectives.device(), pipeline.open_wan(str(folder))
    bandwidth, rate = machine_rates(device, small)
    name = STREAMED if setting == STREAMED else "zero_inference_cpu"
    placed = placement(name)
    start = time.perf_counter()
    made = build_teacher(teacher, placed)
    load = time.perf_counter() - start
    nbytes = sum(
        p.numel() * teacher.config.dtype_of(n, torch.bfloat16).itemsize
        for n, p in teacher.config.meta().named_parameters()
    )
    rows, latent = [], SMALL_LATENT if small else LATENT
    for samples, micro_steps in batches:
        x_t = keyed_normal((samples, *latent), "x").to(device)
        text = keyed_normal((samples, 512, CONFIG["text_dim"]), "text").to(device, torch.bfloat16)
        batch = state(x_t, torch.full((samples,), 0.5, device=device), text)
        update = partial(made.predict_all, [batch] * micro_steps, ())
        update()
        update()  # DeepSpeed prefetches from the second call on
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        took = seconds(update)
        # memory that the GPU still uses, whether or not the host has freed it
        peak = torch.cuda.memory_stats()["active_bytes.all.peak"] / GIB if device.type == "cuda" else 0
        sweeps = 1 if setting == STREAMED else micro_steps
        products = samples * micro_steps * operations(teacher.config, latent[2] * latent[3] // 4)
        floors = sweeps * nbytes / bandwidth, products / rate
        rows.append((f"{samples} x {micro_steps}", took, *floors, max(floors) / took, peak))
    collectives.destroy()
    return {"load": load, "bandwidth": bandwidth / GIB, "rate": rate / 1e12, "rows": rows}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=Path("runs/stream_14b"))
    made.add_argument("--layers", type=int, default=40)
    made.add_argument("--settings", nargs="+", default=SETTINGS, choices=SETTINGS)
    made.add_argument("--batches", nargs="+", default=["1x1", "4x1", "16x1", "1x16"])
    made.add_argument("--small", action="store_true", help="narrow blocks and 16 tokens")
    args = made.parse_args()
    target = args.folder / f"{args.layers}_layers"
    config = CONFIG | (SMALL if args.small else {}) | {"num_layers": args.layers}
    folder = make_large_wan(target, torch.bfloat16, "5GB", **config)
    print(
        "| teacher | samples x micro-steps | seconds | bytes | operations | share | peak GPU GiB |\n"
        f"|{'---|' * 7}"
    )
    for name in args.settings:
        batches = [tuple(map(int, batch.split("x"))) for batch in args.batches]
        (found,) = in_new_processes(measure, folder, name, batches, args.small)
        for samples, *row in found["rows"]:
            print(f"| {name} | {samples} | {' | '.join(f'{value:.2f}' for value in row)} |", flush=True)
        bandwidth = f"{found['bandwidth']:.1f} GiB/s from page-locked memory"
        text = f"{name}: loaded in {found['load']:.0f} s, {bandwidth}, {found['rate']:.0f} TFLOP/s"
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
