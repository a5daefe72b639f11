"""Invariants of a refactoring: losses, exported weights and messages of two checkouts, side by side.

    python tests/bench/invariants.py record before.json --checkout OTHER_CHECKOUT
    python tests/bench/invariants.py record after.json
    python tests/bench/invariants.py compare before.json after.json

`record` runs the command line of a checkout (this one by default) in real processes, about 25 minutes on two
cores. Record both on the same machine: another CPU may round differently. `compare` exits with 1 where a
loss, a gradient norm or a file differs in one bit. Messages may be reworded on purpose, so their differences
are printed, not judged.
"""

import difflib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, parser
from image_data import image_data
from published_wan import write_wans

HOST = {"1": 192, "4": 512, "8": 1000}
"""GiB of CPU memory of a machine, by its number of GPUs."""
SMALL = {
    "teacher_path": "tiny",
    "data_path": "tiny",
    "teacher_deepspeed_config": "offload",
    "guidance_scale": 1.5,
    "guidance_scale_2": 1.5,
    "height": 64,
    "width": 64,
    "rollout_steps": 2,
    "prepare_batch": 8,
    "sample_steps": 2,
    "sample_prompts": ["a red circle on a purple background, bottom"],
}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}}
ENGINE = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": ADAM,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
ZERO3_BF16 = {
    **ENGINE,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
RUNS: dict[str, dict[str, Any]] = {
    "quick start, float32, 20 steps": {
        "recipe": "ds_configs/recipes/quickstart.json",
        "max_steps": 20,
        "sample_steps": 2,
    },
    "ZeRO-3 in bf16, feature matching": {
        **SMALL,
        "deepspeed_config": ZERO3_BF16,
        "objective": "feature",
        "max_steps": 6,
        "save_every": 3,
        "student_config": "ds_configs/students/half_mixed.json",
    },
    "LoRA": {
        **SMALL,
        "deepspeed_config": ENGINE,
        "lora": {"rank": 4, "alpha": 4, "targets": ["to_q", "to_v"]},
        "max_steps": 4,
        "student_config": {"init": "teacher", "experts": "one"},
    },
    "EMA": {**SMALL, "deepspeed_config": ENGINE, "ema": 0.9, "max_steps": 4},
    "student of two experts": {
        **SMALL,
        "deepspeed_config": ENGINE,
        "max_steps": 6,
        "student_config": "ds_configs/students/half_two_experts.json",
    },
}
DMD2 = {"name": "dmd2", "steps": 2, "critic_updates": 2}
RUNS |= {
    "dmd2 with heads, and consistency": {
        **SMALL,
        "deepspeed_config": ENGINE,
        "objective": [DMD2 | {"gan": 0.03, "sampler": "renoise"}, {"name": "consistency", "intervals": 8}],
        "max_steps": 3,
        "save_every": 2,
    },
    "dmd2 of one expert of two": {
        **SMALL,
        "deepspeed_config": ENGINE | {"gradient_accumulation_steps": 2, "train_batch_size": 4},
        "student_config": {"init": "teacher", "experts": "two"},
        "objective": DMD2 | {"steps": 4, "expert": "high_noise"},
        "shift": 7.0,
        "max_steps": 2,
    },
    "ranks that share samples": {
        **SMALL,
        "deepspeed_config": ENGINE | {"train_batch_size": 2},
        "context_parallel": 2,
        "objective": DMD2 | {"critic_follows": 0.03},
        "max_steps": 2,
    },
}
EXPORTS = {
    "diffusers": ["--output", "pipeline"],
    "diffusers, float32": ["--output", "pipeline32", "--dtype", "float32"],
    "original": ["--output", "original.safetensors", "--format", "original"],
    "original, fp8": ["--output", "fp8.safetensors", "--format", "original", "--dtype", "float8_e4m3fn"],
    "LoRA": ["--output", "lora", "--adapter"],
    "LoRA, original": ["--output", "lora.safetensors", "--adapter", "--format", "original"],
}
MEASURED = {"loss", "grad_norm", "seconds", "samples_per_second", "memory_gib"}
"""Metrics that differ from run to run, or have a row of their own."""
BAD = {
    "unknown recipe key": {"max_step": 3},
    "wrong type": {"max_steps": "many"},
    "teacher that is not there": {"teacher_path": "nowhere"},
    "prompts that are not there": {"data_path": "nowhere.txt"},
    "unknown DeepSpeed key": {"deepspeed_config": {**ENGINE, "zero_optimisation": {"stage": 2}}},
    "wrong value in a DeepSpeed section": {"deepspeed_config": {**ENGINE, "zero_optimization": {"stage": 7}}},
    "frozen teacher at stage 2": {
        "teacher_deepspeed_config": {"zero_optimization": {"stage": 2}},
    },
    "batch that does not divide": {
        "deepspeed_config": {**ENGINE, "train_micro_batch_size_per_gpu": 2, "train_batch_size": 3}
    },
    "unknown objective and student key": {"objective": "velocty", "student_config": {"num_layer": 3}},
    "size that is no multiple": {"height": 65, "num_frames": 3},
}


def run(checkout: Path, words: list[str], ranks: int, code: int | None = 0) -> str:
    """Run a command of the checkout's own package; its stderr."""
    start = [sys.executable, "-m"]
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start += ["torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}", "-m"]
    env = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [*start, "wandistiller", *words], capture_output=True, text=True, cwd=checkout, env=env
    )
    if code is not None and done.returncode != code:
        sys.exit(f"exit code {done.returncode}: {' '.join(words)}\n{done.stdout}\n{done.stderr}")
    return f"exit code {done.returncode}\n{done.stderr}"


