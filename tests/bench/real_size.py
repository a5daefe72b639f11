"""A published Wan's size on CPUs: planned beside measured memory, disk and CPU time of a whole run.

    python tests/bench/real_size.py                 # Wan2.1 1.3B, an hour on two cores, 30 GB of disk
    python tests/bench/real_size.py --student_layers 2 --pixels 256 256    # shorter
    python tests/bench/real_size.py --size 14B --student_layers 1 --placement files --pixels 256 256

Writes a pipeline with random weights in the published shapes of transformer and VAE, shard by shard; its text
encoder has one layer. Then: prepare, three steps, of which the second is stopped and resumed, export, and two
steps of sampling by diffusers alone. FOLDER keeps the pipeline; the run in it is made anew.

`products` is the time that the step's matrix products and attention take at the rate of one large product,
which is measured before and after the run.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import ROOT, head, parser, row
from diffusers import AutoencoderKLWan
from planned import predicted
from published_wan import LARGE, SMALL, VAE21
from ranks import environment, metrics, write_json
from safetensors.torch import save_file
from small_wan import WORDS, make_wan
from transformers import UMT5Config, UMT5EncoderModel

from wandistiller.config.job import Job
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.planner.disk import written
from wandistiller.planner.machine import machine_now
from wandistiller.planner.time import Rates, Times
from wandistiller.utils.files import read_json
from wandistiller.utils.system_memory import GIB
from wandistiller.wan.transformer import meta_transformer
from wandistiller.wan.transformer_config import TransformerConfig

SIZES = {"1.3B": SMALL, "14B": LARGE}
SHARD = 2 * GIB
STOCK = """
import sys, torch
from diffusers import WanPipeline
pipeline = WanPipeline.from_pretrained(sys.argv[1], torch_dtype=torch.float32)
assert "wandistiller" not in sys.modules
frames = pipeline("a red circle", height=int(sys.argv[2]), width=int(sys.argv[3]), num_frames=1,
                  num_inference_steps=2, guidance_scale=1.0, output_type="np").frames
assert frames.shape[1] == 1 and bool((frames == frames).all()), frames.shape
"""


class Used(NamedTuple):
    """What a command took."""

    seconds: float
    cpu: float
    """Seconds of all its processes."""
    peak: int
    """MiB of its first process, with mapped files; not below those of this program, which starts it."""


def write_shards(folder: Path, config: dict[str, Any]) -> None:
    """Write random weights of a transformer in bf16; no more than a shard of them is in memory."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    shards: list[dict[str, torch.Size]] = [{}]
    nbytes = 0
    for name, tensor in meta_transformer(TransformerConfig.of(config)).state_dict().items():
        if nbytes > SHARD:
            shards, nbytes = [*shards, {}], 0
        shards[-1][name], nbytes = tensor.shape, nbytes + 2 * tensor.numel()
    files: dict[str, str] = {}
    for number, shapes in enumerate(shards, 1):
        file = f"diffusion_pytorch_model-{number:05d}-of-{len(shards):05d}.safetensors"
        made = {n: torch.randn(s, dtype=torch.float32).mul_(0.02).bfloat16() for n, s in shapes.items()}
        save_file(made, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(shapes, file)
    write_json(
        folder / "diffusion_pytorch_model.safetensors.index.json", {"metadata": {}, "weight_map": files}
    )
    write_json(folder / "config.json", config)


def pipeline(folder: Path, size: str) -> Path:
    """The pipeline of this size, made unless it is there."""
    target = folder / f"wan_{size}"
    if not target.exists():
        made = make_wan(folder / "making", experts=1)
        write_shards(made / "transformer", SIZES[size])
        heads = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 1, "num_heads": 64}
        encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(WORDS) + 3, **heads))
        encoder.save_pretrained(made / "text_encoder")
        vae = {key: value for key, value in VAE21.items() if key != "_class_name"}
        vae["latents_std"], vae["latents_mean"] = [1.0] * 16, [0.0] * 16
        AutoencoderKLWan(**vae).save_pretrained(made / "vae")
        made.rename(target)
    return target


