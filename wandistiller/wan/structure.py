"""Names in diffusers' WanTransformer3DModel: its blocks, their parts, and the axes of its linear maps."""

from wandistiller.network.names import in_block, split_name

BLOCK_CLASS = "WanTransformerBlock"
PARTS = {"blocks": (), "attention": ("attn1", "attn2"), "feed_forward": ("ffn",)}
ATTENTIONS, (FEED_FORWARD,) = PARTS["attention"], PARTS["feed_forward"]
IMAGE_MAPS = ("add_k_proj", "add_v_proj")
"""Linear maps of cross-attention to states of given frames."""
VALUES = "to_v"
NORMED = {"norm_q": "to_q", "norm_k": "to_k", "norm_added_k": "add_k_proj"}
"""Norms within an attention, and the maps whose outputs they take."""

TABLE = "scale_shift_table"
"""The parameter of a block, and of the network, that is added to what the time makes of it."""
MODULATION = "time_proj"
"""The linear map that makes the six modulations of all blocks."""
SHIFT_ROWS = slice(0, None, 3)
"""Rows of shifts; the order is shift, scale, gate, twice; shift and scale in the last table."""
STREAM_NORMS = ("norm1", "norm2", "norm3", "norm_out")
"""Norms that read the residual stream."""
AFFINE_NORM = "norm2"
"""The one of them that has weights."""
CONDITION = "condition_embedder"
"""The module that makes what blocks read beside the stream; its norms read nothing of that."""
IMAGE_NORM = f"{CONDITION}.image_embedder.norm2"
"""The norm, with weights, whose output is the stream of given frames, which cross-attentions read."""
TEXT_READER, TEMB_READER = "blocks.0.attn2.to_k", "condition_embedder.act_fn"
"""Modules whose inputs are the text stream, which every cross-attention reads, and the time's embedding."""

AXES = {
    "patch_embedding": ("stream", None),
    "condition_embedder.time_embedder.linear_1": ("time", None),
    "condition_embedder.time_embedder.linear_2": ("temb", "time"),
    "condition_embedder.text_embedder.linear_1": ("words", None),
    "condition_embedder.text_embedder.linear_2": ("text", "words"),
    "condition_embedder.image_embedder.ff.net.2": ("image", None),
    "attn1.to_q": (".attn1.to_q", "stream"),
    "attn1.to_k": (".attn1.to_k", "stream"),
    "attn1.to_v": (".attn1.to_v", "stream"),
    "attn1.to_out.0": ("stream", ".attn1.to_v"),
    "attn2.to_q": (".attn2.to_q", "stream"),
    "attn2.to_k": (".attn2.to_k", "text"),
    "attn2.to_v": (".attn2.to_v", "text"),
    "attn2.add_k_proj": (".attn2.add_k_proj", "image"),
    "attn2.add_v_proj": (".attn2.to_v", "image"),
    "attn2.to_out.0": ("stream", ".attn2.to_v"),
    "ffn.net.0.proj": (".ffn", "stream"),
    "ffn.net.2": ("stream", ".ffn"),
    "proj_out": (None, "stream"),
}
"""The axes that each linear map writes to and reads from; with a dot, one for each block."""


def axes_of(name: str) -> list[str | None]:
    """Return the axes that a linear map writes to and reads from."""
    number, inside = split_name(name)
    ends = AXES.get(inside, (None, None))
    return [in_block(number, end[1:]) if end and end[0] == "." else end for end in ends]


def reader_of(axis: str) -> str:
    """Return the linear map that reads an axis which one map reads."""
    number, inside = split_name(axis)
    if number is None:
        return next(name for name, (_, read) in AXES.items() if read == axis)
    return in_block(number, next(name for name, (_, read) in AXES.items() if read == f".{inside}"))
