"""The small run of recipes.py without engines: diffusers' modules, torch's AdamW, the same random numbers."""

import torch
from diffusers import WanTransformer3DModel
from recipes import ADAM

from wandistiller.batch import Expert
from wandistiller.config.job import Job
from wandistiller.training.prepare import prepare
from wandistiller.wan.transformer import fresh_rope, velocity


class MixedAdamW:
    """torch's AdamW on float32 copies of a model's weights, as DeepSpeed makes them, with clipping at 1."""

    def __init__(self, model: WanTransformer3DModel):
        self._weights = list(model.parameters())
        self._masters = [p.detach().float().clone().requires_grad_() for p in self._weights]
        self._adam = torch.optim.AdamW(self._masters, **ADAM["params"])

    def step(self) -> None:
        """Take the gradients of the weights, and give the weights what the masters become."""
        for master, p in zip(self._masters, self._weights, strict=True):
            master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adam.step()
        with torch.no_grad():
            for master, p in zip(self._masters, self._weights, strict=True):
                p.copy_(master)


def plain_losses(job: Job, steps: int, dtype: torch.dtype = torch.float32) -> list[float]:
    """Losses in float32, or in `dtype` with float32 master weights made from it, as DeepSpeed makes them."""
    folder = job.folder.path
    teacher = {e: WanTransformer3DModel.from_pretrained(folder / e.value).eval() for e in Expert}
    student = WanTransformer3DModel.from_config({**teacher[Expert.LOW_NOISE].config, "num_layers": 2})
    weights = teacher[Expert.LOW_NOISE].state_dict()
    student.load_state_dict({k: weights[k.replace("blocks.1.", "blocks.3.")] for k in student.state_dict()})
    student.to(dtype).rope = fresh_rope(student)
    data, text, _ = prepare(job)
    optimizer, curve = MixedAdamW(student), []
    for step in range(steps):
        indices = list(range(step * job.batch.total, (step + 1) * job.batch.total))
        batch = job.schedule.noised(*data.batch(indices), indices, step)
        model, scale = teacher[batch.expert], {Expert.HIGH_NOISE: 4.0, Expert.LOW_NOISE: 3.0}[batch.expert]
        null_BLD = text[""].expand_as(batch.text_BLD)
        with torch.no_grad():
            v_text, v_null = (
                model(batch.x_t_BCFHW, 1000 * batch.sigma_B, c).sample for c in (batch.text_BLD, null_BLD)
            )
        v_BCFHW = velocity(student, batch.x_t_BCFHW, batch.sigma_B, batch.text_BLD)
        loss = (v_BCFHW - (v_null + scale * (v_text - v_null))).square().mean()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve
