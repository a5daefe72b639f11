"""The memory that activations take: what the student keeps until it goes back through it, what a call of the teacher needs."""

from typing import Any

import torch

from wandistiller.deepspeed_json import dtype_name
from wandistiller.recompute import read_recompute
from wandistiller.wan import TEXT_TOKENS, width


def activation_bytes(config: dict[str, Any], ds: dict[str, Any], tokens: int, micro: int, *, accelerator: bool) -> int:
    """What the student keeps for backward of one micro-step, and what it then computes again at once.

    Counted are the tensors of diffusers 0.42's WanTransformer3DModel whose size grows with the tokens, as autograd saves
    them where all weights are trained. With i bytes a number in the engine's precision, D = width and F = ffn_dim, a block
    keeps of each token

        in float32, 4 bytes:  norm1, norm2, norm3 in, norm1, norm3 out, feed-forward out              6 D
        in i bytes:           q, k, v, out of attn1; q, out of attn2; the inputs of attn1, attn2
                              and the feed-forward; attn1's answer before its gate                   10 D
                              before and after the activation                                         2 F
        in the 3 RMS norms    their input, i bytes, in one CUDA kernel; input and quotient, 8 bytes, on the CPU

    and of each text token k, v and one RMS norm. A block that is checkpointed keeps its inputs instead, which are cloned:
    hidden state, text, and the rope tables (float32, sine and cosine); of attention and feed-forward alone the same. The
    height is where backward begins: what is computed again first comes on top, if that is before anything was freed.
    tests/test_footprint.py measures it.

    Args:
        config: of the student's transformer.
        ds: its JSON, checked by `student_engine`.
        tokens: of one sample, as `WanFolder.tokens` has it.
        micro: samples of a micro-step.
    """
    i, wide, ffn, layers = getattr(torch, dtype_name(ds)).itemsize, width(config), config["ffn_dim"], config["num_layers"]
    rms = i if accelerator else 8
    rope = 8 * config["attention_head_dim"] * tokens
    text = TEXT_TOKENS * wide
    attention = micro * (tokens * wide * (6 * i + 3 * rms) + text * (2 * i + rms))
    feed_forward = micro * tokens * 2 * ffn * i
    block = attention + feed_forward + micro * tokens * wide * (6 * 4 + 4 * i)
    ends = rope + micro * (tokens * wide * (2 * 4 + i) + text * 3 * i)
    again = read_recompute(ds)
    if again is None:
        return layers * block + ends
    part, kept, first = {
        "blocks": (block, micro * (tokens * wide + text) * i + rope, block),
        "attention": (attention, micro * text * i + rope, 0),  # its inputs from the stream are counted in the block
        "feed_forward": (feed_forward, 0, feed_forward),
    }[again.checkpoint]
    if (layers - 1) % again.checkpoint_every:
        first = 0
    return layers * block - -(-layers // again.checkpoint_every) * (part - kept) + first + ends


def call_bytes(config: dict[str, Any], ds: dict[str, Any], tokens: int, samples: int, *, accelerator: bool) -> int:
    """What a call without gradients takes at its height, a feed-forward: its hidden units before and after the activation,
    the hidden state, and three tensors of its size that wait or are cast. A CPU without bf16 arithmetic of its own keeps the
    hidden units in float32 first (oneDNN and MKL under torch 2.13); any CPU is taken for one, as it may be another's.

    Args:
        config: of the teacher's transformer.
        ds: its JSON, checked by `teacher_engine`.
        samples: those that it is asked for at once; with guidance each is two.
        accelerator: it computes there, not on a CPU.
    """
    i, wide = getattr(torch, dtype_name(ds)).itemsize, width(config)
    hidden = config["ffn_dim"] * (i + (i if accelerator else 4))
    return samples * (tokens * (4 * wide * i + hidden) + TEXT_TOKENS * wide * i) + 8 * config["attention_head_dim"] * tokens


def compared_bytes(blocks: int, tokens: int, asked: int, seen: int, widths: tuple[int, int], items: tuple[int, int]) -> int:
    """What the comparison of hidden states keeps of `blocks` until backward: the teacher's, the student's in its width, and what
    their projection was made from where the widths differ; and each difference, in float32.

    Args:
        tokens: of one sample.
        asked: samples that the teacher was asked for.
        seen: samples that the student answers at once, those of other terms too.
        widths: of teacher and student.
        items: bytes of a number of each.
    """
    (wide, own), (of_teacher, i) = widths, items
    projected = own * i if own != wide else 0
    return blocks * tokens * (asked * wide * (of_teacher + 4) + seen * (wide * i + projected))
