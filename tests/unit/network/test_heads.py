"""Heads of a critic: where the first frame is given, they judge the others alone."""

import math
from dataclasses import replace

import pytest
import torch
from engines import engine
from networks import network_of
from on_ranks.heads import shared_mean
from ranks import call
from slow_cases import slow_but
from small_wan import small_transformer
from torch import Tensor, nn

from wandistiller.batch import Conditioning, State
from wandistiller.experts import Expert
from wandistiller.network.heads import PROJECTIONS
from wandistiller.network.network import Computing, Trained
from wandistiller.objectives.dmd2 import heads_loss
from wandistiller.student.learner import Learner
from wandistiller.utils.keyed_random import keyed_normal

FRAMES, OF_A_FRAME = 3, 4


def state(first_is_given: bool, frames: int = FRAMES) -> State:
    """Two samples with four patches in each frame."""
    x_BCFHW = keyed_normal((2, 48, frames, 4, 4), "x")
    first_BCFHW = keyed_normal((2, 48, 1, 4, 4), "first") if first_is_given else None
    conditioning = Conditioning(keyed_normal((2, 5, 32), "text"), first_BCFHW=first_BCFHW)
    return State(
        x_t_BCFHW=x_BCFHW,
        sigma_B=torch.tensor([0.3, 0.8]),
        conditioning=conditioning,
        expert=Expert.HIGH_NOISE,
    )


def critic() -> Learner:
    model = small_transformer(0, 2, in_channels=48, out_channels=48)
    network = network_of(model).prepare(Trained(has_heads=True), computing=Computing.of(engine()))
    return Learner({Expert.HIGH_NOISE: network}, engine(), role="critic")


def outputs(batch: State, added_to_first: float) -> tuple[Tensor, Tensor]:
    """Return logit_BS1 of a critic's last head and what the head makes of each patch by itself.

    Args:
        added_to_first: to the hidden states of the first frame that this head is given.
    """
    made, learner = {}, critic()
    model = learner.networks[Expert.HIGH_NOISE].module
    head: nn.Module = getattr(model, PROJECTIONS)["1"]
    nn.init.normal_(head[1].weight, generator=torch.Generator().manual_seed(0))

    def changed(_: nn.Module, __: object, h_BSD: Tensor) -> Tensor:
        noise_BSD = keyed_normal(tuple(h_BSD.shape), "noise")
        noise_BSD[:, OF_A_FRAME:] = 0
        made["h"] = h_BSD + added_to_first * noise_BSD
        return made["h"]

    model.blocks[1].register_forward_hook(changed)
    return learner.forward(batch).features[1].detach(), head(made["h"]).detach()


@pytest.mark.usefixtures("one_rank")
def test_heads_learn_to_tell_samples_from_latents() -> None:
    """From 2 log 2 each, the loss of heads that see no difference."""
    learner, latents, losses = critic(), state(False), []
    samples = replace(latents, x_t_BCFHW=keyed_normal(tuple(latents.x_t_BCFHW.shape), "samples"))
    for _ in range(8):
        loss = heads_loss(learner.forward(samples), learner.forward(latents)).mean()
        losses.append(loss.item())
        learner.backward(Expert.HIGH_NOISE, loss)
        learner.step(Expert.HIGH_NOISE)
    assert losses[0] == pytest.approx(2 * math.log(2), rel=0.2) and losses[-1] < 0.9 * losses[0]


@pytest.mark.usefixtures("one_rank")
def test_heads_do_not_see_the_patches_of_a_given_first_frame() -> None:
    logit_BS1, each_BS1 = outputs(batch := state(True), 0)
    torch.testing.assert_close(logit_BS1.mean(1), each_BS1[:, OF_A_FRAME:].mean(1))
    other_BS1, changed_BS1 = outputs(batch, 10)
    assert torch.equal(other_BS1, logit_BS1) and not torch.equal(changed_BS1, each_BS1)


@pytest.mark.usefixtures("one_rank")
def test_heads_see_every_patch_where_no_frame_is_given() -> None:
    logit_BS1, each_BS1 = outputs(state(False), 0)
    assert torch.equal(logit_BS1, each_BS1)


@pytest.mark.parametrize("frames", slow_but([2], [2, 3]))
def test_ranks_that_share_samples_average_the_patches_of_all_frames_but_the_given_one(frames: int) -> None:
    """Of two frames the first rank has the given one alone."""
    logit_BS1 = keyed_normal((2, frames * OF_A_FRAME, 1), "logits")
    for mean_B in call(shared_mean, logit_BS1, state(True, frames), ranks=2):
        torch.testing.assert_close(mean_B, logit_BS1[:, OF_A_FRAME:].mean((1, 2)))
