"""Velocity error of each cut of the embedded teacher before any training: prints a Markdown table.

    python tests/bench/pruning.py FOLDER

FOLDER takes the cache of 63 prompts (under a minute to make), which a second run uses again.
"""

from pathlib import Path
from typing import Any

from common import head, parser, row

from wandistiller.config.job import Job
from wandistiller.config.recipe import recipe_of
from wandistiller.config.validate import read_job
from wandistiller.distributed import collectives
from wandistiller.engine.patches import patch_deepspeed
from wandistiller.experts import Expert
from wandistiller.network.network import Network
from wandistiller.student.calibration import velocity_error
from wandistiller.student.initialize import start_weights
from wandistiller.student.pruning import WidthSlicer
from wandistiller.teacher.base import local_modules, without_guidance
from wandistiller.tiny.shapes import SEEN
from wandistiller.training.build_student import calibration_of, plan_pruning
from wandistiller.training.prepare import guided_teacher, prepare
from wandistiller.utils.files import SHIPPED, read_json
from wandistiller.wan import transformer

DEPTHS = [{"num_layers": n, "keep_layers": how} for n in (4, 2) for how in ("uniform", "ends", "importance")]
FFN = [{"ffn_dim": share} for share in (0.5, 0.25)]
WIDTHS = [{"num_attention_heads": 0.75}, {"num_attention_heads": 0.5}, {"attention_head_dim": 0.5}]
SOURCES = [{"from_expert": which} for which in ("low_noise", "high_noise")]
FILES = [read_json(file) for file in sorted((SHIPPED / "students").glob("*.json"))]
TWO = [{"experts": "two", **cut} for cut in ({}, *DEPTHS, *FFN, *WIDTHS)]


def job_of(folder: Path, student: dict[str, Any]) -> Job:
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(SEEN[::16]) + "\n")
    changes = {
        "data_path": str(prompts),
        "output_dir": str(folder / "run"),
        "cache_dir": str(folder / "cache"),
        "student_config": student,
        "teacher_deepspeed_config": "ds_configs/teacher/replicated.json",
        "teacher_dtype": "float32",
    }
    quick = read_json("ds_configs/recipes/quickstart.json") | changes
    return read_job(recipe_of(quick, {}).runs[""], 1)


def weights_of(job: Job, expert: Expert, cut: WidthSlicer | None) -> Any:
    return start_weights(job.student, job.student_transformer, job.folder, expert, 0, cut)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    patch_deepspeed()
    collectives.init("warning")
    first = job_of(folder, {})
    data, conditions, teacher = prepare(first)
    teacher = teacher or guided_teacher(first, conditions)
    batches = calibration_of(first, data)
    head("student", "parameters of the teacher's", "relative velocity error", "by sigma")
    unguided = without_guidance(teacher)
    targets = [unguided.velocity(batch) for batch in batches]
    whole = sum(p.numel() for m in local_modules(unguided) for p in m.parameters())
    for student in [*SOURCES, *FILES, *TWO]:
        job = job_of(folder, student)
        job, cuts = plan_pruning(job, data, teacher) if job.needs_measuring else (job, {})
        models = {
            e: Network.made(job.student_transformer, weights_of(job, e, cuts.get(e))).module.eval()
            for e in job.networks.student
        }

        def predict(batch: Any, models: dict = models) -> Any:
            model = models.get(batch.expert, next(iter(models.values())))
            return transformer.velocity(model, batch)

        error = velocity_error(batches, targets, predict)
        share = sum(p.numel() for m in models.values() for p in m.parameters()) / whole
        bands = ", ".join(f"{band}: {value:.3f}" for band, value in error.by_sigma().items())
        title = ", ".join(f"{k} {v}" for k, v in student.items() if k != "init")
        kept = job.student.keep_layers if "keep_layers" in student else ""
        row(f"{title} {kept}", f"{share:.0%}", f"{error.relative():.4f}", bands)
    collectives.destroy()


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("folder", type=Path)
    main(options.parse_args().folder)
