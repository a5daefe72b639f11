"""The small run of recipes.py without engines: diffusers' modules, torch's AdamW, the same random numbers."""

from dataclasses import replace

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from recipes import ADAM

from wandistiller.batch import STUDENT, State
from wandistiller.config.job import Job
from wandistiller.experts import Expert
from wandistiller.objectives.dmd2 import CRITIC, drawn
from wandistiller.training.prepare import prepare
from wandistiller.training.trainer import Trainer
from wandistiller.wan.transformer import renew_rope, velocity


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


SCALES = {Expert.HIGH_NOISE: 4.0, Expert.LOW_NOISE: 3.0}


def networks(job: Job) -> tuple[dict[Expert, WanTransformer3DModel], WanTransformer3DModel]:
    """The teacher's experts, and the student: the first and the last block of the low-noise one, or all.

    With the recipe key `lora` it has adapters, by peft.
    """
    folder, config = job.folder.path, job.student_transformer
    teacher = {e: WanTransformer3DModel.from_pretrained(folder / e.value).eval() for e in Expert}
    student = WanTransformer3DModel.from_config(config.raw)
    weights = teacher[Expert.LOW_NOISE].state_dict()
    if config.num_layers == 2:
        weights = {k: weights[k.replace("blocks.1.", "blocks.3.")] for k in student.state_dict()}
    student.load_state_dict(weights)
    if lora := job.run.lora:
        torch.manual_seed(job.run.seed)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        student.add_adapter(LoraConfig(r=lora["rank"], lora_alpha=lora["rank"], target_modules=targets))
    return teacher, student


def learned(model: WanTransformer3DModel) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def whole(text_BLD: torch.Tensor) -> torch.Tensor:
    """Pad prompts to the 512 rows that Wan sees."""
    return torch.nn.functional.pad(text_BLD, (0, 0, 0, 512 - text_BLD.shape[-2]))


def guided(model: WanTransformer3DModel, batch: State, null_LD: torch.Tensor, scale: float) -> torch.Tensor:
    null_BLD = whole(null_LD).expand_as(batch.conditioning.text_BLD)
    with torch.no_grad():
        texts = batch.conditioning.text_BLD, null_BLD
        v_text, v_null = (model(batch.x_t_BCFHW, 1000 * batch.sigma_B, c).sample for c in texts)
    return v_null + scale * (v_text - v_null)


def plain_losses(job: Job, steps: int, dtype: torch.dtype = torch.float32) -> list[float]:
    """Losses in float32, or in `dtype` with float32 master weights made from it, as DeepSpeed makes them."""
    teacher, student = networks(job)
    renew_rope(student.to(dtype))
    data, conditions, _ = prepare(job)
    optimizer, curve = MixedAdamW(student), []
    for step in range(steps):
        indices = list(range(step * job.batch.total, (step + 1) * job.batch.total))
        given = data.conditioning(indices).map(whole)
        batch = job.schedule.noised(data.x0(indices), given, indices, step)
        target_BCFHW = guided(teacher[batch.expert], batch, conditions.text[""], SCALES[batch.expert])
        v_BCFHW = velocity(student, batch)
        loss = (v_BCFHW - target_BCFHW).square().mean()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


