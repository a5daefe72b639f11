"""CPU memory that VAE and text encoder take at work, as `wandistiller plan` says it and as it then is.

    python tests/bench/vae_memory.py                    # about an hour on two cores
    python tests/bench/vae_memory.py --only "narrow"    # rows whose name has this in it

Every row is a process of its own: the real classes with random weights, `Vae`'s and `Encoder`'s own calls.
Measured is the kernel's peak of resident memory during the call, less that before; planned: the forecast.
"""

import torch
from common import head, parser, row
from new_processes import in_new_processes
from published_wan import VAE21, VAE22

from wandistiller.monitoring import memory_usage
from wandistiller.wan.components import UMT5_XXL, decoded, encoded, states, text_encoder_of
from wandistiller.wan.fake_tensor_memory import coding, text_encoding
from wandistiller.wan.vae import FittingVae

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


def planned(case: tuple) -> int:
    if case[0] == "text":
        return text_encoding(TEXT, "float32", accelerator=False).work
    call, _, tiles = case[1].partition(" ")
    return coding(call, VAES[case[0]], shape(*case), accelerator=False, tiles=bool(tiles)).work


@torch.no_grad()
def measured(case: tuple) -> int:
    """In this process, which must be fresh."""
    call, _, tiles = case[1].partition(" ")
    model = text_encoder_of(TEXT) if case[0] == "text" else FittingVae.from_config(VAES[case[0]]).eval()
    if case[0] != "text":
        model.chosen[call, torch.Size(shape(*case))] = bool(tiles)
    with memory_usage.within("before"):
        pass
    before = memory_usage.read().host
    if case[0] == "text":
        token_BL = torch.zeros(1, 512, dtype=torch.long)
        states(model, token_BL, torch.ones_like(token_BL))
    else:
        (encoded if call == "encode" else decoded)(model, torch.randn(shape(*case)))
    return memory_usage.read().host_peak - before


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", default="")
    args = made.parse_args()
    sizes = "samples x frames x height x width"
    head("model", "call", sizes, "planned MiB", "measured MiB", "ratio")
    for name, what, *size in ROWS:
        if args.only in name:
            case = (name, what, *size)
            expected, (actual,) = planned(case), in_new_processes(measured, case)
            mib = expected // MIB, actual // MIB
            row(name, what, "x".join(map(str, size)), *mib, f"{expected / actual:.3f}")


if __name__ == "__main__":
    main()
