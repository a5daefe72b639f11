"""Results of an evaluation: JSON for programs, Markdown tables for people, and a picture."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wandistiller.evaluation.evaluator import Band, CandidateResult, Evaluation, ScoredSample, bands
from wandistiller.evaluation.metrics import METRICS, Estimate, frechet, ratio_of_sums
from wandistiller.flow import band_name
from wandistiller.utils.files import atomic, write_json
from wandistiller.utils.images import save_grid
from wandistiller.wan.transformer import count_parameters

Shares = list[tuple[CandidateResult, CandidateResult, dict[int, Tensor]]]
COSTS = {"parameters": "parameters", "seconds_per_sample": "seconds per sample"}
NOTES = """In brackets are 95 % confidence intervals over the prompts, Wilson's for shares, else bootstrap.

- *Velocity error*: sum |v_student - v_teacher|² / sum |v_teacher|², the teacher guided, on its own samples
  noised again to a sigma drawn in the band. 0 is a perfect student, 1 is one that predicts 0.
- *Fréchet distance* (squared) between Gaussians fitted to features of the samples: mean and standard
  deviation of each channel of the VAE's latents, and CLIP's image embedding where a CLIP folder was given. It
  comes out too large for few samples, so read the student's together with its floor: the teacher against
  itself drawn from other seeds. A student that is the teacher has 0 from the same seeds and exactly the floor
  from others; one below its floor is so by chance. No distance is below 0: what rounding puts there is 0.
  "-" stands for samples that are not finite. Compare only distances of one set of features at one number of
  prompts.
- *CLIP score*: 100 max(cos, 0) of the middle frame and the prompt.
- *Peak memory*: of loading and drawing, on one rank, above what the process held before. *Seconds*: of one
  rank, with text encoder and VAE{placed}."""


def summary(settings: Evaluation, shares: Shares) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
    """Merge the ranks' shares into the figures and the picture's rows."""
    sides = {"teacher": [t for t, _, _ in shares], "student": [s for _, s, _ in shares]}
    samples = {name: _in_order([s.samples for s in seen]) for name, seen in sides.items()}
    second = _in_order([s.second_draw for s in sides["teacher"]])
    squares_NS2 = torch.stack(_in_order([errors for _, _, errors in shares]))
    result: dict[str, Any] = {
        "prompts": len(settings.prompts),
        "steps": settings.student_sampling.steps,
        "teacher_steps": settings.teacher_sampling.steps,
        "seed": settings.seed,
    }
    result |= _columns(settings, sides, samples)
    result["relative_velocity_error"] = _velocity_errors(settings, squares_NS2)
    result["frechet"] = _frechet(samples["teacher"], samples["student"], second)
    rows = {name: [s.frame_CHW for s in drawn if s.frame_CHW is not None] for name, drawn in samples.items()}
    return result, rows


def _in_order(parts: list[dict[int, Any]]) -> list[Any]:
    """Values of all ranks in the order of their prompts' numbers."""
    merged = {i: value for part in parts for i, value in part.items()}
    return [merged[i] for i in sorted(merged)]


def _columns(
    settings: Evaluation, sides: dict[str, list[CandidateResult]], samples: dict[str, list[ScoredSample]]
) -> dict[str, Any]:
    """Columns of the table: both sides, and the ratio of student to teacher, paired by prompt or batch."""
    columns: dict[str, dict[str, Any]] = {}
    folders, seconds, seed = {"teacher": settings.teacher, "student": settings.student}, {}, settings.seed
    for name, ranks in sides.items():
        pairs = zip(*(pair for r in ranks for pair in r.seconds), strict=True)
        seconds[name], length = (torch.tensor(numbers) for numbers in pairs)
        columns[name] = {
            "parameters": sum(count_parameters(config) for config in folders[name].configs.values()),
            "seconds_per_sample": ratio_of_sums(seconds[name], length, seed).as_dict(),
            "peak_memory_gib": {k: max(r.peak_gib[k] for r in ranks) for k in ranks[0].peak_gib},
        }
    teacher, student = columns.values()
    ratio = columns["ratio"] = {
        "parameters": Estimate(student["parameters"] / teacher["parameters"]).as_dict(),
        "seconds_per_sample": ratio_of_sums(seconds["student"], seconds["teacher"], seed).as_dict(),
    }
    for m in settings.computable(METRICS):
        value_N = {name: torch.stack([s.scores[m.name] for s in drawn]) for name, drawn in samples.items()}
        teacher[m.name], student[m.name] = (m.summary(value_N[name], seed) for name in sides)
        if (value := m.ratio(value_N["student"], value_N["teacher"], seed)) is not None:
            ratio[m.name] = value
    return columns


