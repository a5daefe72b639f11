"""A model spread over the GPUs of one rank, its CPU memory and its disk by accelerate, the library for that (an extra)."""

import logging
import warnings
from typing import Any

import torch
from diffusers import WanTransformer3DModel

from wandistiller.placement import Placement, expand_device_map
from wandistiller.wan import parameter_dtype, put, skeleton, top_modules
from wandistiller.weights import WeightReader

WHOLE_BLOCKS = ["WanTransformerBlock"]  # accelerate's hooks move what a block's forward needs as one


def load_dispatched(
    reader: WeightReader, config: dict[str, Any], dtype: torch.dtype, placement: Placement, share: int, device: torch.device
) -> WanTransformer3DModel:
    """Each module where the device map says; what is on "disk" is read from the teacher's own files at each call.

    diffusers' from_pretrained with a device map is not used: with a part on disk it casts what it else keeps in float32
    (diffusers 0.42.1).

    Args:
        share: of how many such models `placement.max_memory` is the sum.
        device: what computes for modules in CPU memory and on disk.
    """
    from accelerate import dispatch_model

    logging.getLogger("accelerate").setLevel(logging.ERROR)
    model = skeleton(config)
    device_map = _device_map(model, config, dtype, placement, share)
    main = device.index if device.type == "cuda" else "cpu"
    index = {}
    for name, p in list(model.named_parameters()):
        wanted = parameter_dtype(name, dtype)
        where = next((d for module, d in device_map.items() if name.startswith(f"{module}.")), main)
        if where == "disk":
            stored = str(reader.stored[name].file)
            index[name] = {"safetensors_file": stored, "weight_name": name, "dtype": str(wanted).removeprefix("torch.")}
            put(model, name, p.to(wanted))
        else:
            value = torch.empty(p.shape, dtype=wanted, device=where)
            reader.read(name, value)
            put(model, name, value)
    model.rope.to(device)
    device_map["scale_shift_table"] = main  # a parameter beside the modules: asked for, then warned of (accelerate 1.15)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dispatch_model(model, device_map, main_device=main, offload_index=index or None, force_hooks=True)


def _device_map(
    model: WanTransformer3DModel, config: dict[str, Any], dtype: torch.dtype, placement: Placement, share: int
) -> dict[str, int | str]:
    from accelerate import infer_auto_device_map
    from accelerate.utils import convert_file_size_to_int, get_balanced_memory, get_max_memory

    if isinstance(placement.device_map, dict):
        return expand_device_map(placement.device_map, top_modules(config))
    given = placement.max_memory and {int(k) if k.isdigit() else k: convert_file_size_to_int(v) // share
                                      for k, v in placement.max_memory.items()}  # fmt: skip
    kept = {name: torch.float32 for name, _ in model.named_parameters() if parameter_dtype(name, dtype) != dtype}
    how = {"no_split_module_classes": WHOLE_BLOCKS, "dtype": dtype, "special_dtypes": kept}
    limits = get_max_memory(given)
    if placement.device_map == "balanced":
        limits = get_balanced_memory(model, max_memory=limits, **how)
    found = infer_auto_device_map(model, max_memory=limits, **how)
    if "" in found:  # all of it fits on one device
        return dict.fromkeys(top_modules(config), found[""])
    return dict(found)
