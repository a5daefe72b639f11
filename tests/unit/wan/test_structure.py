"""The names that the package knows of a Wan transformer are those that diffusers gives."""

from small_wan import small_transformer
from torch import nn

from wandistiller.network.adapters import TARGETS, linear_layers
from wandistiller.network.names import in_block, is_in_block, split_name
from wandistiller.wan import structure
from wandistiller.wan.transformer_config import TransformerConfig

MODEL = small_transformer(0, 2, image_dim=24, added_kv_proj_dim=64)  # as Wan2.1 I2V: with all there is
MODULES = dict(MODEL.named_modules())


def test_every_linear_map_of_the_network_has_its_axes() -> None:
    maps = {split_name(n)[1] for n, m in MODULES.items() if isinstance(m, nn.Linear | nn.Conv3d)}
    without = {"time_proj", "image_embedder.ff.net.0.proj"}  # six of a width; of the width of CLIP's states
    assert maps == structure.AXES.keys() | {f"condition_embedder.{name}" for name in without}


def test_the_linear_layers_are_known_by_the_shapes_of_one_block() -> None:
    config = TransformerConfig.of(MODEL.config)
    assert config.linear_layers == linear_layers(MODEL)
    assert config.shapes == {name: [*p.shape] for name, p in MODEL.named_parameters()}


def test_every_other_name_is_in_the_network() -> None:
    block = MODEL.blocks[1]
    assert type(block).__name__ == structure.BLOCK_CLASS
    assert all(block.get_submodule(name) for names in structure.PARTS.values() for name in names)
    for attention in map(block.get_submodule, structure.ATTENTIONS):
        assert all(hasattr(attention, name) for name in TARGETS)
    assert all(hasattr(block.attn2, name) for name in structure.NORMED)
    assert {structure.TEXT_READER, structure.TEMB_READER} <= MODULES.keys()
    assert {structure.TABLE, in_block(1, structure.TABLE)} <= dict(MODEL.named_parameters()).keys()
    assert {name.split(".")[-1] for name in MODULES} >= {*structure.STREAM_NORMS, structure.AFFINE_NORM}


def test_a_name_is_that_of_a_block_and_a_name_in_it() -> None:
    for name in MODULES:
        number, inside = split_name(name)
        assert (name if number is None else in_block(number, inside)) == name
        assert is_in_block(name) == name.startswith("blocks.")


def test_an_axis_is_read_by_the_map_that_says_so() -> None:
    for axis in ("time", "words", "blocks.1.ffn", "blocks.0.attn2.to_v"):
        assert structure.axes_of(structure.reader_of(axis))[1] == axis
