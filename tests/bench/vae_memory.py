"""CPU memory that VAE and text encoder take at work, as `wandistiller plan` says it and as it then is.

    python tests/bench/vae_memory.py                    # about an hour on two cores
    python tests/bench/vae_memory.py --only "narrow"    # rows whose name has this in it

Every row is a process of its own: the real classes with random weights, `Vae`'s and `Encoder`'s own calls.
Measured is the kernel's peak of resident memory during the call, less that before; planned: the forecast.
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]

import torch
from new_processes import in_new_processes
from published_wan import VAE21, VAE22

from wandistiller.monitoring import memory_usage
from wandistiller.wan.components import UMT5_XXL, decoded, encoded, states, text_encoder_of
from wandistiller.wan.fake_tensor_memory import text_encoding
from wandistiller.wan.vae import PARTS, FittingVae

MIB = 2**20
VAES = {
    "Wan2.1": VAE21,
    "Wan2.2": VAE22,
    "narrow 2.1": VAE21 | {"base_dim": 16},
    "narrow 2.2": VAE22 | {"base_dim": 16, "decoder_base_dim": 24},
}
TEXT = UMT5_XXL | {"d_ff": 2560, "d_model": 1024, "num_heads": 16, "num_layers": 12, "vocab_size": 32000}
SIZES = [  # models; samples, frames, height, width
    (("Wan2.1", "Wan2.2"), (1, 1, 256, 256)),
    (("Wan2.1", "Wan2.2"), (1, 1, 480, 832)),
    (("Wan2.1",), (1, 9, 256, 256)),
    (("narrow 2.1", "narrow 2.2"), (1, 17, 480, 832)),
    (("narrow 2.1", "narrow 2.2"), (1, 9, 960, 1664)),
]
ROWS = [(name, what, *size) for names, size in SIZES for name in names for what in ("encode", "decode")]
ROWS += [(name, f"{what} in tiles", *size) for name, what, *size in ROWS if size[-1] > 256]
ROWS += [("narrow 2.1", "encode", 4, 9, 480, 832), ("text", "encode", 1, 0, 0, 0)]


def shape(name: str, what: str, samples: int, frames: int, height: int, width: int) -> tuple[int, ...]:
    """Of the VAE's input."""
    spatial = VAES[name].get("scale_factor_spatial", 8)
    latents = samples, VAES[name]["z_dim"], (frames - 1) // 4 + 1, height // spatial, width // spatial
    return (samples, 3, frames, height, width) if what.startswith("encode") else latents


def planned(row: tuple) -> int:
    if row[0] == "text":
        return text_encoding(TEXT, "float32", accelerator=False).work
    call, _, tiles = row[1].partition(" ")
    return PARTS[call](VAES[row[0]], shape(*row), accelerator=False, tiles=bool(tiles)).work


@torch.no_grad()
def measured(row: tuple) -> int:
    """In this process, which must be fresh."""
    call, _, tiles = row[1].partition(" ")
    model = text_encoder_of(TEXT) if row[0] == "text" else FittingVae.from_config(VAES[row[0]]).eval()
    if row[0] != "text":
        model.chosen[call, torch.Size(shape(*row))] = bool(tiles)
    with memory_usage.within("before"):
        pass
    before = memory_usage.read().host
    if row[0] == "text":
        token_BL = torch.zeros(1, 512, dtype=torch.long)
        states(model, token_BL, torch.ones_like(token_BL))
    else:
        (encoded if call == "encode" else decoded)(model, torch.randn(shape(*row)))
    return memory_usage.read().host_peak - before


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default="")
    args = made.parse_args()
    print("| model | call | samples x frames x height x width | planned MiB | measured MiB | ratio |")
    print("|---|---|---|---|---|---|")
    for row in ROWS:
        if args.only in row[0]:
            expected, (actual,) = planned(row), in_new_processes(measured, row)
            size, ratio = "x".join(map(str, row[2:])), expected / actual
            cells = f"{size} | {expected // MIB} | {actual // MIB} | {ratio:.3f}"
            print(f"| {row[0]} | {row[1]} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
