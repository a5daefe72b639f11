"""Evaluation metrics and their 95 % confidence intervals. A new metric is an entry of METRICS or FEATURES.

N is the number of prompts, which are the independent units of every interval; D of features.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor

from wandistiller.evaluation.clip import Clip, Dino
from wandistiller.monitoring.headline import Estimated
from wandistiller.monitoring.health_checks import after_given, colour_stats
from wandistiller.tiny import shapes, video_scores
from wandistiller.tiny.blotches import have_blotches, off_colour
from wandistiller.utils.keyed_random import keyed_generator

MOTION = "motion"
"""Name of the metric that says whether a student moves as its teacher does."""
SPREAD, SIZE = "latent_spread", "latent_size"
"""Names of those that say whether its colours are as strong."""
Z = 1.959963984540054  # the normal distribution's 97.5 % point
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the ends of its 95 % confidence interval; None if it has none."""

    value: float
    low: float | None = None
    high: float | None = None

    def as_dict(self) -> Estimated:
        """Round to six digits, for JSON."""
        values = asdict(self).items()
        return {k: None if v is None or not math.isfinite(v) else float(f"{v:.6g}") for k, v in values}


def wilson(hits: int, of: int) -> Estimate:
    """Share hits / of in [0, 1]; coverage holds at 0 and 1 too. Source: Wilson 1927, JASA 22:209."""
    middle = (hits + Z * Z / 2) / (of + Z * Z)
    half = Z / (of + Z * Z) * math.sqrt(hits * (of - hits) / of + Z * Z / 4)
    return Estimate(hits / of, middle - half if hits else 0.0, middle + half if hits < of else 1.0)


def ratio_of_sums(top_N: Tensor, bottom_N: Tensor, seed: int) -> Estimate:
    """Ratio sum(top) / sum(bottom) of paired numbers; with ones below, the mean.

    The interval is the percentile bootstrap's over the N pairs, keyed by `seed`. Source: Efron and Tibshirani
    1993, ch. 13.
    """
    top_N, bottom_N = top_N.double(), bottom_N.double()
    value = (top_N.sum() / bottom_N.sum()).item()
    if len(top_N) < 2:
        return Estimate(value)
    generator = keyed_generator(seed, "bootstrap")
    drawn_RN = torch.randint(len(top_N), (RESAMPLES, len(top_N)), generator=generator)
    ratio_R = top_N[drawn_RN].sum(1) / bottom_N[drawn_RN].sum(1)
    low, high = ratio_R.quantile(ratio_R.new_tensor([0.025, 0.975])).tolist()
    return Estimate(value, low, high)


