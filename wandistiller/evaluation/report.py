"""Results of an evaluation: JSON for programs, Markdown tables for people, and pictures."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wandistiller.data.conditions import still
from wandistiller.evaluation.evaluator import Band, CandidateResult, Drawn, Evaluation, ScoredSample, bands
from wandistiller.evaluation.metrics import (
    METRICS,
    MOTION,
    SIZE,
    SPREAD,
    Estimate,
    frechet_estimate,
    ratio_of_sums,
)
from wandistiller.flow import band_name
from wandistiller.monitoring.charts import render
from wandistiller.monitoring.headline import Estimated, Evaluated, Figures, VelocityErrors
from wandistiller.monitoring.health_checks import LEAST_SPREAD, MOST_SPREAD, SLOW, nearer_to_1
from wandistiller.teacher.teacher_json import quantized_facts
from wandistiller.utils.files import atomic, write_json
from wandistiller.utils.images import can_write_mp4, save_clips, save_frames, save_grid

Shares = list[tuple[CandidateResult, CandidateResult, dict[int, Tensor]]]
TIMES = {"seconds_per_sample": "seconds per sample", "denoising_seconds": "seconds of it denoising"}
COSTS = {"parameters": "parameters"} | TIMES
OF_CLIPS = ("evaluation_frames.png", "evaluation.mp4")
"""Files that only an evaluation of clips has."""
PAGE = Path(__file__).with_name("report.md.jinja")


def summary(settings: Evaluation, shares: Shares) -> tuple[Evaluated, dict[str, list[Tensor]]]:
    """Merge the ranks' shares into the figures and the picture's rows."""
    sides = {"teacher": [t for t, _, _ in shares], "student": [s for _, s, _ in shares]}
    samples = {name: _in_order([r.in_own_steps.samples for r in ranks]) for name, ranks in sides.items()}
    second = _in_order([r.in_own_steps.second_draw for r in sides["teacher"]])
    squares_NS2 = torch.stack(_in_order([errors for _, _, errors in shares]))
    result: Evaluated = {
        "prompts": len(settings.prompts),
        "steps": settings.student_sampling.steps,
        "teacher_steps": settings.teacher_sampling.steps,
        "shift": settings.facts.shift or settings.student.shift,
        "teacher_shift": settings.teacher_sampling.shift or settings.teacher.shift,
        "seed": settings.seed,
    }
    if settings.facts.max_steps:
        result["trained_steps"] = settings.facts.max_steps
    result |= _columns(settings, sides, samples)
    result["relative_velocity_error"] = _velocity_errors(settings, squares_NS2)
    result |= quantized_facts(settings.placement)
    result["frechet"] = _frechet(samples["teacher"], samples["student"], second)
    if settings.numbers:
        result["by_steps"] = {
            name: {
                str(n): _figures(settings, [r.by_steps[n] for r in ranks]) for n in sorted(ranks[0].by_steps)
            }
            for name, ranks in sides.items()
        }
        return result, _rows_by_steps(settings, sides, result["by_steps"])
    return result, {name: _shown(drawn) for name, drawn in samples.items()}


def _in_order(parts: list[dict[int, Any]]) -> list[Any]:
    merged = {i: value for part in parts for i, value in part.items()}
    return [merged[i] for i in sorted(merged)]


def _shown(samples: list[ScoredSample]) -> list[Tensor]:
    return [sample.pixels_CFHW for sample in samples if sample.pixels_CFHW is not None]


def _seconds(ranks: list[Drawn]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the seconds of all batches, those of them for denoising, and their lengths."""
    whole, denoising, length = zip(*(batch for r in ranks for batch in r.seconds), strict=True)
    return torch.tensor(whole), torch.tensor(denoising), torch.tensor(length)


def _figures(settings: Evaluation, ranks: list[Drawn]) -> Figures:
    *taken, length = _seconds(ranks)
    figures = {
        key: ratio_of_sums(t, length, settings.seed).as_dict() for key, t in zip(TIMES, taken, strict=True)
    }
    samples = _in_order([r.samples for r in ranks])
    for m in settings.computable(METRICS):
        figures[m.name] = m.summary(torch.stack([s.scores[m.name] for s in samples]), settings.seed)
    return figures


def _columns(
    settings: Evaluation, sides: dict[str, list[CandidateResult]], samples: dict[str, list[ScoredSample]]
) -> Evaluated:
    """Columns of the table: both sides, and the ratio of student to teacher, paired by prompt or batch."""
    columns: dict[str, dict[str, Any]] = {}
    folders, seed = {"teacher": settings.teacher, "student": settings.student}, settings.seed
    for name, ranks in sides.items():
        columns[name] = {
            "parameters": sum(config.numel for config in folders[name].configs.values()),
            "peak_memory_gib": {k: max(r.peak_gib[k] for r in ranks) for k in ranks[0].peak_gib},
            **_figures(settings, [r.in_own_steps for r in ranks]),
        }
    teacher, student = columns.values()
    theirs, its = (_seconds([r.in_own_steps for r in ranks]) for ranks in sides.values())
    ratio = columns["ratio"] = {
        "parameters": Estimate(student["parameters"] / teacher["parameters"]).as_dict()
    }
    for key, of_student, of_teacher in zip(TIMES, its, theirs, strict=False):
        ratio[key] = ratio_of_sums(of_student, of_teacher, seed).as_dict()
    for m in settings.computable(METRICS):
        value_N = {name: torch.stack([s.scores[m.name] for s in drawn]) for name, drawn in samples.items()}
        if (value := m.ratio(value_N["student"], value_N["teacher"], seed)) is not None:
            ratio[m.name] = value
    return columns


