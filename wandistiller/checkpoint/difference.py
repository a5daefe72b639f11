"""In words: where the run of a checkpoint and this one differ. What identifies a run is partly hashes."""

import json
from typing import Any

MADE_OF = {
    "teacher": ("teacher_path", "teacher_revision", "teacher_lora"),
    "student": ("student_config",),
    "guidance": ("guidance_scale", "guidance_scale_2", "negative_prompt"),
    **dict.fromkeys(("vae", "text_encoder", "image_encoder"), ("teacher_path", "teacher_revision")),
    "data": (
        *("data_path", "height", "width", "num_frames", "buckets", "rollout_steps", "rollouts_per_prompt"),
        *("seed", "shift", "video_fps", "fit", "background", "clips_per_video"),
    ),
}
"""Keys of the identity that are hashes or lists -> the settings behind them."""
OTHERWISE = {
    **dict.fromkeys(("teacher", "vae", "text_encoder", "image_encoder"), "its files are not as they were"),
    "student": "the one that it starts from was trained in another way, or lies in another place",
    "data": "other prompts, or names of media",
}
NAMED = 5


def in_words(key: str, saved: dict[str, Any], now: dict[str, Any]) -> str:
    """Say what of a key of the identity was other.

    Args:
        saved, now: {"identity", "facts", "run", "files"} of the checkpoint and of this run.
    """
    if key not in MADE_OF:
        return _changes(*({key: state["identity"].get(key)} for state in (saved, now)), key)
    found = [_changes(*({name: state["run"].get(name) for name in MADE_OF[key]} for state in (saved, now)))]
    if key == "student":
        before, after = (state["facts"].get("before", []) for state in (saved, now))
        if before != after:
            found.append(f"what it starts from was {json.dumps(before)}, now {json.dumps(after)}")
    files = [state.get("files", {}).get(key) for state in (saved, now)]
    if all(files) and (other := sorted(f for f in files[0] | files[1] if files[0].get(f) != files[1].get(f))):
        more = f" and {len(other) - NAMED} more" if len(other) > NAMED else ""
        found.append(f"not as they were: {', '.join(other[:NAMED])}{more}")
    return "; ".join(filter(None, found)) or OTHERWISE[key]


def _changes(before: dict[str, Any], after: dict[str, Any], known: str = "") -> str:
    """Return the settings that differ; of a nested object, the innermost.

    Args:
        known: one whose name the reader has already.
    """
    first, second = _leaves(before), _leaves(after)
    listed = []
    for name in first | second:
        if first.get(name) != second.get(name):
            before, after = (
                json.dumps(leaves[name], ensure_ascii=False, default=str) if name in leaves else "not given"
                for leaves in (first, second)
            )
            listed.append(
                f"{before}, now {after}" if name == known else f"`{name}` was {before}, now {after}"
            )
    more = [f"and {len(listed) - NAMED} more"] if len(listed) > NAMED else []
    return ", ".join(listed[:NAMED] + more)


def _leaves(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested objects: {"params.lr": 0.1}; what is null is not given."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        whole = isinstance(inner, dict) and inner
        found |= _leaves(inner, f"{prefix}{key}.") if whole else {f"{prefix}{key}": inner}
    return {name: inner for name, inner in found.items() if inner is not None}
