"""Nothing in a teacher's folder runs: only known classes and keys of its JSON files are used."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import edit_json

from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import SHIPPED
from wandistiller.wan.components import load_pipeline
from wandistiller.wan.pipeline import TINY, open_wan, require_weights

FOREIGN = [
    ("model_index.json", "vae", ["evil", "Evil"]),
    ("model_index.json", "text_encoder", ["os", "system"]),
    ("model_index.json", "scheduler", ["diffusers", "WanPipeline"]),
    ("model_index.json", "image_encoder", ["evil", "Evil"]),
    ("tokenizer/tokenizer_config.json", "auto_map", {"AutoTokenizer": ["evil.Evil", None]}),
    ("tokenizer/tokenizer_config.json", "tokenizer_class", "Evil"),
    ("text_encoder/config.json", "architectures", ["Evil"]),
    ("text_encoder/config.json", "auto_map", {"AutoModel": "evil.Evil"}),
    ("vae/config.json", "_class_name", "Evil"),
    ("transformer/config.json", "quantization_config", {"quant_method": "evil"}),
]


@pytest.mark.parametrize(("file", "key", "value"), FOREIGN)
def test_a_class_or_code_that_is_not_of_wan_is_refused_before_anything_is_loaded(
    wan1: Path, copy_of: Callable[..., Path], file: str, key: str, value: object
) -> None:
    folder = copy_of(wan1)
    edit_json(folder / file, **{key: value})
    with pytest.raises(ConfigError, match=f"{file}: `{key}` is "):
        open_wan(str(folder))


def test_python_files_in_a_folder_are_never_run(
    wan1: Path, copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    folder, marker = copy_of(wan1, weights=True), tmp_path / "ran"
    for part in ("vae", "text_encoder", "tokenizer", "scheduler", "transformer"):
        for name in ("diffusers.py", "transformers.py"):
            (folder / part / name).write_text(f"open({str(marker)!r}, 'w')")
    require_weights(open_wan(str(folder)))
    load_pipeline(folder, torch.float32)
    assert not marker.exists()


def test_no_shipped_json_holds_a_path_of_the_machine_that_wrote_it() -> None:
    files = [*TINY.rglob("*config.json"), TINY / "model_index.json", *SHIPPED.rglob("*.json")]
    assert [f for f in files if '"/tmp' in f.read_text() or '"/home' in f.read_text()] == []
