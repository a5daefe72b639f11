"""A Wan of two times, a flow map: a second embedder takes the noise level to which its velocity leads."""

from copy import deepcopy

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTimeTextImageEmbedding
from torch import Tensor

from wandistiller.network.names import SECOND_TIME, set_parameter
from wandistiller.network.weight_reader import WeightReader

GATE = {"gate_value": 0.25, "deltatime_type": "r"}
"""Keys that a flow map's config.json has beside a Wan's, and their usual values."""


class TwoTimes(WanTimeTextImageEmbedding):
    """Wan's condition embedder, whose embedding of time is (1 - g) time_embedder(t) + g delta_embedder(r).

    Names and values are those of diffusers' AnyFlowTransformer3DModel (0.42.1). Source: arXiv:2605.13724.
    """

    gate: float

    def forward(
        self,
        timestep: Tensor,
        text_BLD: Tensor,
        image_BLD: Tensor | None = None,
        timestep_seq_len: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Embed as Wan does; the first rows of `timestep` are t, the last are r, and one is for both."""
        rows = self.timesteps_proj(timestep)
        if timestep_seq_len is not None:
            rows = rows.unflatten(0, (-1, timestep_seq_len))
        samples, embedders = len(text_BLD), (self.time_embedder, self.delta_embedder)
        t_emb, r_emb = (
            embedder(part.to(embedder.linear_1.weight.dtype)).type_as(text_BLD)
            for embedder, part in zip(embedders, (rows[:samples], rows[-samples:]), strict=True)
        )
        temb = (1 - self.gate) * t_emb + self.gate * r_emb
        image_BLD = None if image_BLD is None else self.image_embedder(image_BLD)
        return temb, self.time_proj(self.act_fn(temb)), self.text_embedder(text_BLD), image_BLD


def add_second_time(model: WanTransformer3DModel, gate: float) -> None:
    """Give `model` a second time, whose embedder begins as that of the first: at r = t it is the same Wan."""
    embedder = model.condition_embedder
    embedder.__class__, embedder.gate = TwoTimes, gate
    embedder.delta_embedder = deepcopy(embedder.time_embedder)


@torch.no_grad()
def begin_second_time(model: WanTransformer3DModel, reader: WeightReader | None = None) -> None:
    """Let a second embedder begin as in `reader`, as the first there, or, on the meta device, as here."""
    for name, second in [(n, p) for n, p in model.named_parameters() if SECOND_TIME in n]:
        first = name.replace(SECOND_TIME, "time_embedder")
        if reader:
            reader.read(name if name in reader.stored else first, second)
        elif second.is_meta:
            set_parameter(model, name, model.get_parameter(first).clone())
