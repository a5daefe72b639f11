"""DeepSpeed JSONs as other trainers publish them, brought to the names and types that are checked here.

Nothing that DeepSpeed (0.19.8) would do changes: it takes the same names itself, or ignores them.
"""

from collections.abc import Collection
from typing import Any, get_args

from wandistiller.engine.ds_schema import BLOCK, MODELS, PARAMS, SCHEDULERS, TABLES, section_of
from wandistiller.engine.ds_unsupported import NOT_OFFERED, is_on
from wandistiller.utils.validation import Count, Index

COMMENTS = ("_", "/", "#")
"""First characters of keys that hold remarks; so does `comment`."""
OLD_NAMES = {
    "": {"bfloat16": "bf16"},
    "aio": {"thread_count": "intra_op_parallelism"},  # until DeepSpeed 0.15
    "zero_optimization": {"stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save"},
}
OF_FIELDS = {
    section: {key: field.alias for key, field in model.model_fields.items() if field.alias}
    for section, model in MODELS.items()
}
"""Names of the fields of DeepSpeed's models, which they take beside their aliases -> the aliases."""
NULLABLE: dict[str, Collection[str]] = {
    "": ("steps_per_print", "communication_data_type"),
    "flops_profiler": ("output_file",),
    "activation_checkpointing": ("number_checkpoints",),
} | {
    section: [k for k, f in model.model_fields.items() if type(None) in get_args(f.annotation)]
    for section, model in MODELS.items()
}
"""Keys of DeepSpeed's tables whose default is null, and of its models."""
MAY_BE_OFF = {*NOT_OFFERED, "eigenvalue"}
"""Sections that are refused unless they are switched off; DeepSpeed refuses the last one even then."""
OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Old switches -> the sections that replace them."""


def present_form(ds: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `ds` without remarks, null for a default, and sections that are switched off.

    Names of DeepSpeed's fields become their aliases, old names new ones, and 1e5 for a count an integer.
    """
    own = {BLOCK: ds[BLOCK]} if BLOCK in ds else {}
    ds = _without_remarks({key: value for key, value in ds.items() if key != BLOCK}) | own
    ds = {k: v for k, v in ds.items() if k not in MAY_BE_OFF or is_on(v, default=1.0)}
    if isinstance(ds.get("compile"), dict) and ds["compile"].get("enabled") is False:
        del ds["compile"]  # of DeepSpeed 0.14
    for section, names in (*OLD_NAMES.items(), *OF_FIELDS.items()):
        _rename(section_of(ds, section), names)
    for section, keys in NULLABLE.items():
        given = section_of(ds, section)
        for key in [k for k in keys if k in given and given[k] is None]:
            del given[key]
    for section, types in (TABLES | PARAMS).items():
        given = section_of(ds, section)
        for key, value in given.items():
            if types.get(key) in (Count, Index, int) and isinstance(value, float) and value.is_integer():
                given[key] = int(value)
    zero = section_of(ds, "zero_optimization")
    zero.pop("cpu_offload_use_pin_memory", None)  # which DeepSpeed reads and does not use
    for old, new in OFFLOADS.items():  # it refuses both together
        if zero.get(old) is False or (zero.get(old) is True and new not in zero):
            if zero.pop(old):
                zero[new] = {"device": "cpu"}
    schedule = section_of(ds, "scheduler")
    for name in SCHEDULERS:  # DeepSpeed knows the exact name only
        if isinstance(given := schedule.get("type"), str) and given.lower() == name.lower():
            schedule["type"] = name
    return ds


def _without_remarks(value: Any) -> Any:
    """Return a deep copy without keys that hold remarks."""
    if isinstance(value, list):
        return [_without_remarks(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_remarks(v)
        for key, v in value.items()
        if not key.startswith(COMMENTS) and key.lower() not in ("comment", "comments")
    }


def _rename(section: dict[str, Any], names: dict[str, str]) -> None:
    """Give keys in place their other names, unless those are there too."""
    for old in names.keys() & section.keys():
        if names[old] not in section:
            section[names[old]] = section.pop(old)
