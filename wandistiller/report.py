"""What an evaluation found, as JSON for programs, a Markdown table for people, and a picture."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wandistiller.fidelity import Estimate, frechet, frechet_estimate, paired_share_ratio, principal, ratio_of_sums, wilson
from wandistiller.files import atomic, write_json
from wandistiller.judge import Band, Evaluation, Sample, Seen, bands
from wandistiller.pictures import save_grid

Shares = list[tuple[Seen, Seen, dict[int, Tensor]]]
LABELS = {"fully_right": "prompts fully right", "parameters": "parameters", "seconds_per_sample": "seconds per sample",
          "clip_score": "CLIP score"}  # fmt: skip
FEWEST = 4  # samples of which a covariance, and one without some of them, can be taken
NOTES = """In brackets are 95 % confidence intervals over the prompts: Wilson's for a share, Bonett and Price's for the ratio of
two shares of the same prompts, the jackknife's for a Fréchet distance, else the bootstrap's.

- *Velocity error*: sum |v_student - v_teacher|² / sum |v_teacher|², the teacher guided, on its own samples noised again to a
  sigma drawn in the band. 0 is a perfect student, 1 is one that answers 0.
- *Fréchet distance* (squared) between Gaussians fitted to features of the samples: mean and standard deviation of each
  channel of the VAE's latents, and CLIP's image embedding where a CLIP folder was given; cut to the directions in which they
  vary most, half as many as there are samples, so that no covariance is singular. For few samples it comes out too large;
  the jackknife takes that bias off (`uncorrected` in the JSON has the figure without), so that two draws of one source lie
  around 0. Beside the student's stands its floor: the teacher against itself drawn from other seeds. A student that is the
  teacher has 0 from the same seeds and exactly the floor from others. Compare only distances of one set of features.
- *CLIP score*: 100 max(cos, 0) of the middle frame and the prompt.
- *Peak memory*: of loading and drawing, on one rank, above what the process held before. *Seconds*: of one rank, with text
  encoder and VAE{placed}."""


def summary(wanted: Evaluation, shares: Shares) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
    """Put the ranks' shares together: the figures, and the picture's rows."""
    sides = {"teacher": [t for t, _, _ in shares], "student": [s for _, s, _ in shares]}
    samples = {name: _in_order([s.samples for s in seen]) for name, seen in sides.items()}
    again = _in_order([s.again for s in sides["teacher"]])
    squares_NS2 = torch.stack(_in_order([errors for _, _, errors in shares]))
    result: dict[str, Any] = {"prompts": len(wanted.prompts), "steps": wanted.plain.steps, "seed": wanted.seed}
    result |= {name: _side(wanted, sides[name], samples[name]) for name in sides}
    result["ratio"] = _ratios(wanted, sides, samples)
    result["relative_velocity_error"] = _velocity_errors(wanted, squares_NS2)
    result["frechet"] = _frechet(samples["teacher"], samples["student"], again)
    rows = {name: [s.frame_CHW for s in drawn if s.frame_CHW is not None] for name, drawn in samples.items()}
    return result, rows


def _in_order(parts: list[dict[int, Any]]) -> list[Any]:
    """All ranks' things by the number of their prompt."""
    together = {i: thing for part in parts for i, thing in part.items()}
    return [together[i] for i in sorted(together)]


def _side(wanted: Evaluation, ranks: list[Seen], drawn: list[Sample]) -> dict[str, Any]:
    """One column of the table."""
    seconds, counts = zip(*(pair for r in ranks for pair in r.seconds), strict=True)
    per_sample = ratio_of_sums(torch.tensor(seconds), torch.tensor(counts), wanted.seed)
    side = {"parameters": ranks[0].parameters, "seconds_per_sample": per_sample.as_dict(),
            "peak_memory_gib": {k: max(r.peak_gib[k] for r in ranks) for k in ranks[0].peak_gib}}  # fmt: skip
    if wanted.has_shapes:
        hits = sum(s.right for s in drawn)
        side["fully_right"] = {"count": hits} | wilson(hits, len(drawn)).as_dict()
    if wanted.clip:
        scores = torch.tensor([s.clip_score for s in drawn])
        side["clip_score"] = ratio_of_sums(scores, torch.ones_like(scores), wanted.seed).as_dict()
    return side


