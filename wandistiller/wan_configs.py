"""What the JSON files of a Wan pipeline must say, checked before anything is built from them."""

from typing import Any

from wandistiller.kinds import kind_problems
from wandistiller.problems import problem

TRANSFORMER = {
    "an integer from 1 to 1024": "num_layers num_attention_heads",
    "an even integer from 2 to 1024": "attention_head_dim",  # for rope
    "an integer from 1 to 1000000": "ffn_dim freq_dim text_dim in_channels out_channels rope_max_seq_len",
    "three positive integers": "patch_size",
    "true or false": "cross_attn_norm",
    "a positive number": "eps",
    "null": "image_dim added_kv_proj_dim pos_embed_seq_len",  # of image-to-video
}
NEEDED = ("num_layers num_attention_heads attention_head_dim ffn_dim text_dim in_channels out_channels rope_max_seq_len "
          "patch_size cross_attn_norm").split()  # fmt: skip
VAE = {
    "an integer from 1 to 1024": "z_dim base_dim num_res_blocks in_channels out_channels scale_factor_spatial "
    "scale_factor_temporal",
    "a list of numbers": "latents_mean",
    "a list of positive numbers": "latents_std",
}
SCHEDULER = {"a positive number up to 1000": "flow_shift shift", "an integer from 1 to 1024": "solver_order",
             "text": "_class_name"}  # fmt: skip


def transformer_problems(where: str, config: dict[str, Any]) -> list[str]:
    """What keeps a WanTransformer3DModel from being made of `config`."""
    found = _missing(where, config, NEEDED) + kind_problems(where, config, TRANSFORMER)
    if (name := config.get("_class_name", "WanTransformer3DModel")) != "WanTransformer3DModel":
        found.append(problem(where, "_class_name", name, "Give a text-to-video Wan, whose class is WanTransformer3DModel."))
    return found


def pipeline_problems(name: str, experts: dict[str, dict[str, Any]], vae: dict[str, Any], scheduler: dict[str, Any]) -> list[str]:
    """What is wrong within the parts of a pipeline, and between them.

    Args:
        experts: transformer config by folder name, the high-noise expert's first.
    """
    first, vae_file = next(iter(experts)), f"{name}/vae/config.json"
    found = [p for folder, config in experts.items() for p in transformer_problems(f"{name}/{folder}/config.json", config)]
    found += _missing(vae_file, vae, ["latents_mean", "latents_std", "z_dim"]) + kind_problems(vae_file, vae, VAE)
    given = {key: value for key, value in scheduler.items() if value is not None or key not in ("flow_shift", "shift")}
    scheduler_file = f"{name}/scheduler/scheduler_config.json"
    found += _missing(scheduler_file, scheduler, ["_class_name"]) + kind_problems(scheduler_file, given, SCHEDULER)
    if found:
        return found
    for folder, config in experts.items():
        for key in NEEDED:
            if config[key] != experts[first][key]:
                found.append(problem(f"{name}/{folder}/config.json", key, config[key],
                                     f"The other expert has {experts[first][key]}; give two of one shape."))  # fmt: skip
    channels = experts[first]["in_channels"]
    if (out := experts[first].get("out_channels") or channels) != channels:
        found.append(problem(f"{name}/{first}/config.json", "out_channels", out,
                             f"It reads {channels} channels; only a Wan that answers with as many as it reads can be distilled."))
    for key, has in (("z_dim", vae["z_dim"]), *((k, len(vae[k])) for k in ("latents_mean", "latents_std"))):
        if has != channels:
            found.append(f"{vae_file}: `{key}` is for {has} channels, the transformer for {channels}. Give the VAE that "
                         "belongs to it.")  # fmt: skip
    return found


def _missing(where: str, config: dict[str, Any], needed: list[str]) -> list[str]:
    return [f"{where}: `{key}` is missing. Fetch this file again." for key in needed if key not in config]
