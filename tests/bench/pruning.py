"""How near each cut of the embedded teacher is to it before any training: prints a Markdown table.

    python tests/bench/pruning.py FOLDER

FOLDER takes the cache of 63 prompts (under a minute to make), which a second run uses again.
"""

import sys
from pathlib import Path
from typing import Any

from wandistiller import distributed, wan
from wandistiller.begin import choose, needs_measuring
from wandistiller.check import read_job
from wandistiller.config import SHIPPED, read_json, read_run_config
from wandistiller.job import Job
from wandistiller.prepare import guided_teacher, prepare
from wandistiller.probes import networks, probes, unguided, velocity_error
from wandistiller.shapes import seen_prompts
from wandistiller.start import start_model

DEPTHS = [{"num_layers": n, "keep_layers": how} for n in (4, 2) for how in ("uniform", "ends", "importance")]
FFN = [{"ffn_dim": share, "ffn_units": how} for share in (0.5, 0.25) for how in ("activation", "weight")]
WIDTHS = [
    {key: share, "width_basis": basis}
    for key, share in (("num_attention_heads", 0.75), ("num_attention_heads", 0.5), ("attention_head_dim", 0.5))
    for basis in ("channels", "principal", "truncate")
]
SOURCES = [{"from_expert": which} for which in ("low_noise", "high_noise", "average")]
FILES = [read_json(file) for file in sorted((SHIPPED / "students").glob("*.json"))]
TWO = [{"experts": "two", **cut} for cut in ({}, *DEPTHS, *FFN, *WIDTHS)]


def job_of(folder: Path, student: dict[str, Any]) -> Job:
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(seen_prompts()[::16]) + "\n")
    changes = {"data_path": str(prompts), "output_dir": str(folder / "run"), "cache_dir": str(folder / "cache"),
               "student_config": student, "teacher_deepspeed_config": "ds_configs/teacher/replicated.json",
               "teacher_dtype": "float32"}  # fmt: skip
    values = {k: v for k, v in read_json("ds_configs/recipes/quickstart.json").items() if k != "teacher_device_strategy"}
    return read_job(read_run_config(values | changes, {}), 1)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    distributed.init("warning")
    first = job_of(folder, {})
    data, text, teacher = prepare(first)
    teacher = teacher or guided_teacher(first, text)
    batches = probes(first, data)
    print("| student | parameters of the teacher's | relative velocity error | by sigma |\n|---|---|---|---|", flush=True)
    whole = sum(p.numel() for m in networks(unguided(teacher)).values() for p in m.parameters())
    for student in [*SOURCES, *FILES, *TWO]:
        job = job_of(folder, student)
        job, cuts = choose(job, data, teacher) if needs_measuring(job) else (job, {})
        models = {e: start_model(job.student, job.student_transformer, job.folder, e, 0, cuts.get(e)).eval()
                  for e in job.student_experts}  # fmt: skip

        def answer(batch: Any, models: dict = models) -> Any:
            model = models.get(batch.expert, next(iter(models.values())))
            return wan.velocity(model, batch.x_t_BCFHW, batch.sigma_B, batch.text_BLD)

        error = velocity_error(batches, unguided(teacher), answer)
        share = sum(p.numel() for m in models.values() for p in m.parameters()) / whole
        bands = ", ".join(f"{band}: {value:.3f}" for band, value in error.by_sigma().items())
        said = ", ".join(f"{k} {v}" for k, v in student.items() if k != "init")
        print(f"| {said} {job.student.keep_layers if 'keep_layers' in student else ''} | {share:.0%} | "
              f"{error.relative():.4f} | {bands} |", flush=True)  # fmt: skip
    distributed.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
