"""`wandistiller evaluate`: teacher and student side by side: velocity error, pictures, speed, size."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline
from torch import Tensor

from wandistiller import distributed, shapes
from wandistiller.batch import Batch, Expert
from wandistiller.export import FACTS
from wandistiller.files import write_json
from wandistiller.latents import Vae
from wandistiller.noise import expert_at, keyed_normal, path
from wandistiller.pictures import save_grid
from wandistiller.sample import Sampling, draw, open_pipeline
from wandistiller.teacher import Guidance, GuidedTeacher, LocalTeacher
from wandistiller.wan import TEXT_TOKENS, WanFolder, open_wan

BANDS = ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 0.875), (0.875, 1.0))  # of sigma


@dataclass(frozen=True, slots=True)
class Seen:
    """What one pipeline drew on this rank, and how long it took."""

    pixels_BCFHW: Tensor
    seconds: float
    parameters: int


def evaluate(
    student_path: Path, prompts: list[str], output: Path, *, teacher_path: str | None, steps: int | None, seed: int,
    batch: int, dtype: torch.dtype,
) -> dict[str, Any]:  # fmt: skip
    """Compare a distilled pipeline with its teacher on `prompts`; writes evaluation.json and evaluation.png. Collective.

    The prompts are split over the ranks; prompt i is sampled from seed + i by both.
    """
    facts = json.loads((student_path / FACTS).read_text())
    steps = steps or facts["steps"]
    size = {k: facts[k] for k in ("height", "width", "num_frames")}
    # .get: checkpoints made before `teacher_revision` have no such fact
    where = (teacher_path, None) if teacher_path else (facts["teacher_path"], facts.get("teacher_revision"))
    folder = open_wan(where[0], weights=True, revision=where[1])
    keys = ["guidance_scale", "negative_prompt"] + ["guidance_scale_2"] * (folder.boundary is not None)
    guided = Sampling(**size, steps=steps, **{k: facts[k] for k in keys})
    mine = range(distributed.rank(), len(prompts), distributed.world_size())
    seen, errors = {}, {}
    student = open_pipeline(student_path, dtype)
    teacher = open_pipeline(folder.path, dtype)
    for name, pipeline, how in (("teacher", teacher, guided), ("student", student, Sampling(**size, steps=steps))):
        distributed.log0("%s: %d prompts, %d steps, guidance %s", name, len(prompts), how.steps, how.guidance_scale)
        seen[name] = _draw_share(pipeline, prompts, list(mine), seed, batch, how)
    if mine:
        errors = velocity_errors(folder, teacher, student, [prompts[i] for i in mine][:batch], seen["teacher"], guided, seed)
    return _report(prompts, seen, errors, output, student_path, steps)


def _draw_share(pipeline: WanPipeline, prompts: list[str], mine: list[int], seed: int, batch: int, how: Sampling) -> Seen:
    parameters = sum(p.numel() for m in (pipeline.transformer, pipeline.transformer_2) if m for p in m.parameters())
    began, drawn = time.monotonic(), []
    for i in range(0, len(mine), batch):
        chunk = mine[i : i + batch]
        drawn.append(draw(pipeline, [prompts[j] for j in chunk], [seed + j for j in chunk], how))
    empty = torch.empty(0, 3, how.num_frames, how.height, how.width)
    return Seen(torch.cat([empty, *drawn]), time.monotonic() - began, parameters)


@torch.no_grad()
def velocity_errors(folder: WanFolder, teacher: WanPipeline, student: WanPipeline, prompts: list[str], drawn: Seen,
                    how: Sampling, seed: int) -> dict[str, float]:  # fmt: skip
    """Mean square of v_student - v_teacher (guided) in bands of sigma, relative to that of v_teacher, on x0 it drew."""
    device = distributed.device()
    x0_BCFHW = Vae(folder, device).encode(drawn.pixels_BCFHW[: len(prompts)].to(device) * 2 - 1)
    encode = {"num_videos_per_prompt": 1, "max_sequence_length": TEXT_TOKENS, "device": device}
    text_BLD, _ = teacher.encode_prompt(prompts, do_classifier_free_guidance=False, **encode)
    null_BLD, _ = teacher.encode_prompt([how.negative_prompt], do_classifier_free_guidance=False, **encode)
    high, low = teacher.transformer, teacher.transformer_2 or teacher.transformer
    second = how.guidance_scale_2 or how.guidance_scale
    scales = {Expert.HIGH_NOISE: how.guidance_scale, Expert.LOW_NOISE: second}
    guided = GuidedTeacher(LocalTeacher({Expert.HIGH_NOISE: high, Expert.LOW_NOISE: low}), Guidance(null_BLD[0], scales))
    low_student = student.transformer_2 or student.transformer
    plain = LocalTeacher({Expert.HIGH_NOISE: student.transformer, Expert.LOW_NOISE: low_student})
    noise_BCFHW = torch.stack([keyed_normal(x0_BCFHW.shape[1:], seed, "evaluate", p) for p in prompts]).to(device)
    errors = {}
    for start, end in BANDS:
        sigma_B = torch.full((len(prompts),), (start + end) / 2, device=device)
        expert = expert_at((start + end) / 2, folder.boundary)
        x_t_BCFHW = path(x0_BCFHW, noise_BCFHW, sigma_B)
        state = Batch(x0_BCFHW, noise_BCFHW, x_t_BCFHW, sigma_B, text_BLD, expert)
        target = guided.velocity(state)
        errors[f"{start}-{end}"] = ((plain.velocity(state) - target).square().sum() / target.square().sum()).item()
    return errors


def _report(prompts: list[str], seen: dict[str, Seen], errors: dict[str, float], output: Path, student_path: Path,
            steps: int) -> dict[str, Any]:  # fmt: skip
    """Put the ranks' shares together; rank 0 prints and writes. Collective."""
    known = [p in shapes.SPECS for p in prompts]
    shares = distributed.gather_objects((seen, errors))
    world, result, rows = distributed.world_size(), {"prompts": len(prompts), "steps": steps}, {}
    for name in seen:
        pixels = {i * world + r: image for r, (s, _) in enumerate(shares) for i, image in enumerate(s[name].pixels_BCFHW)}
        images_BCHW = torch.stack([pixels[i][:, pixels[i].shape[1] // 2] for i in range(len(prompts))])
        rows[name] = list(images_BCHW)
        seconds = sum(s[name].seconds for s, _ in shares) / len(prompts)
        result[name] = {"parameters": seen[name].parameters, "seconds_per_sample": round(seconds, 3)}
        if all(known):
            result[name]["fully_right"] = sum(shapes.fully_right(images_BCHW, prompts))
    bands = [e for _, e in shares if e]
    result["relative_velocity_error"] = {k: round(sum(b[k] for b in bands) / len(bands), 5) for k in bands[0]}
    if distributed.rank() == 0:
        write_json(output / "evaluation.json", result)
        shown = range(0, len(prompts), -(-len(prompts) // 10))
        save_grid(output / "evaluation.png", {k: [v[i] for i in shown] for k, v in rows.items()}, [prompts[i] for i in shown])
        distributed.log0("%s\n", table(result))
        places = {"picture": output / "evaluation.png", "figures": output / "evaluation.json",
                  "metrics": output / "metrics.jsonl", "student": student_path}  # fmt: skip
        for what, where in places.items():
            if where.exists():
                distributed.log0("%-9s %s", what, where)
    return result


def table(result: dict[str, Any]) -> str:
    """The comparison for people."""
    teacher, student = result["teacher"], result["student"]
    lines = [f"{'':22}{'teacher':>12}{'student':>12}{'ratio':>8}"]
    rows = {"fully_right": "prompts fully right", "parameters": "parameters", "seconds_per_sample": "seconds per sample"}
    for key, label in rows.items():
        if key in teacher:
            ratio = student[key] / teacher[key] if teacher[key] else float("nan")
            lines.append(f"{label:22}{teacher[key]:>12,}{student[key]:>12,}{ratio:>8.2f}")
    lines.append(f"of {result['prompts']} prompts, {result['steps']} steps each")
    bands = ", ".join(f"{k}: {v:.4f}" for k, v in result["relative_velocity_error"].items())
    return "\n".join([*lines, f"relative velocity error by sigma: {bands}"])