class PlainDmd2:
    """DMD2 in plain PyTorch: two networks, two optimizers, the same random numbers."""

    def __init__(self, job: Job):
        self.job, settings = job, job.objective.terms[0]
        self.updates, self.sigmas = settings.critic_updates, job.schedule.few.sigmas
        self.warmup = settings.critic_warmup
        self.teacher, self.student = networks(job)
        _, self.critic = networks(job)
        self.data, conditions, _ = prepare(job)
        self.text = conditions.text
        adam = dict(ADAM["params"])
        self.optimizers = {
            self.student: torch.optim.AdamW(learned(self.student), **adam),
            self.critic: torch.optim.AdamW(
                learned(self.critic), **adam | {"lr": settings.critic_lr or adam["lr"]}
            ),
        }

    def warm_up(self) -> None:
        """Make the updates of the critic alone."""
        for update in range(self.warmup):
            self._critic_loss(update)

    def step(self, step: int) -> tuple[float, float]:
        """Make a step; return the student's loss and the mean of the critic's."""
        first = self.warmup + step * (self.updates + 1)
        critic = [self._critic_loss(first + k) for k in range(self.updates)]
        return self._student_loss(first + self.updates), sum(critic) / len(critic)

    def differences(self, trainer: Trainer) -> dict[str, float]:
        """Return how far each role's weights are from a trainer's, as a share of what Adam can move them.

        That share is the root mean square over all weights of a network. Adam divides a gradient by its own
        size, so one that is only rounding moves its weight by a whole rate; and kernels of other processors
        round otherwise. So single weights cannot be compared.
        """
        shares = {}
        for role, network in {STUDENT: self.student, CRITIC: self.critic}.items():
            ours = trainer.learners[role].engine(Expert.HIGH_NOISE).module
            trained = [
                [(n, p.detach()) for n, p in m.named_parameters() if p.requires_grad] for m in (ours, network)
            ]
            assert [n for n, _ in trained[0]] == [n for n, _ in trained[1]]
            one, other = (torch.cat([p.flatten() for _, p in weights]).double() for weights in trained)
            (group,) = self.optimizers[network].param_groups
            updates = self.optimizers[network].state[group["params"][0]]["step"]
            shares[role] = ((one - other).square().mean().sqrt() / (group["lr"] * updates)).item()
        return shares

    def _sampled(self, update: int) -> tuple[State, torch.Tensor]:
        """Draw noise and exit; return the drawn numbers and x0, with gradient through the last call."""
        indices = list(range(update * self.job.batch.total, (update + 1) * self.job.batch.total))
        given = self.data.conditioning(indices).map(whole)
        start, text_BLD = drawn(self.job.schedule, (16, 1, 4, 4), given, indices, update), given.text_BLD
        x, levels = start.x_t_BCFHW, [*self.sigmas, 0.0]
        for k in range(start.exit):
            with torch.no_grad():
                v = self.student(x, torch.full((len(x),), 1000 * levels[k]), text_BLD).sample
                x = x + (levels[k + 1] - levels[k]) * v
        now = levels[start.exit]
        x0 = x - now * self.student(x, torch.full((len(x),), 1000 * now), text_BLD).sample
        return start.renoise, x0

    def _learned(self, network: WanTransformer3DModel, loss: torch.Tensor) -> float:
        optimizer = self.optimizers[network]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned(network), 1.0)
        optimizer.step()
        return loss.item()

    def _critic_loss(self, update: int) -> float:
        at, x0 = self._sampled(update)
        x0, t = x0.detach(), at.sigma_B.view(-1, 1, 1, 1, 1)
        x_t = (1 - t) * x0 + t * at.x_t_BCFHW
        v = self.critic(x_t, 1000 * at.sigma_B, at.conditioning.text_BLD).sample
        return self._learned(self.critic, (v - (at.x_t_BCFHW - x0)).square().mean())

    def _student_loss(self, update: int) -> float:
        at, x0 = self._sampled(update)
        t = at.sigma_B.view(-1, 1, 1, 1, 1)
        x_t = (1 - t) * x0.detach() + t * at.x_t_BCFHW
        noised = replace(at, x_t_BCFHW=x_t)
        v_teacher = guided(self.teacher[at.expert], noised, self.text[""], SCALES[at.expert])
        with torch.no_grad():
            v_critic = self.critic(x_t, 1000 * at.sigma_B, at.conditioning.text_BLD).sample
        scale = (x0.detach() - (x_t - t * v_teacher)).abs().mean((1, 2, 3, 4), keepdim=True)
        gradient = t * (v_teacher - v_critic) / scale.clamp(min=1e-4)
        return self._learned(self.student, (x0 - (x0 - gradient).detach()).square().mean() / 2)
