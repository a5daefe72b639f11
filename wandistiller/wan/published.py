"""Wans that are known by the shapes of their tensors, published and embedded: their pipelines' JSON files."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from wandistiller.utils.files import TINY, read_json
from wandistiller.wan.checks import IMAGE_TO_VIDEO, TEXT_TO_VIDEO
from wandistiller.wan.components import COMPONENTS, UMT5_XXL
from wandistiller.wan.hub import CONFIG_FILES
from wandistiller.wan.transformer_config import TransformerConfig

VAE21 = {"_class_name": "AutoencoderKLWan"}
"""Wan2.1's, whose settings are the defaults of diffusers' class."""
# fmt: off
VAE22 = VAE21 | {
    "base_dim": 160, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12,
    "decoder_base_dim": 256, "scale_factor_temporal": 4, "scale_factor_spatial": 16, "patch_size": 2,
    "latents_mean": [
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
        0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
        -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ],
    "latents_std": [
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
        0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
        0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
}
"""Wan2.2 5B's. Source: Wan2.2, wan/modules/vae2_2.py."""
SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler", "num_train_timesteps": 1000, "solver_order": 2,
    "prediction_type": "flow_prediction", "use_flow_sigmas": True,
}
SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
FIVE = {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48}
# fmt: on


@dataclass(frozen=True)
class KnownWan:
    """A Wan whose architecture is known."""

    name: str
    """Its hub id, or the name of an embedded one."""
    files: dict[str, dict[str, Any]]
    """Content of its JSON files, by their names in diffusers' folder."""

    @property
    def networks(self) -> int:
        return sum(file.startswith("transformer") for file in self.files)

    @property
    def transformer(self) -> TransformerConfig:
        return TransformerConfig.of(self.files["transformer/config.json"])


@cache
def known_wans() -> list[KnownWan]:
    """List the Wans that have no image encoder."""
    wans = [
        _published("Wan2.1-T2V-14B", {}, {}),
        _published("Wan2.1-T2V-1.3B", SMALL, {}),
        _published("Wan2.2-T2V-A14B", {}, {"boundary_ratio": 0.875}),
        _published(
            "Wan2.2-I2V-A14B", {"in_channels": 36}, {"boundary_ratio": 0.9, "_class_name": IMAGE_TO_VIDEO}
        ),
        _published("Wan2.2-TI2V-5B", FIVE, {"expand_timesteps": True}, VAE22, shift=5.0),
    ]
    for name, folder in TINY.items():
        there = [file for file in CONFIG_FILES if file.endswith(".json") and (folder / file).is_file()]
        wans.append(KnownWan(name, {file: read_json(folder / file) for file in there}))
    return wans


def _published(
    name: str, sizes: dict[str, Any], index: dict[str, Any], vae: dict[str, Any] = VAE21, shift: float = 3.0
) -> KnownWan:
    """Make a Wan of diffusers' default config with other `sizes`, and other keys in its model_index.json."""
    experts = ["transformer", "transformer_2"] if "boundary_ratio" in index else ["transformer"]
    kinds = {part: COMPONENTS[part] for part in [*experts, "vae", "text_encoder", "tokenizer"]}
    classes = {part: [library, names[0]] for part, (library, names) in kinds.items()}
    hub_id = f"Wan-AI/{name}-Diffusers"
    usual = {"_class_name": TEXT_TO_VIDEO, "_name_or_path": hub_id, "boundary_ratio": None}
    usual |= classes | {"scheduler": ["diffusers", SCHEDULER["_class_name"]]}
    config = TransformerConfig.usual(**sizes).raw
    config = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
    files = {"model_index": usual | index, "scheduler/scheduler_config": SCHEDULER | {"flow_shift": shift}}
    files |= {"vae/config": vae, "text_encoder/config": UMT5_XXL} | {f"{e}/config": config for e in experts}
    return KnownWan(hub_id, {f"{file}.json": content for file, content in files.items()})
