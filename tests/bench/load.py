"""Memory and time to load a teacher of some 400M random parameters, for every placement and by diffusers.

    python tests/bench/load.py                      # two ranks; needs 4 GB of disk in --folder, which is kept
    python tests/bench/load.py --stored bfloat16 --dtype float32 --layers 20

MiB above the memory of the process before loading, of the worst rank: `peak` while loading, `kept` by
arithmetic, `bar` 1.15 x kept + the largest tensor. `node` is the memory of all ranks together afterwards,
shared pages once. The file is in the page cache for all of them.
"""

import os
import threading
import time
from pathlib import Path

from common import head, on_cpu, parser, row

on_cpu()

import torch
from new_processes import in_new_processes
from ranks import TEACHERS
from small_wan import make_large_wan

MIB = 2**20


def make_teacher(folder: Path, layers: int, stored: str) -> Path:
    """Make a random Wan2.1 1.3B of fewer layers, in files of at most 1 GB."""
    sizes = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "text_dim": 4096}
    target = folder / f"{layers}_layers_{stored}"
    dtype = getattr(torch, stored)
    return make_large_wan(target, dtype, "1GB", **sizes, freq_dim=256, num_layers=layers)


def resident() -> dict[str, int]:
    """MiB of this process: all, and the part that counts shared pages by their share."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    found = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    return {"rss": found["Rss"] / 1024, "pss": found["Pss"] / 1024}


class Peak(threading.Thread):
    """Samples resident memory every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.base, self.pages, self.running = resident(), 0, True

    def run(self) -> None:
        while self.running:
            self.pages = max(self.pages, int(Path("/proc/self/statm").read_text().split()[1]))
            time.sleep(0.003)

    def stop(self) -> float:
        self.running = False
        self.join()
        return self.pages * os.sysconf("SC_PAGE_SIZE") / MIB - self.base["rss"]


def measure(folder: Path, name: str, dtype: str) -> dict[str, float]:
    """On this rank: load the teacher as `name` says, or with from_pretrained."""
    from diffusers import WanTransformer3DModel
    from shipped import placement

    from wandistiller.distributed import collectives
    from wandistiller.engine.patches import patch_deepspeed
    from wandistiller.teacher.build import build_teacher
    from wandistiller.wan import pipeline

    patch_deepspeed()
    collectives.init("warning")
    teacher = pipeline.open_wan(str(folder))
    if name != "from_pretrained":
        placed = placement(name, dtype, swap=folder.parent / "swap")
        if placed.engine.on_nvme:
            from deepspeed.ops.op_builder import AsyncIOBuilder

            AsyncIOBuilder().load(verbose=False)  # its build is no part of loading
    collectives.barrier()
    peak = Peak()
    peak.start()
    start = time.perf_counter()
    if name == "from_pretrained":
        made = WanTransformer3DModel.from_pretrained(folder / "transformer", dtype=getattr(torch, dtype))
    else:
        made = build_teacher(teacher, placed)
    seconds = time.perf_counter() - start
    found = {"peak": peak.stop(), "seconds": seconds, "after": resident()["pss"] - peak.base["pss"]}
    collectives.barrier()  # pages that ranks share count by their share as long as all are there
    del made
    collectives.destroy()
    return found


def kept(folder: Path, name: str, dtype: str, ranks: int) -> tuple[float, float]:
    """MiB that a rank keeps (the owner, where there is one), and of the largest tensor."""
    from wandistiller.teacher.placements.device_map import expand_device_map
    from wandistiller.utils.files import read_json
    from wandistiller.wan import pipeline

    config = pipeline.open_wan(str(folder)).config
    sizes = {
        n: p.numel() * config.dtype_of(n, getattr(torch, dtype)).itemsize
        for n, p in config.meta().named_parameters()
    }
    whole = sum(sizes.values())
    if name.startswith(("sharded", "zero_inference_cpu")):
        whole /= ranks
    if name == "zero_inference_nvme":
        ds = read_json("ds_configs/teacher/zero_inference_nvme.json")["zero_optimization"]["offload_param"]
        whole = ds["buffer_count"] * max(sizes.values()) / ranks  # its buffers; smaller tensors come on top
    if name == "device_map_custom":
        placed = read_json("ds_configs/teacher/device_map_custom.json")["wandistiller"]["device_map"]
        where = expand_device_map(placed, config.top_modules)
        disk = tuple(f"{m}." for m, device in where.items() if device == "disk")
        whole = sum(size for n, size in sizes.items() if not n.startswith(disk))
    return whole / MIB, max(sizes.values()) / MIB


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, default=Path("runs/bench_load"))
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--stored", default="float32", choices=("float32", "bfloat16"))
    made.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--placements", nargs="+", default=TEACHERS)
    args = made.parse_args()
    folder = make_teacher(args.folder, args.layers, args.stored)
    for file in folder.rglob("*.safetensors"):
        file.read_bytes()
    print(f"{args.layers} layers stored in {args.stored}, loaded in {args.dtype}, {args.ranks} ranks\n")
    head("placement", "kept", "bar", "peak", "peak / kept", "node", "seconds")
    for name in ["from_pretrained", *args.placements]:
        ranks = 1 if name == "from_pretrained" else args.ranks
        found = in_new_processes(measure, folder, name, args.dtype, ranks=ranks)
        peak, seconds = (max(of_rank[key] for of_rank in found) for key in ("peak", "seconds"))
        keeps, largest = kept(folder, name, args.dtype, ranks)
        node = sum(of_rank["after"] for of_rank in found)
        sizes = (f"{mib:.0f}" for mib in (keeps, 1.15 * keeps + largest, peak))
        row(name, *sizes, f"{peak / keeps:.2f}", f"{node:.0f}", f"{seconds:.1f}")


if __name__ == "__main__":
    main()
