"""Feature matching: hidden states of the student's blocks against the teacher's."""

from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
from pydantic import Field
from torch import Tensor

from wandistiller.batch import Batch, Prediction
from wandistiller.objectives.base import RunFacts, Term, mean_square
from wandistiller.utils.errors import problem

Blocks = Annotated[list[int], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureMatching(Term):
    """Match the teacher's hidden states, through a projection P_k where the student has another width.

    L = 1/|K| sum_k ||P_k h_S^k - h_T^m(k)||^2 / ||h_T^m(k)||^2, K `blocks`, m(k) the last teacher block that
    student block k stands for. Source: BK-SDM, Kim et al. 2023, arXiv:2305.15798; the division, which makes
    the loss a share of the teacher's states and so equally large for every block and model, is ours.
    """

    blocks: Blocks | None = None
    """K, the student's block numbers; None: all. Each keeps its states until the backward pass."""
    teacher_blocks: Blocks | None = None
    """m(k) for each of K; None: by the student's lineage."""

    @property
    def matched_blocks(self) -> list[tuple[int, int]]:
        return list(zip(self.blocks, self.teacher_blocks, strict=True))

    def problems(self, where: str) -> list[str]:
        if not self.teacher_blocks or len(self.teacher_blocks) == len(self.blocks or ()):
            return []
        remedy = "Write as many as there are `blocks`."
        return [problem("recipe", f"{where}.teacher_blocks", self.teacher_blocks, remedy)]

    def combined_problems(self, where: str, run: RunFacts) -> list[str]:
        problems = []
        for key, n in (("blocks", run.layers), ("teacher_blocks", run.teacher_layers)):
            if outside := [k for k in getattr(self, key) or () if not 0 <= k < n]:
                remedy = f"Write block numbers from 0 to {n - 1}."
                problems.append(problem("recipe", f"{where}.{key}", outside, remedy))
        return problems

    def for_student(self, lineage: list[int]) -> Self:
        blocks = self.blocks or list(range(len(lineage)))
        teacher_blocks = self.teacher_blocks or [lineage[k] for k in blocks]
        return replace(self, blocks=blocks, teacher_blocks=teacher_blocks)

    def loss(self, prediction: Prediction, target: Prediction | None, batch: Batch) -> Tensor:
        pairs = [(prediction.features[k], target.features[m]) for k, m in self.matched_blocks]
        # of this rank's patches, where several share a sample
        means = [(mean_square(h_S.float() - h_T.float()), mean_square(h_T)) for h_S, h_T in pairs]
        shares = [prediction.mean(error_B) / prediction.mean(norm_B) for error_B, norm_B in means]
        return torch.stack(shares).mean(0)
