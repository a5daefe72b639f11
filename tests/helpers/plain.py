"""The small run of recipes.py without engines: diffusers' modules, torch's AdamW, the same random numbers."""

import statistics
from dataclasses import replace
from itertools import pairwise

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from recipes import ADAM

from wandistiller.batch import STUDENT, Conditioning, State
from wandistiller.config.job import Job
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.engine.batch_size import BatchSize
from wandistiller.experts import Expert
from wandistiller.objectives.dmd2 import CRITIC
from wandistiller.objectives.rollout import WITH_NOISE, Turn, drawn
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
        conditioning = data.conditioning(indices).map(whole)
        batch = job.schedule.noised(data.x0(indices), conditioning, indices, step)
        target_BCFHW = guided(teacher[batch.expert], batch, conditions.text[""], SCALES[batch.expert])
        v_BCFHW = velocity(student, batch)
        loss = (v_BCFHW - target_BCFHW).square().mean()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


class PlainDmd2:
    """DMD2 in plain PyTorch, in the order of objectives/dmd2.py: two networks, two optimizers."""

    def __init__(self, job: Job):
        self.job, self.dmd2 = job, job.objective.terms[0]
        self.teacher, self.student = networks(job)
        _, self.critic = networks(job)
        self.following: torch.Tensor | None = None
        """States after the last call that learned, if samples go on from update to update."""
        data, conditions, _ = prepare(job)
        total, self.null_LD = job.batch.total, conditions.text[""]
        self.source = MicroBatches(data, job.schedule, BatchSize(total, 1, total), (16, 1, 4, 4))
        rates = {self.student: ADAM["params"]["lr"], self.critic: self.dmd2.critic_lr}
        self.optimizers = {
            network: torch.optim.AdamW(learned(network), **ADAM["params"] | {"lr": lr})
            for network, lr in rates.items()
        }

    def step(self, step: int) -> tuple[float, float]:
        """Make a step; return the student's loss and the mean of the critic's."""
        alone = self.dmd2.critic_updates - self.dmd2.shared
        first = step * (alone + 1)
        critic = [self.update_critic(first + k) for k in range(alone)]
        call, turn = step % self.dmd2.steps, None
        if self.dmd2.carried:
            turn = Turn(call, first + alone - call * (alone + 1))
        student, *joint = self.update_student(first + alone, turn)
        return student, statistics.mean(critic + joint)

    def sampled(
        self, update: int, compare: str = WITH_NOISE, turn: Turn | None = None
    ) -> tuple[State, torch.Tensor]:
        """Sample up to a drawn call; return the noise for the samples, at its level, and x0 of that call.

        The noise of those on the path is where the velocity of that call comes from.
        """
        start = drawn(self.source, update, 0, compare, turn)
        text_BLD, x = whole(start.conditioning.text_BLD), start.x_t_BCFHW
        levels = [*self.job.schedule.few.sigmas, 0.0][: start.exit + 2]
        if turn and turn.exit:
            x, levels = self.following, levels[-2:]
        for sigma, following in pairwise(levels):
            with torch.set_grad_enabled(following == levels[-1]):  # at the drawn call
                v = self.student(x, torch.full((len(x),), 1000 * sigma), text_BLD).sample
            x, x0, noise = x + (following - sigma) * v, x - sigma * v, x + (1 - sigma) * v.detach()
        self.following = x.detach() if turn else self.following
        noise = torch.where(start.on_path_B.view(-1, 1, 1, 1, 1), noise, start.renoise.x_t_BCFHW)
        return replace(start.renoise, x_t_BCFHW=noise, conditioning=Conditioning(text_BLD)), x0

    def renoised(self, noise: State, x0: torch.Tensor) -> tuple[State, torch.Tensor]:
        """The samples with noise, and the velocity of the line from the one to the other."""
        t, x0 = noise.sigma_B.view(-1, 1, 1, 1, 1), x0.detach()
        x_t = (1 - t) * x0 + t * noise.x_t_BCFHW
        return replace(noise, x_t_BCFHW=x_t), noise.x_t_BCFHW - x0

    def update_critic(self, update: int) -> float:
        sample, target = self.renoised(*self.sampled(update))
        return self.learn(self.critic, (velocity(self.critic, sample) - target).square().mean())

    def update_student(self, update: int, turn: Turn | None) -> list[float]:
        """Return the losses of what learned: the student, and the critic if it shares the samples."""
        noise, x0 = self.sampled(update, self.dmd2.compare, turn)
        sample, target = self.renoised(noise, x0)
        v_teacher = guided(self.teacher[sample.expert], sample, self.null_LD, SCALES[sample.expert])
        v_critic = velocity(self.critic, sample)
        t = sample.sigma_B.view(-1, 1, 1, 1, 1)
        away = (x0 - (sample.x_t_BCFHW - t * v_teacher)).abs().mean((1, 2, 3, 4), keepdim=True)
        gradient = t * (v_teacher - v_critic.detach())
        if self.dmd2.projected:
            residual = v_critic.detach() - target
            products = [(a * residual).sum((1, 2, 3, 4), keepdim=True) for a in (gradient, residual)]
            gradient = gradient - products[0] / products[1] * residual
        gradient = gradient / away.clamp(min=1e-4)
        losses = {self.student: (x0 - (x0 - gradient).detach()).square().mean() / 2}
        if self.dmd2.shared:
            losses[self.critic] = (v_critic - target).square().mean()
        return [self.learn(network, loss) for network, loss in losses.items()]

    def learn(self, network: WanTransformer3DModel, loss: torch.Tensor) -> float:
        self.optimizers[network].zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned(network), 1.0)
        self.optimizers[network].step()
        return loss.item()

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