def _velocity_errors(settings: Evaluation, squares_NS2: Tensor) -> dict[str, Any]:
    """Relative velocity errors per band, per expert of the teacher, and over all."""
    cut = bands(settings.teacher.boundary, settings.student.boundary)

    def over(which: Callable[[Band], bool]) -> dict[str, float | None]:
        squares_N2 = squares_NS2[:, [which(band) for band in cut]].sum(1)
        return ratio_of_sums(squares_N2[:, 0], squares_N2[:, 1], settings.seed).as_dict()

    names = {b: band_name(b.start, b.end) for b in cut}
    by_band = {names[b]: {"expert": b.expert.value} | over(lambda x, b=b: x == b) for b in cut}
    experts = {e.value: over(lambda x, e=e: x.expert is e) for e in settings.teacher.configs}
    return {"bands": by_band, "experts": experts, "all": over(lambda _: True)}


def _frechet(
    teacher: list[ScoredSample], student: list[ScoredSample], second: list[ScoredSample]
) -> dict[str, Any]:
    """Fréchet distances by kind of feature; empty for one sample, which has no covariance.

    Of student and teacher at the same seeds; of both from the teacher's second samples, if there are any.
    """
    pairs = {"same_seeds": (student, teacher)}
    if second:
        pairs |= {"student": (student, second), "floor": (teacher, second)}
    result: dict[str, Any] = {}
    for kind, feature_D in teacher[0].features.items() if len(teacher) > 1 else ():
        result[kind] = {"features": len(feature_D)}
        for name, pair in pairs.items():
            features = (torch.stack([s.features[kind] for s in drawn]) for drawn in pair)
            result[kind][name] = Estimate(frechet(*features)).as_dict()
    return result


def write(settings: Evaluation, result: dict[str, Any], rows: dict[str, list[Tensor]]) -> list[str]:
    """Write evaluation.json, .md and .png; return the lines to log. On one rank."""
    names = {"figures": "evaluation.json", "report": "evaluation.md", "picture": "evaluation.png"}
    files = {what: settings.output / name for what, name in names.items()}
    tables = markdown(result)
    write_json(files["figures"], result)
    save_grid(files["picture"], rows, [settings.prompts[i] for i in settings.shown])
    heading = f"# {settings.student.name} compared with its teacher {settings.teacher.name}"
    placed = "; a teacher that its own JSON places without the text encoder" if settings.teacher_ds else ""
    with atomic(files["report"]) as temporary:
        parts = (heading, tables, NOTES.format(placed=placed), "![teacher above](evaluation.png)\n")
        temporary.write_text("\n\n".join(parts), encoding="utf-8")
    return [f"{tables}\n", *(f"{what:9} {file}" for what, file in files.items())]


def markdown(result: dict[str, Any]) -> str:
    """Tables of a summary: both sides, the velocity error, and the Fréchet distances if there are any."""
    teacher, student, ratio = result["teacher"], result["student"], result["ratio"]
    steps = (("teacher", result["teacher_steps"]), ("student", result["steps"]))
    sides = [[f"on {result['prompts']} prompts", *(f"{side}, {n} steps" for side, n in steps), "ratio"]]
    for key, label in ({m.name: m.label for m in METRICS} | COSTS).items():
        if key in teacher:
            values = (teacher[key], student[key], ratio.get(key, {"value": None}))
            sides.append([label, *map(_cell, values)])
    for where, gib in teacher["peak_memory_gib"].items():
        both = (gib, student["peak_memory_gib"][where])
        sides.append([f"peak memory, {where}, GiB", *(f"{value:.2f}" for value in both), "-"])
    error = result["relative_velocity_error"]
    errors = [["relative velocity error at sigma", "expert", "student"]]
    errors += [[band, e["expert"], _cell(e)] for band, e in error["bands"].items()]
    errors += [["all", expert, _cell(e)] for expert, e in error["experts"].items()]
    kinds = [["Fréchet distance, features", "student, same seeds", "student, other seeds", "floor"]]
    for kind, e in result["frechet"].items():
        three = (_cell(e.get(k, {"value": None})) for k in ("same_seeds", "student", "floor"))
        kinds.append([f"{kind}, {e['features']}", *three])
    return "\n\n".join(_table(rows) for rows in (sides, errors, kinds) if len(rows) > 1)


def _cell(value: int | dict[str, Any]) -> str:
    """Format a number, an estimate with its interval, or a share as hits."""
    if isinstance(value, int):
        return f"{value:,}"
    if value["value"] is None:
        return "-"
    unit, text = (100, str(value["count"])) if "count" in value else (1, f"{value['value']:.3g}")
    if value.get("low") is None:
        return text
    return f"{text} ({unit * value['low']:.3g} to {unit * value['high']:.3g}{' %' * (unit == 100)})"


def _table(rows: list[list[str]]) -> str:
    """Markdown with padded columns; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows = [rows[0], ["-" * w for w in widths], *rows[1:]]
    padded = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)