class DrawnBatch:
    """Samples as input of the metrics, on the CPU."""

    def __init__(
        self,
        prompts: list[str],
        pixels_BCFHW: Tensor,
        x0_BCFHW: Tensor,
        encoders: Mapping[str, Clip | Dino] | None = None,
        given_frames: int = 0,
        scenes: list[str] | None = None,
        other: "DrawnBatch | None" = None,
    ):
        """Keep samples.

        Args:
            pixels_BCFHW: in [0, 1].
            x0_BCFHW: normalised VAE latents.
            encoders: by their name in ENCODERS.
            given_frames: latent frames at the start that the models are given, which count for no motion.
            scenes: names of the embedded teachers' scenes; None: they are the prompts.
            other: samples of the same prompts from other seeds.
        """
        self.scenes, self.given_frames = scenes or prompts, given_frames
        self.moving_BCFHW = after_given(x0_BCFHW, given_frames)
        self.prompts, self.pixels_BCFHW, self._encoders = prompts, pixels_BCFHW, encoders or {}
        self.frame_BCHW = pixels_BCFHW[:, :, pixels_BCFHW.shape[2] // 2]
        """The middle frame."""
        self.x0_BCFHW, self.other = x0_BCFHW, other

    @property
    def begins(self) -> bool:
        """True if motions begin in the first frame."""
        return self.given_frames > 0

    @cached_property
    def off_colour_BFHW(self) -> Tensor:
        """Distance of each pixel from the line between its scene's two colours."""
        return off_colour(self.pixels_BCFHW, self.scenes)

    @cached_property
    def colours_BK(self) -> Tensor:
        """Numbers of `colour_stats`."""
        return colour_stats(self.pixels_BCFHW)

    @cached_property
    def clip(self) -> tuple[Tensor, Tensor]:
        """CLIP's embeddings image_BD of the middle frames, and their cosines to the prompts, cosine_B."""
        return self._encoders["clip"].score(self.frame_BCHW, self.prompts)

    @cached_property
    def preference_B(self) -> Tensor:
        return self._encoders["pickscore"].preference(self.frame_BCHW, self.prompts)

    @cached_property
    def dino_BD(self) -> Tensor:
        """DINO's embeddings of the middle frames."""
        return self._encoders["dino"].embed(self.frame_BCHW)


def _mean(value_N: Tensor, seed: int) -> Estimated:
    value_N = value_N[~value_N.isnan()]
    return ratio_of_sums(value_N, torch.ones_like(value_N), seed).as_dict()


def _share(value_N: Tensor, seed: int) -> Estimated:
    """Share of hits; value_N is 1.0 for a hit and 0.0 for a miss."""
    hits = round(value_N.sum().item())
    return {"count": hits} | wilson(hits, len(value_N)).as_dict()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number for each sample; the table has a summary for each side and the ratio of their sums."""

    name: str
    """Key in evaluation.json."""
    label: str
    """Row of the table in evaluation.md."""
    compute: Callable[[DrawnBatch], Tensor]
    """value_B of a batch, float32; NaN where a sample has none."""
    needs: str = ""
    """`shapes`, `moving shapes`: prompts of an embedded teacher; `colours`: of either; `frames`: several
    frames; a name of ENCODERS: its folder; `twice`: two samples of each prompt; several with commas between;
    empty for any evaluation."""
    summary: Callable[[Tensor, int], Estimated] = _mean
    """value_N and seed -> figure and interval."""

    def ratio(self, student_N: Tensor, teacher_N: Tensor, seed: int) -> Estimated | None:
        """Ratio of student to teacher on the same prompts; None if the teacher's sum is 0."""
        both = ~(student_N.isnan() | teacher_N.isnan())
        student_N, teacher_N = student_N[both], teacher_N[both]
        return ratio_of_sums(student_N, teacher_N, seed).as_dict() if teacher_N.any() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Vectors for each sample; the Fréchet distance is taken between teacher's and student's."""

    name: str
    compute: Callable[[DrawnBatch], Tensor]
    """feature_BD of a batch."""
    needs: str = ""


def _change(x_BCFHW: Tensor) -> Tensor:
    return x_BCFHW.diff(dim=2).abs().flatten(1).mean(1)


def _drift(pixels_BCFHW: Tensor) -> Tensor:
    """Distance between the mean colours of the first and the last frame."""
    colour_BCF = pixels_BCFHW.mean((3, 4))
    return (colour_BCF[:, :, -1] - colour_BCF[:, :, 0]).norm(dim=1)


METRICS = [
    Metric(
        name="fully_right",
        label="prompts fully right",
        needs="shapes",
        summary=_share,
        compute=lambda drawn: torch.tensor(shapes.fully_right(drawn.frame_BCHW, drawn.prompts)).float(),
    ),
    Metric(
        name="fully_right",
        label="prompts fully right",
        needs="moving shapes",
        summary=_share,
        compute=lambda drawn: torch.tensor(
            video_scores.fully_right(drawn.pixels_BCFHW, drawn.scenes, begins=drawn.begins)
        ).float(),
    ),
    Metric(
        name="blotched",
        label="samples with a blotch of another colour",
        needs="colours",
        summary=_share,
        compute=lambda drawn: have_blotches(drawn.off_colour_BFHW).float(),
    ),
    Metric(
        name="off_colour",
        label="distance from the prompt's two colours",
        needs="colours",
        compute=lambda drawn: drawn.off_colour_BFHW.flatten(1).mean(1),
    ),
    Metric(
        name="contrast_spread",
        label="spread of local contrast",
        compute=lambda drawn: drawn.colours_BK[:, 0],
    ),
    Metric(name="contrast", label="contrast of pictures", compute=lambda drawn: drawn.colours_BK[:, 1]),
    Metric(name="saturation", label="saturation of pictures", compute=lambda drawn: drawn.colours_BK[:, 2]),
    Metric(
        name=SPREAD,
        label="spread of latents",
        compute=lambda drawn: drawn.x0_BCFHW.flatten(1).std(1),
    ),
    Metric(
        name=SIZE,
        label="mean size of latents",
        compute=lambda drawn: drawn.x0_BCFHW.abs().flatten(1).mean(1),
    ),
    Metric(
        name="speed",
        label="speed, 1 is the prompt's",
        needs="moving shapes",
        compute=lambda drawn: video_scores.speeds(drawn.pixels_BCFHW, drawn.scenes, begins=drawn.begins),
    ),
    Metric(
        name="flicker",
        label="flicker: change that no motion explains",
        needs="moving shapes",
        compute=lambda drawn: video_scores.flicker(drawn.pixels_BCFHW, drawn.scenes, begins=drawn.begins),
    ),
    Metric(
        name=MOTION,
        label="motion: change between latent frames",
        needs="frames",
        compute=lambda drawn: _change(drawn.moving_BCFHW),
    ),
    Metric(
        name="frame_motion",
        label="motion: change between frames",
        needs="frames",
        compute=lambda drawn: _change(drawn.pixels_BCFHW),
    ),
    Metric(
        name="colour_drift",
        label="drift of the mean colour, first to last frame",
        needs="frames",
        compute=lambda drawn: _drift(drawn.pixels_BCFHW),
    ),
    Metric(  # Hessel et al. 2021, arXiv:2104.08718, with 100 for their 2.5, as torchmetrics has it
        name="clip_score",
        label="CLIP score",
        needs="clip",
        compute=lambda drawn: 100 * drawn.clip[1].clamp(min=0),
    ),
    Metric(name="pickscore", label="PickScore", needs="pickscore", compute=lambda drawn: drawn.preference_B),
    Metric(
        name="picture_error",
        label="squared error to the asked picture",
        needs="shapes",
        compute=lambda drawn: shapes.mse_to_prompts(drawn.frame_BCHW, drawn.prompts),
    ),
    Metric(
        name="variety",
        label="difference of two seeds' latents, RMS",
        needs="twice",
        compute=lambda drawn: (drawn.x0_BCFHW - drawn.other.x0_BCFHW).square().flatten(1).mean(1).sqrt(),
    ),
    Metric(
        name="clip_variety",
        label="difference of two seeds, 1 - cos of CLIP",
        needs="twice, clip",
        compute=lambda drawn: 1 - (drawn.clip[0] * drawn.other.clip[0]).sum(1),
    ),
    Metric(
        name="dino_variety",
        label="difference of two seeds, 1 - cos of DINO",
        needs="twice, dino",
        compute=lambda drawn: 1 - (drawn.dino_BD * drawn.other.dino_BD).sum(1),
    ),
]
FEATURES = [
    Features(
        name="latent",
        compute=lambda drawn: torch.cat(
            [f(drawn.x0_BCFHW, (2, 3, 4)) for f in (torch.mean, torch.std)], dim=1
        ),
    ),
    Features(name="clip", needs="clip", compute=lambda drawn: drawn.clip[0]),
    Features(name="dino", needs="dino", compute=lambda drawn: drawn.dino_BD),
]


MOST_GROUPS = 50
"""Distances computed for an interval, at most: of many prompts, several are left out together."""


def frechet_estimate(a_ND: Tensor, b_ND: Tensor) -> Estimate:
    """Fréchet distance of samples of the same prompts, and what chance among the prompts does to it.

    The interval is the value and 1.96 standard errors of the delete-one-group jackknife to both sides, cut at
    0; none below three prompts. A prompt is left out on both sides. The bootstrap would not do: a prompt
    drawn twice makes a set vary less, so its distances lie above the value, not around it. That any distance
    of few samples is too large is not in the interval.
    Source: Efron and Tibshirani 1993, ch. 11; groups: Künsch 1989, Annals of Statistics 17:1217.
    """
    value, n = frechet(a_ND, b_ND), len(a_ND)
    if n < 3 or not math.isfinite(value):
        return Estimate(value)
    groups = min(n, MOST_GROUPS)
    group_N = torch.arange(n) % groups
    distances = [frechet(a_ND[group_N != g], b_ND[group_N != g]) for g in range(groups)]
    distance_G = torch.tensor(distances, dtype=torch.float64)
    error = ((groups - 1) * distance_G.var(correction=0)).sqrt().item()
    return Estimate(value, max(0.0, value - Z * error), value + Z * error)


def frechet(a_ND: Tensor, b_ND: Tensor) -> float:
    """Fréchet distance (squared) between the Gaussians fitted to two sets of features, in float64.

    At least 0, where rounding would put it below; NaN if a feature is not finite.
    Too large for finite N, by an amount that depends on N, D and both covariances: a set that varies less is
    punished less.
    Source: Heusel et al. 2017, arXiv:1706.08500; the bias: Chong and Forsyth 2020, arXiv:1911.07023.
    """
    a_ND, b_ND = a_ND.double(), b_ND.double()
    if not (a_ND.isfinite().all() and b_ND.isfinite().all()):
        return math.nan
    return frechet_of_gaussians(a_ND.mean(0), b_ND.mean(0), _root(a_ND), _root(b_ND))


def frechet_of_gaussians(mean_a_D: Tensor, mean_b_D: Tensor, root_a_KD: Tensor, root_b_KD: Tensor) -> float:
    """Compute |mean_a - mean_b|^2 + tr(A + B - 2 (A B)^(1/2)) from roots of the covariances, A = root^T root.

    Source: Dowson and Landau 1982, J. Multivariate Analysis 12:450.

    tr (A B)^(1/2) is the sum of the singular values of root_a root_b^T, as A B has their squares as
    eigenvalues: no square root of a matrix that is not symmetric, and none of what is nothing but rounding.
    """
    trace_root = torch.linalg.matrix_norm(root_a_KD @ root_b_KD.T, "nuc")
    distance = (mean_a_D - mean_b_D).square().sum() + root_a_KD.square().sum() + root_b_KD.square().sum()
    return max(0.0, (distance - 2 * trace_root).item())


def _root(x_ND: Tensor) -> Tensor:
    """Root of the covariance with min(N, D) rows, which is small for few samples of many features."""
    return torch.linalg.qr(x_ND - x_ND.mean(0), mode="r").R / math.sqrt(len(x_ND) - 1)
