"""A text encoder's tokenizer as ComfyUI's file has it: sentencepiece's model, the bytes of a tensor."""

from pathlib import Path

import transformers  # whose class takes a second to import: where it is used
from safetensors import safe_open

from wandistiller.network.weight_reader import TOKENIZER
from wandistiller.utils.errors import ConfigError


def write_tokenizer(file: Path, folder: Path) -> None:
    """Write the tokenizer in a text encoder's file as transformers' own; raises ConfigError if it is none."""
    from transformers.convert_slow_tokenizer import import_protobuf

    try:
        with safe_open(file, "np") as opened:
            raw = opened.get_tensor(TOKENIZER).tobytes()
        model = import_protobuf().ModelProto.FromString(raw)
        pieces = [(piece.piece, piece.score) for piece in model.pieces]
        characters = model.normalizer_spec.precompiled_charsmap or None
        how = {"vocab": pieces, "_spm_precompiled_charsmap": characters, "extra_ids": 0}
        transformers.T5TokenizerFast(**how).save_pretrained(folder)
    except Exception as error:  # tokenizers raises it bare
        text = f"its tokenizer, the tensor `{TOKENIZER}`, cannot be read: {error!r}"
        raise ConfigError(f"{file}: {text}. Give ComfyUI's file in 16 bits, or fetch it again.") from None
