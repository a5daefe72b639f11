"""Where a step's time goes on a CPU: a published Wan's blocks beside one large matrix product, in float32.

    python tests/bench/step_parts.py                      # 1.3B at 480x832, two layers, minutes
    python tests/bench/step_parts.py --pixels 256 256

Seconds of the teacher's forward pass and of the student's passes with recomputed blocks, as multiples of the
time that their operations (products and attention) take at the rate of one large product, which is measured
between them. Then the share of each kind of operation in the forward pass, by torch's profiler.
"""

import time
from collections.abc import Callable

import torch
from common import head, parser, row
from published_wan import SMALL
from states import state
from torch.profiler import ProfilerActivity, profile

from wandistiller.engine.activation_checkpointing import CheckpointPolicy
from wandistiller.wan.flops import count_flops
from wandistiller.wan.text_padding import TEXT_TOKENS
from wandistiller.wan.transformer import meta_transformer, usual_config, velocity

LAYERS = 2
KINDS = {
    "matrix products": ("aten::addmm", "aten::mm", "aten::linear", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "GELU": ("aten::gelu",),
    "norms": ("aten::native_layer_norm", "aten::_fused_rms_norm", "aten::rsqrt", "aten::mean", "aten::pow"),
    "copies": ("aten::copy_", "aten::cat"),
    "sums and products by element": ("aten::mul", "aten::add", "aten::add_", "aten::mul_"),
}


def seconds(call: Callable[[], object], times: int = 3) -> float:
    """CPU seconds of a call, the best of some."""
    found = []
    for _ in range(times):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)


def rate() -> float:
    """Operations a CPU second of a product in a block's shape."""
    a_MK, b_KN = torch.randn(1560, 1536), torch.randn(1536, 8960)
    return 2 * a_MK.numel() * b_KN.shape[1] / seconds(lambda: a_MK @ b_KN, 5)


def shares(call: Callable[[], object]) -> dict[str, float]:
    """Share of a call's time in operations of each kind."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    events = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    whole = sum(events.values())
    known = {kind: sum(events.pop(name, 0) for name in names) / whole for kind, names in KINDS.items()}
    return known | {"all other": sum(events.values()) / whole}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--pixels", type=int, nargs=2, default=(480, 832))
    height, width = made.parse_args().pixels
    config, latent = usual_config(**SMALL | {"num_layers": LAYERS}), (16, 1, height // 8, width // 8)
    model = meta_transformer(config).to_empty(device="cpu")
    model.rope = type(model)(**SMALL | {"num_layers": 0}).rope
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    inputs = torch.randn(1, *latent), torch.rand(1), torch.randn(1, TEXT_TOKENS, config.text_dim)

    def forward() -> None:
        with torch.no_grad():
            velocity(model, state(*inputs))

    def step() -> None:
        velocity(model, state(*inputs)).square().mean().backward()

    before, forward_seconds = rate(), seconds(forward)
    between = rate()
    model.enable_gradient_checkpointing()
    step_seconds = seconds(step)
    fastest = max(before, between, rate())
    policy = CheckpointPolicy()
    flops = count_flops(config, latent)
    ideal = flops.forward, (1 + flops.recomputed(policy)) * flops.forward + flops.backward(trained=1)
    print(f"{height}x{width}, {LAYERS} layers, {fastest / 1e9:.0f} GFLOP a CPU second in a large product\n")
    head("", "CPU s", "times its operations at that rate")
    for name, took, operations in zip(
        ("forward", "forward, recomputed, backward"), (forward_seconds, step_seconds), ideal, strict=True
    ):
        row(name, f"{took:.2f}", f"{took * fastest / operations:.2f}")
    print()
    head("in the forward pass", "share")
    for kind, share in shares(forward).items():
        row(kind, f"{100 * share:.1f} %")


if __name__ == "__main__":
    main()