def _rows_by_steps(
    settings: Evaluation, sides: dict[str, list[CandidateResult]], figures: dict[str, dict[str, Figures]]
) -> dict[str, list[Tensor]]:
    """Return the picture's rows: the teacher in its own steps, the student in its own and in fewer."""
    most, drawn = settings.teacher_sampling.steps, sides["student"][0].by_steps
    smaller = [n for n in sorted(drawn, reverse=True) if n < most or n == settings.student_sampling.steps]
    numbers = [("teacher", most), *(("student", n) for n in smaller)]
    return {
        f"{side}\n{n} step{'s' * (n > 1)}\n{figures[side][str(n)]['seconds_per_sample']['value']:.2g} s": (
            _shown(_in_order([r.by_steps[n].samples for r in sides[side]]))
        )
        for side, n in numbers
    }


def _velocity_errors(settings: Evaluation, squares_NS2: Tensor) -> VelocityErrors:
    cut = bands(settings.teacher.boundary, settings.student.boundary)

    def over(which: Callable[[Band], bool]) -> Estimated:
        squares_N2 = squares_NS2[:, [which(band) for band in cut]].sum(1)
        return ratio_of_sums(squares_N2[:, 0], squares_N2[:, 1], settings.seed).as_dict()

    names = {b: band_name(b.start, b.end) for b in cut}
    by_band = {names[b]: {"expert": b.expert.value} | over(lambda x, b=b: x == b) for b in cut}
    experts = {e.value: over(lambda x, e=e: x.expert is e) for e in settings.teacher.configs}
    return {"bands": by_band, "experts": experts, "all": over(lambda _: True)}


def _frechet(
    teacher: list[ScoredSample], student: list[ScoredSample], second: list[ScoredSample]
) -> dict[str, dict[str, int | Estimated]]:
    """Fréchet distances by kind of feature; empty for one sample, which has no covariance.

    Of student and teacher at the same seeds; of both from the teacher's second samples, if there are any.
    """
    pairs = {"same_seeds": (student, teacher)}
    if second:
        pairs |= {"student": (student, second), "floor": (teacher, second)}
    result: dict[str, dict[str, int | Estimated]] = {}
    for kind, feature in teacher[0].features.items() if len(teacher) > 1 else ():
        result[kind] = {"features": feature.shape[-1]}
        for name, pair in pairs.items():
            features = (torch.stack([s.features[kind] for s in drawn]) for drawn in pair)
            result[kind][name] = frechet_estimate(*features).as_dict()
    return result


def write(settings: Evaluation, result: Evaluated, rows: dict[str, list[Tensor]]) -> list[str]:
    """Write evaluation.json, .md and .png; return the lines to log. On one rank."""
    names = {"figures": "evaluation.json", "report": "evaluation.md", "picture": "evaluation.png"}
    files = {what: settings.output / name for what, name in names.items()}
    tables = markdown(result)
    page = render(
        PAGE,
        student=settings.student.name,
        teacher=settings.teacher.name,
        tables=tables,
        warnings=warnings(result),
    )
    write_json(files["figures"], result)
    with atomic(files["report"]) as temporary:  # at once: whoever reads both finds one evaluation
        temporary.write_text(page, encoding="utf-8")
    for name in OF_CLIPS:  # an earlier evaluation's would be shown as this one's
        (settings.output / name).unlink(missing_ok=True)
    files |= write_pictures(settings, files["picture"], rows)
    return [f"{tables}\n", *warnings(result), *(f"{what:9} {file}" for what, file in files.items())]


def warnings(result: Evaluated) -> list[str]:
    """Return what a student does worse than its teacher, each in bold first."""
    return [*slow_motion(result), *strong_colours(result)]


def strong_colours(result: Evaluated) -> list[str]:
    """Return the warning of latents whose spread and size are both larger, or both smaller, than usual."""
    ratios = [ratio["value"] for name in (SPREAD, SIZE) if (ratio := result["ratio"].get(name))]
    if len(ratios) < 2 or None in ratios:
        return []
    ratio = nearer_to_1(*ratios)
    spread = f"the student's latents spread {cell(result['ratio'][SPREAD])} times as far as its teacher's"
    if ratio > MOST_SPREAD:
        remedy = "Lower `guidance_scale` by 1, give dmd2 `projected` true, or make fewer updates."
        return [f"**Strong colours**: {spread}, more than {MOST_SPREAD}. {remedy}"]
    pale = f"**Pale colours**: {spread}, less than {LEAST_SPREAD}. Train for more updates."
    return [pale] if ratio < LEAST_SPREAD else []