def timed(words: list[str], code: int = 0, stop: Path | None = None) -> Used:
    """Run a command to its exit code; touch `stop` when the first step of the run beside it is written."""
    began, use = time.perf_counter(), None
    process = subprocess.Popen(words, cwd=ROOT, env=environment(OMP_NUM_THREADS=str(os.cpu_count())))
    while not use:
        time.sleep(1)
        if stop and (lines := stop.with_name("metrics.jsonl")).is_file() and lines.stat().st_size:
            stop.touch()
            stop = None
        pid, status, found = os.wait4(process.pid, os.WNOHANG)  # of this process alone, unlike getrusage
        use = found if pid else None
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == code, f"{' '.join(words)}: exit code {process.returncode}"
    return Used(time.perf_counter() - began, use.ru_utime + use.ru_stime, use.ru_maxrss // 1024)


def product_rate() -> float:
    """10^12 operations a CPU second of a product in float32 of a block's shape; the best of five."""
    a, b, best = torch.randn(1560, 1536), torch.randn(1536, 8960), 0.0
    for _ in range(5):
        began = time.process_time()
        a @ b
        best = max(best, 2e-12 * a.numel() * b.shape[1] / (time.process_time() - began))
    return best


def size_of(folder: Path) -> float:
    """GiB of the files in a folder, each once."""
    places = {(f.stat().st_dev, f.stat().st_ino): f.stat().st_size for f in folder.rglob("*") if f.is_file()}
    return sum(places.values()) / GIB


def shipped(name: str) -> dict[str, Any]:
    """A shipped JSON in float32, which CPUs compute fastest."""
    return read_json(f"ds_configs/{name}.json") | {"bf16": {"enabled": False}}


def settings(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The run's recipe; makes its pipeline and prompts."""
    (folder / "prompts.txt").write_text("a red circle\na blue square\n")
    engine = shipped("student/zero2_offload") | {"gradient_accumulation_steps": 1}
    return {
        "teacher_path": str(pipeline(folder, args.size)),
        "data_path": str(folder / "prompts.txt"),
        "output_dir": str(folder / "run"),
        "student_config": {"num_layers": args.student_layers},
        "deepspeed_config": engine,
        "teacher_deepspeed_config": shipped(f"teacher/{args.placement}"),
        "height": args.pixels[0],
        "width": args.pixels[1],
        "max_steps": 3,
        "rollout_steps": 2,
        "sample_steps": 2,
        "sample_prompts": ["a red circle"],
    }


def report(output: Path, used: dict[str, Used], job: Job, rate: float) -> None:
    """Print what the run took beside its plan.

    Args:
        rate: 10^12 operations a second of a core.
    """
    head("command", "s", "CPU s", "MiB at most, with mapped files")
    for name, one in used.items():
        row(name, f"{one.seconds:.0f}", f"{one.cpu:.0f}", one.peak)
    print()
    head("phase", "planned MiB", "measured MiB", "ratio")
    memory, planned = read_json(output / "memory.json"), predicted(asdict(job.run), 1)
    for phase in (p for p in planned if p in memory and p != "prepare"):  # `train` found a full cache
        measured = round(1024 * max(memory[phase]["host_peak"]))
        row(phase, planned[phase], measured, f"{planned[phase] / measured:.2f}")
    disk = written(job, accelerator=False).whole / GIB
    print(f"\ndisk: run and cache {size_of(output):.2f} GiB; planned {disk:.2f}")
    seconds = min(line["seconds"] for line in metrics(output))
    rates = Rates(tflops=rate * os.cpu_count(), pcie=1e8)
    products = sum(Times(job, replace(machine_now(), ranks=1, ranks_on_node=1), rates).computing().values())
    share, rate = seconds / products, 1000 * rate
    print(f"step: {seconds:.1f} s, {share:.2f} of its products at {rate:.0f} GFLOP/s a core")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, default=Path("runs/bench_real_size"))
    made.add_argument("--size", choices=SIZES, default="1.3B")
    made.add_argument("--student_layers", type=int, default=15)
    made.add_argument("--placement", default="replicated", help="a shipped teacher JSON")
    made.add_argument("--pixels", type=int, nargs=2, default=(480, 832))
    args = made.parse_args()
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(output := folder / "run", ignore_errors=True)
    given = settings(args, folder)
    recipe = str(write_json(folder / "recipe.json", given))
    job, rate = read_job(RunConfig(**given), 1), product_rate()
    command, size = [sys.executable, "-m", "wandistiller"], [str(n) for n in args.pixels]
    used = {"prepare": timed([*command, "prepare", "--recipe", recipe])}
    used["train, stopped"] = timed([*command, "train", "--recipe", recipe], 75, output / "STOP")
    used["train, resumed"] = timed([*command, "train", "--recipe", recipe])
    files = ["--checkpoint", str(output), "--output", str(folder / "comfy.safetensors")]
    used["export"] = timed([*command, "export", *files, "--format", "original"])
    used["sample by diffusers"] = timed([sys.executable, "-c", STOCK, str(output / "student"), *size])
    report(output, used, job, max(rate, product_rate()))


if __name__ == "__main__":
    main()