def _ratios(wanted: Evaluation, sides: dict[str, list[Seen]], samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Student over teacher, prompt by prompt, or batch by batch for the seconds."""
    teacher, student = samples["teacher"], samples["student"]
    seconds = {name: torch.tensor([s for r in ranks for s, _ in r.seconds]) for name, ranks in sides.items()}
    parameters = sides["student"][0].parameters / sides["teacher"][0].parameters
    ratio: dict[str, Any] = {
        "parameters": Estimate(parameters).as_dict(),
        "seconds_per_sample": ratio_of_sums(seconds["student"], seconds["teacher"], wanted.seed).as_dict(),
    }
    if wanted.has_shapes and (found := paired_share_ratio([s.right for s in teacher], [s.right for s in student])):
        ratio["fully_right"] = found.as_dict()
    if wanted.clip:
        scores = (torch.tensor([s.clip_score for s in drawn]) for drawn in (student, teacher))
        ratio["clip_score"] = ratio_of_sums(*scores, wanted.seed).as_dict()
    return ratio


def _velocity_errors(wanted: Evaluation, squares_NS2: Tensor) -> dict[str, Any]:
    """Per band, per expert of the teacher, and over all."""
    cut = bands(wanted.teacher.boundary, wanted.student.boundary)

    def over(which: Callable[[Band], bool]) -> dict[str, float | None]:
        squares_N2 = squares_NS2[:, [which(band) for band in cut]].sum(1)
        return ratio_of_sums(squares_N2[:, 0], squares_N2[:, 1], wanted.seed).as_dict()

    by_band = {f"{b.start:g}-{b.end:g}": {"expert": b.expert.value} | over(lambda x, b=b: x == b) for b in cut}
    experts = {e.value: over(lambda x, e=e: x.expert is e) for e in wanted.teacher.configs}
    return {"bands": by_band, "experts": experts, "all": over(lambda _: True)}


def _frechet(teacher: list[Sample], student: list[Sample], again: list[Sample]) -> dict[str, Any]:
    """Distances by kind of feature; none for fewer samples than a covariance, and the jackknife, need."""
    if len(teacher) < FEWEST:
        return {}
    t, s, o = (_features(drawn) for drawn in (teacher, student, again))
    return {kind: _distances(t[kind], s[kind], o.get(kind)) for kind in t}


def _features(drawn: list[Sample]) -> dict[str, Tensor]:
    """features_ND by kind."""
    kinds = {"latent": [s.latent_D for s in drawn], "clip": [s.clip_D for s in drawn if s.clip_D is not None]}
    return {kind: torch.stack(features) for kind, features in kinds.items() if features}


def _distances(teacher_ND: Tensor, student_ND: Tensor, other_ND: Tensor | None) -> dict[str, Any]:
    """Student to teacher from the same seeds; where the teacher drew from others too, to those, beside the floor."""
    t_NK, s_NK, *others = principal([x for x in (teacher_ND, student_ND, other_ND) if x is not None])
    pairs = {"same_seeds": (s_NK, t_NK)}
    for o_NK in others:
        pairs |= {"student": (s_NK, o_NK), "floor": (t_NK, o_NK)}
    distances = {k: frechet_estimate(*pair).as_dict() | {"uncorrected": frechet(*pair)} for k, pair in pairs.items()}
    return {"features": t_NK.shape[1], **distances}


def write(wanted: Evaluation, result: dict[str, Any], rows: dict[str, list[Tensor]]) -> list[str]:
    """Write evaluation.json, .md and .png; gives what a person should read now. On one rank."""
    names = {"figures": "evaluation.json", "report": "evaluation.md", "picture": "evaluation.png"}
    files = {what: wanted.output / name for what, name in names.items()}
    tables = markdown(result)
    write_json(files["figures"], result)
    save_grid(files["picture"], rows, [wanted.prompts[i] for i in wanted.shown])
    heading = f"# {wanted.student.name} beside its teacher {wanted.teacher.name}"
    placed = "; a teacher that its own JSON places without the text encoder" if wanted.teacher_ds else ""
    with atomic(files["report"]) as temporary:
        notes = NOTES.format(placed=placed)
        temporary.write_text(f"{heading}\n\n{tables}\n\n{notes}\n\n![teacher above](evaluation.png)\n", encoding="utf-8")
    return [f"{tables}\n", *(f"{what:9} {file}" for what, file in files.items())]


def markdown(result: dict[str, Any]) -> str:
    """The tables of a summary: both sides; the velocity error; the Fréchet distances, where there are any."""
    teacher, student, ratio = result["teacher"], result["student"], result["ratio"]
    sides = [[f"on {result['prompts']} prompts, {result['steps']} steps", "teacher", "student", "ratio"]]
    for key, label in LABELS.items():
        if key in teacher:
            sides.append([label, _shown(teacher[key]), _shown(student[key]), _shown(ratio.get(key, {"value": None}))])
    for where, gib in teacher["peak_memory_gib"].items():
        sides.append([f"peak memory, {where}, GiB", f"{gib:.2f}", f"{student['peak_memory_gib'][where]:.2f}", "-"])
    error = result["relative_velocity_error"]
    errors = [["relative velocity error at sigma", "expert", "student"]]
    errors += [[band, e["expert"], _shown(e)] for band, e in error["bands"].items()]
    errors += [["all", expert, _shown(e)] for expert, e in error["experts"].items()]
    kinds = [["Fréchet distance, features", "student, same seeds", "student, other seeds", "floor"]]
    for kind, e in result["frechet"].items():
        three = (_shown(e.get(k, {"value": None})) for k in ("same_seeds", "student", "floor"))
        kinds.append([f"{kind}, {e['features']}", *three])
    return "\n\n".join(_table(rows) for rows in (sides, errors, kinds) if len(rows) > 1)


def _shown(value: int | dict[str, Any]) -> str:
    """A number; an estimate with its interval; a share as hits."""
    if isinstance(value, int):
        return f"{value:,}"
    if value["value"] is None:
        return "-"
    unit, text = (100, str(value["count"])) if "count" in value else (1, f"{value['value']:.3g}")
    if value.get("low") is None:
        return text
    return f"{text} ({unit * value['low']:.3g} to {unit * value['high']:.3g}{' %' * (unit == 100)})"


def _table(rows: list[list[str]]) -> str:
    """Markdown, padded so that it reads as it stands; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows = [rows[0], ["-" * w for w in widths], *rows[1:]]
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows)