def slow_motion(result: Evaluated) -> list[str]:
    ratio = result["ratio"].get(MOTION)
    if not ratio or ratio["value"] is None or ratio["value"] >= SLOW:
        return []
    return [
        f"**Slow motion**: the student moves {cell(ratio)} times as much as its teacher, less than {SLOW}. "
        "Train more at high noise, where motion is decided: more sampling steps there, or a larger shift."
    ]


def markdown(result: Evaluated) -> str:
    """Tables of a summary: both sides, the velocity error, and the Fréchet distances if there are any."""
    teacher, student, ratio = result["teacher"], result["student"], result["ratio"]
    steps = (("teacher", result["teacher_steps"]), ("student", result["steps"]))
    sides = [[f"on {result['prompts']} prompts", *(f"{side}, {n} steps" for side, n in steps), "ratio"]]
    for key, label in ({m.name: m.label for m in METRICS} | COSTS).items():
        if key in teacher:
            values = (teacher[key], student[key], ratio.get(key, {"value": None}))
            sides.append([label, *map(cell, values)])
    for where, gib in teacher["peak_memory_gib"].items():
        both = (gib, student["peak_memory_gib"][where])
        sides.append([f"peak memory, {where}, GiB", *(f"{value:.2f}" for value in both), "-"])
    sides.append(["timestep shift", f"{result['teacher_shift']:g}", f"{result['shift']:g}", "-"])
    error = result["relative_velocity_error"]
    errors = [["relative velocity error at sigma", "expert", "student"]]
    errors += [[band, e["expert"], cell(e)] for band, e in error["bands"].items()]
    errors += [["all", expert, cell(e)] for expert, e in error["experts"].items()]
    kinds = [["Fréchet distance, features", "student, same seeds", "student, other seeds", "floor"]]
    for kind, e in result["frechet"].items():
        three = (cell(e.get(k, {"value": None})) for k in ("same_seeds", "student", "floor"))
        kinds.append([f"{kind.replace('_', ' ')}, {e['features']}", *three])
    return "\n\n".join(_table(rows) for rows in (sides, _steps(result), errors, kinds) if len(rows) > 1)


def _steps(result: Evaluated) -> list[list[str]]:
    """Rows of the table by steps: of both, how many times faster than the teacher in its own steps."""
    by_steps = result.get("by_steps", {})
    labels = {m.name: m.label for m in METRICS if by_steps and m.name in result["teacher"]}
    usual = by_steps and by_steps["teacher"][str(result["teacher_steps"])]
    rows = [["steps", *labels.values(), *TIMES.values(), "times faster", "times faster, denoising alone"]]
    for side, numbers in by_steps.items():
        for n, figures in numbers.items():
            faster = (usual[key]["value"] / figures[key]["value"] for key in TIMES)
            cells = (f"{figures[key]['value']:.3g}" for key in TIMES)
            scores = (cell(figures[name]) for name in labels)
            rows.append([f"{side}, {n}", *scores, *cells, *(f"{times:.3g}" for times in faster)])
    return rows


def cell(value: int | Estimated) -> str:
    """Format a number, an estimate with its interval, or a share as hits."""
    if isinstance(value, int):
        return f"{value:,}"
    if value["value"] is None:
        return "-"
    unit, text = (100, str(value["count"])) if "count" in value else (1, f"{value['value']:.3g}")
    if value.get("low") is None:
        return text
    high = math.inf if value["high"] is None else value["high"]  # of a ratio to what may be 0
    return f"{text} ({unit * value['low']:.3g} to {unit * high:.3g}{' %' * (unit == 100)})"


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows = [rows[0], ["-" * w for w in widths], *rows[1:]]
    padded = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


IN_FRAMES = 3
"""Prompts whose frames are shown one by one."""


def write_pictures(settings: Evaluation, file: Path, rows: dict[str, list[Tensor]]) -> dict[str, Path]:
    """Write middle frames, and of clips all frames and an animation; return the files of those two."""
    prompts, stem = [settings.prompts[i] for i in settings.shown], file.with_suffix("")
    if (folder := settings.teacher).config.takes_image:
        reader, samples = settings.reader, settings.samples
        rows = {"given": [still(folder, reader, samples[i]) for i in settings.shown]} | rows
    middle = {label: [clip[:, clip.shape[1] // 2] for clip in clips] for label, clips in rows.items()}
    save_grid(file, middle, prompts)
    if settings.student_sampling.num_frames == 1:
        return {}
    files = {"frames": stem.with_name(f"{stem.name}_frames.png")}
    save_frames(files["frames"], rows, prompts[:IN_FRAMES])
    if can_write_mp4():
        files["animation"] = stem.with_suffix(".mp4")
        save_clips(files["animation"], rows, prompts, settings.student.fps)
    return files
