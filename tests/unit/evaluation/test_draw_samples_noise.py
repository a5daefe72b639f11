"""The noise that a student takes between its steps when it is drawn."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from wandistiller.data.dataset import PromptItem
from wandistiller.data.media import Size
from wandistiller.data.tensor_cache import Sample
from wandistiller.evaluation.draw_samples import Sampling, draw
from wandistiller.network.sampling import few_step_scheduler
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.loaded_components import Pipeline
from wandistiller.wan.pipeline import open_wan

ONE = Sample(PromptItem("a red circle"), Size(32, 32, 1))


@pytest.fixture(scope="module")
def pipe(wan1: Path) -> Pipeline:
    loaded = open_wan(str(wan1)).load_pipeline(torch.float32)
    loaded.scheduler = few_step_scheduler(3.0, 2, "renoise")
    loaded.set_progress_bar_config(disable=True)
    return loaded


def pixels_of(pipe: Pipeline, wan: Path, seeds: list[int]) -> Tensor:
    return draw(pipe, open_wan(str(wan)), [ONE] * len(seeds), seeds, Sampling(height=32, width=32, steps=2))


def test_noise_between_steps_is_that_of_the_seed_and_not_the_first_again(wan1: Path, pipe: Pipeline) -> None:
    states: list[Tensor] = []

    def taken(_: Any, given: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(kwargs["hidden_states"])

    def given(_: Any, __: Any, result: tuple[Tensor, ...]) -> None:
        states.append(result[0])

    network = pipe.transformer
    hooks = [network.register_forward_pre_hook(taken, with_kwargs=True), network.register_forward_hook(given)]
    pixels_of(pipe, wan1, [7, 8])
    for hook in hooks:
        hook.remove()
    first_BCFHW, v_BCFHW, second_BCFHW, _ = states
    sigma = pipe.scheduler.sigmas[1]
    noise_BCFHW = (second_BCFHW - (1 - sigma) * (first_BCFHW - v_BCFHW)) / sigma
    for seed, noise_CFHW, first_CFHW in zip((7, 8), noise_BCFHW, first_BCFHW, strict=True):
        wanted = keyed_normal(noise_CFHW[None].shape, seed, "fresh")[0]
        torch.testing.assert_close(noise_CFHW, wanted, atol=1e-4, rtol=0)
        assert torch.corrcoef(torch.stack([noise_CFHW.flatten(), first_CFHW.flatten()]))[0, 1].abs() < 0.3


def test_what_is_drawn_of_a_seed_depends_on_neither_the_batch_nor_torch_s_stream(
    wan1: Path, pipe: Pipeline
) -> None:
    alone = torch.cat([pixels_of(pipe, wan1, [seed]) for seed in (7, 8)])
    torch.rand(3)
    torch.testing.assert_close(pixels_of(pipe, wan1, [7, 8]), alone, atol=1e-4, rtol=0)
