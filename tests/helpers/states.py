"""States of a path for tests, made from tensors by position."""

from torch import Tensor

from wandistiller.batch import Conditioning, State
from wandistiller.experts import Expert


def state(x_t_BCFHW: Tensor, sigma_B: Tensor, text_BLD: Tensor, expert: Expert = Expert.HIGH_NOISE) -> State:
    """Return a state whose only conditioning is text."""
    return State(x_t_BCFHW=x_t_BCFHW, sigma_B=sigma_B, conditioning=Conditioning(text_BLD), expert=expert)