def digests(path: Path) -> dict[str, str]:
    """The sha256 of all weights and model settings under `path`, or of files that begin with its name."""
    files = path.rglob("*") if path.is_dir() else path.parent.glob(f"{path.stem}*.safetensors")
    settings = ("config.json", "scheduler_config.json", "model_index.json")
    kept = [f for f in files if f.suffix == ".safetensors" or f.name in settings]
    return {str(f.relative_to(path.parent)): hashlib.sha256(canonical(f)).hexdigest() for f in sorted(kept)}


def canonical(file: Path) -> bytes:
    """Return a file's bytes; of safetensors without the order of keys and of peft's sets in the header."""
    raw = file.read_bytes()
    if file.suffix != ".safetensors":
        return raw
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    lora = json.loads(header.get("__metadata__", {}).pop("lora_adapter_metadata", "{}"))
    header["lora"] = {key: sorted(v) if isinstance(v, list) else v for key, v in lora.items()}
    return json.dumps(header, sort_keys=True).encode() + raw[8 + length :]


def record(checkout: Path, names: list[str]) -> dict[str, Any]:
    """Losses and gradient norms of each run, digests of its exports, and the ten messages."""
    found: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp())
    for number, name in enumerate(names):
        output = folder / str(number)
        settings = dict(RUNS[name])
        words = ["--recipe", settings.pop("recipe")] if "recipe" in settings else []
        if words:
            words += [str(w) for key, value in settings.items() for w in (f"--{key}", value)]
        else:
            (folder / f"{number}.json").write_text(json.dumps(settings))
            words = ["--recipe", str(folder / f"{number}.json")]
        run(checkout, ["train", *words, "--output_dir", str(output)], ranks=2)
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        found[name] = {
            "loss": [line["loss"] for line in lines],
            "grad_norm": [line["grad_norm"] for line in lines],
            "other metrics": [{k: v for k, v in line.items() if k not in MEASURED} for line in lines],
        }
        found[name]["student"] = digests(output / "student")
        for export, flags in EXPORTS.items():
            if ("LoRA" in export) != (name == "LoRA"):
                continue
            flags = [
                str(folder / f"{number}_{flag}") if previous == "--output" else flag
                for previous, flag in zip(["", *flags], flags, strict=False)
            ]
            run(checkout, ["export", "--checkpoint", str(output), *flags], ranks=1)
            found[name][export] = digests(Path(flags[1]))
        print(f"{name}: losses {found[name]['loss'][0]:.6f} to {found[name]['loss'][-1]:.6f}", flush=True)
    messages = {}
    for name, wrong in BAD.items():
        (folder / "bad.json").write_text(
            json.dumps({**SMALL, "deepspeed_config": ENGINE, "output_dir": "runs/never", **wrong})
        )
        messages[name] = run(
            checkout, ["train", "--recipe", str(folder / "bad.json"), "--dry_run"], ranks=1, code=None
        )
        messages[name] = messages[name].replace(str(folder), "FOLDER").replace(str(checkout), "CHECKOUT")
    return found | {"messages": messages | plans(checkout, folder)}


def plans(checkout: Path, folder: Path) -> dict[str, str]:
    """What `plan` prints for each recipe of ds_configs/machines, whose name has the GPUs, and GiB of each."""
    (folder / "published").mkdir()
    write_wans(folder / "published")
    (folder / "prompts.txt").write_text("a red circle\n")
    image_data(folder)
    found = {}
    for recipe in sorted((checkout / "ds_configs" / "machines").glob("*.json")):
        gpus, each = recipe.stem.split("_")[0].split("x")
        given = json.loads(recipe.read_text())
        teacher = folder / "published" / given["teacher_path"]
        words = ["--recipe", str(recipe), "--teacher_path", str(teacher)]
        words += ["--data_path", str(folder / given["data_path"]), "--output_dir", str(folder / "planned")]
        words += f"--gpus {gpus} --gpu_memory {each} --host_memory {HOST[gpus]} --disk 1800".split()
        text = run(checkout, ["plan", *words], ranks=1, code=None)
        found[f"plan {recipe.stem}"] = text.replace(str(folder), "FOLDER").replace(str(checkout), "CHECKOUT")
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Print what differs; whether all numbers and files are equal."""
    equal = True
    for name in sorted((before.keys() & after.keys()) - {"messages"}):
        for key in sorted(before[name].keys() | after[name].keys()):
            same = before[name].get(key) == after[name].get(key)
            equal &= same
            print(f"{'equal  ' if same else 'DIFFERS'}  {name}: {key}")
    for name, text in before["messages"].items():
        new = after["messages"].get(name, "")
        print(f"{'equal   ' if new == text else 'reworded'} message: {name}")
        if new != text:
            lines = difflib.ndiff(text.splitlines(), new.splitlines())
            print("".join(f"    {line}\n" for line in lines if line[0] in "+-"), end="")
    return equal


def main() -> None:
    made = parser(__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--checkout", type=Path, default=ROOT)
    recording.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="RUN")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = made.parse_args()
    if given.command == "record":
        given.file.write_text(json.dumps(record(given.checkout.resolve(), given.only), indent=1))
    elif not compare(json.loads(given.before.read_text()), json.loads(given.after.read_text())):
        sys.exit(1)


if __name__ == "__main__":
    main()
