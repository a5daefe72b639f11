"""DMD2: the student's own samples, by backward simulation, move to where the teacher's are likelier."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from wandistiller.batch import STUDENT, Prediction, State, to_device
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.experts import Expert
from wandistiller.flow import EULER, FLOW_MAP, RENOISE, FlowSchedule, clean
from wandistiller.objectives.base import SATURATION, TO_DATA, Aim, Limit, Role, RunFacts, Term, mean_square
from wandistiller.objectives.flow_map import TO_ANY_LEVEL
from wandistiller.objectives.rollout import WITH_NOISE, Renoised, Rollout, Turn, drawn, renoised
from wandistiller.objectives.script import TEACHER, Ask, Learn, Loss, Script, Slope
from wandistiller.utils.errors import RECIPE, Problem
from wandistiller.utils.validation import NotNegative, Positive, Share, Steps

CRITIC = "critic"
"""Role of the network that learns the velocity of the student's own samples."""
ROLLOUT, REAL, HEADS = "generated", "real", "heads"
"""Kinds of states: the student's own, cached latents with noise. Row of the losses of the critic's heads."""
HEADS_WEIGHT = 0.01
"""Of the heads' loss in the critic's: it hardly moves the critic itself. Source: DMD2's settings for SDXL."""
LEAST, LEAST_SUM = 1e-4, 1e-8
"""Least divisors: of the gradient, and of its part along the critic's residual."""
LAGS = (
    "The critic does not keep up with the student's samples: over {most} of its difference from the teacher "
    "was its own error in {window} steps. Give it more `critic_updates` or a higher `critic_lr`, or let it "
    "follow: `critic_follows` 0.03."
)
GROWN = "The gradient that moves the samples has grown to {value:.2f} times its start."
PARTED = "Critic and teacher move apart: the gap of their velocities is {value:.2f} times that at the start."
LOWER, START = "Lower the student's `lr`, from an earlier checkpoint.", "at the start of the run"


def realism(prediction: Prediction) -> Tensor:
    """Return the mean logit_B of a critic's heads that a sample is real."""
    heads = [logit_BS1.float().flatten(1).mean(1) for logit_BS1 in prediction.features.values()]
    return prediction.mean(torch.stack(heads).mean(0))  # of this rank's patches, where several share a sample


def heads_loss(fake: Prediction, real: Prediction) -> Tensor:
    """Compute loss_B of a critic's heads on samples of the student's and on cached latents at the same noise.

    softplus(D(fake)) + softplus(-D(real)). Source: Goodfellow et al. 2014, arXiv:1406.2661.
    """
    return softplus(realism(fake)) + softplus(-realism(real))


def towards_teacher(
    sample: Renoised, teacher_BCFHW: Tensor, critic_BCFHW: Tensor, *, projected: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gradient in x0_BCFHW that moves samples, of velocities there, and numbers_B for metrics.

    Args:
        projected: leave out the gradient's part along the critic's residual, which is its own error there.
            Source: Wang et al. 2026, arXiv:2609.35768.
    """
    x0_BCFHW = sample.x0_BCFHW
    away_BCFHW = x0_BCFHW - clean(sample.x_t_BCFHW, teacher_BCFHW, sample.sigma_B)
    scale_B = away_BCFHW.abs().flatten(1).mean(1).clamp(min=LEAST)
    step_B = (sample.sigma_B / scale_B).view(-1, 1, 1, 1, 1)
    gradient_BCFHW = step_B * (teacher_BCFHW - critic_BCFHW)
    if projected:  # above a hand-over too, where the residual is of the velocity and not of x0
        gradient_BCFHW = orthogonal(gradient_BCFHW, critic_BCFHW - sample.target_BCFHW)
    apart_B = mean_square(critic_BCFHW - teacher_BCFHW)
    # averages to 0 where the critic is right, however large the target's noise, as above a hand-over
    lag_B = _mean_of((sample.target_BCFHW - critic_BCFHW) * (teacher_BCFHW - critic_BCFHW))
    return gradient_BCFHW, {
        "critic_lag": lag_B / apart_B.clamp(min=LEAST),
        "gradient": _mean_of(gradient_BCFHW.abs()),
        "deviation": x0_BCFHW.flatten(1).std(1),
        "cosine": cosine_similarity(critic_BCFHW.flatten(1), teacher_BCFHW.flatten(1)),
        "gap": (apart_B / mean_square(teacher_BCFHW).clamp(min=LEAST)).sqrt(),
    }


def orthogonal(x_BCFHW: Tensor, to_BCFHW: Tensor) -> Tensor:
    """Return x_BCFHW less its part along `to_BCFHW`, sample by sample; unchanged where that is 0."""
    x_BN, to_BN = x_BCFHW.flatten(1), to_BCFHW.flatten(1)
    share_B1 = (x_BN * to_BN).sum(1, keepdim=True) / to_BN.square().sum(1, keepdim=True).clamp(min=LEAST_SUM)
    return (x_BN - share_B1 * to_BN).view_as(x_BCFHW)


def _mean_of(x_BCFHW: Tensor) -> Tensor:
    return x_BCFHW.flatten(1).mean(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dmd2(Term):
    """Match the distribution of the teacher's samples with those of `steps` sampling steps.

    The student samples from noise up to a drawn one of its steps, without gradient, and predicts x0 there.
    x0 is noised again to x_t, where the guided teacher and the critic, which learns the velocity of the
    student's own samples, say how to move it: L = 1/2 mean (x0 - sg(x0 - g))^2, g of `_student`.
    A step of the run is `critic_updates` updates of the critic, each on samples of its own, and then one of
    the student; if `shared`, the critic's last and the student's are one, on the same samples. There is no
    data: prompts are enough.

    Of a student of two experts one is trained in a run. The high-noise one's samples lead to the hand-over
    and are compared above it; the other's begin with the finished high-noise expert.

    Source: Yin et al. 2024, arXiv:2405.14867; experts: Fan et al. 2025, arXiv:2510.27684.
    """

    states: ClassVar[str] = ROLLOUT
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit("critic lags", "critic_lag", 0.5, LAGS, grows=False),
        Limit("critic diverges", "gradient", 1.2, f"{GROWN} {LOWER}"),
        # from the teacher without guidance the gap begins at 0
        Limit("velocities part", "gap", 1.5, f"{PARTED} {LOWER}", beyond=0.4),
        # samples of earlier exits are blurred
        Limit("saturation", "deviation", 1.15, SATURATION.replace("{of}", START), within="exit"),
    )

    steps: Steps = 4
    """Sampling steps to train for."""
    sampler: Literal["euler", "renoise", "flow_map"] = EULER
    """Along the student's velocity, to its clean latents, which are noised again, or as a flow map's student,
    which has other numbers of steps in each update: best beside the objective `flow_map`."""
    expert: Literal["high_noise", "low_noise"] | None = None
    """The expert of a two-expert student that is trained; the high-noise one first, the other after it."""
    critic_updates: Steps | None = None
    """The critic's updates before each of the student's; None: 5, and 1 of a flow map."""
    critic_start: Literal["student", "teacher"] = "student"
    """Weights and shape of the critic at the start: the student's, or the teacher's low-noise expert's.

    Of adapters, which have the student's base, "teacher" is the student's A and a B of 0: no change yet.
    """
    critic_lr: Positive | None = None
    """The critic's learning rate; None: the student's."""
    critic_follows: Share = 0.0
    """Share of the way that the critic's weights go to the student's after each of the student's updates."""
    shared: bool = False
    """The critic's last update is made with the student's: its pass at the student's samples learns too."""
    carried: bool = False
    """The student's samples go on from one of its updates to the next, a call in each, and begin anew at the
    end; the critic's own updates sample from noise."""
    projected: bool = False
    """The gradient that moves the samples loses its part along the critic's residual there."""
    compare: Literal["noise", "path", "mixed"] = WITH_NOISE
    """Where the student learns from its samples: with new noise, on its own Euler step, or half on each."""
    guidance_share: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the samples that the teacher predicts with guidance, which counts so much more for them."""
    gan: NotNegative = 0.0
    """Weight, such as 0.03, of heads on the critic that tell samples from cached latents; 0: no heads."""

    def __post_init__(self) -> None:
        usual = 1 if self.sampler == FLOW_MAP else 5
        object.__setattr__(self, "critic_updates", self.critic_updates or usual)

    @property
    def aim(self) -> Aim:
        is_direct = self.sampler == RENOISE or self.steps == 1
        destination = TO_DATA if is_direct else "to samples, by Euler's method"
        destination = TO_ANY_LEVEL if self.sampler == FLOW_MAP else destination
        return Aim(destination, self.steps, self.sampler, expert=Expert.of_key(self.expert))

    @property
    def roles(self) -> tuple[Role, ...]:
        losses = {CRITIC: 1.0} | ({HEADS: HEADS_WEIGHT} if self.gan else {})
        settings = self.critic_start, self.critic_lr, self.critic_follows
        return (Role(CRITIC, self.critic_updates, losses, *settings, self.gan > 0, self.shared),)

    def problems(self, where: str) -> list[str]:
        wrong = [f"{where}.{key}" for key in ("expert", "critic_follows") if self.gan and getattr(self, key)]
        texts = [f"`{where}.gan` does not go with `{key}`. Keep one of them." for key in wrong]
        if self.expert and self.sampler != EULER:
            both = f'`{where}.sampler` is "{self.sampler}" and `{where}.expert` given'
            texts.append(f'{both}. Two experts sample along the path: write "sampler" "euler", or none.')
        if self.compare != WITH_NOISE and not self.projected:
            path = f'`{where}.compare` is "{self.compare}" without `projected`, which makes samples rough'
            texts.append(f"{path}. Write `projected` true too, or leave `compare` out.")
        return [Problem(text, RECIPE, where) for text in texts]

    def combined_problems(self, where: str, run: RunFacts) -> list[str]:
        texts, of_two, from_teacher = [], run.has_two_experts, self.critic_start == "teacher"
        if of_two and not self.expert:
            text = '`experts` is "two", and dmd2 trains one network in a run. Write "one", or give dmd2'
            texts.append(f'{text} the key `expert`: "high_noise" in one stage and "low_noise" in the next.')
        if of_two and self.expert and run.is_measured:
            text = "dmd2 has `expert`, which loads one of the teacher's, but this student is made by both"
            texts.append(f"{text}. Train it in a stage before, or name its folder as `init`.")
        if self.expert and not of_two:
            texts.append("dmd2 has `expert`, but the student is one network. Leave `expert` out.")
        if run.has_buckets:
            text = "`buckets` makes samples of several sizes, and dmd2 draws its own at one size"
            texts.append(f"{text}. Leave `buckets` out.")
        if self.critic_follows and from_teacher and not run.adapts_teacher:
            text = f"`critic_follows` is {self.critic_follows}: it mixes weights of critic and student, which"
            text += " needs a critic of the student's shape and start, or adapters of the teacher"
            texts.append(f'{text}. Write `critic_start` "student", or leave one of them out.')
        if from_teacher and run.trains_part:
            parts = "`frozen`, or `lora` on a student that is not the teacher, trains a part of the student"
            whole = '`critic_start` is "teacher", whose critic is trained as a whole'
            texts.append(f'{whole}, but {parts}. Write `critic_start` "student".')
        return texts

    def _turn(self, role: str, update: int, schedule: FlowSchedule) -> Turn | None:
        """Return the place of an update in roll-outs that go on; it is the same for all of its samples."""
        if role != STUDENT or not self.carried:
            return None
        exits, (critic,) = schedule.exits(), self.roles
        every = critic.updates_alone + 1
        place = update // every % len(exits)
        return Turn(exits[place], update - every * place)

    def begun(self, role: str, update: int, schedule: FlowSchedule) -> int:
        turn = self._turn(role, update, schedule)
        return turn.begun if turn else update

    def draw(self, role: str, source: MicroBatches, update: int, micro: int) -> dict[str, State]:
        turn = self._turn(role, update, source.schedule)
        compared = (self.compare, turn, self.guidance_share) if role == STUDENT else ()
        batch = drawn(source, update, micro, *compared)
        if not self.gan or role == STUDENT and not self.shared:
            return {ROLLOUT: batch}
        begun = self.begun(role, update, source.schedule)
        return {ROLLOUT: batch, REAL: source.noised_as(batch.renoise, update, micro, begun)}

    def roll_out(
        self,
        role: str,
        states: dict[str, State],
        schedule: FlowSchedule,
        carried_BCFHW: Tensor | None = None,
    ) -> Generator[Ask, Prediction, dict[str, State]]:
        batch = states[ROLLOUT]
        if carried_BCFHW is not None:
            x_BCFHW = to_device(carried_BCFHW, batch.x_t_BCFHW.device)
            batch = batch.at(batch.exit, x_BCFHW)
        state = yield from self.simulated(batch)
        if role == CRITIC:
            student = yield Ask(STUDENT, state)
            state = renoised(state, (yield from self.to_data(state, student.v_BCFHW)))
        return states | {ROLLOUT: state}

    def to_data(self, state: Rollout, v_BCFHW: Tensor) -> Generator[Ask, Prediction, Tensor]:
        """Return the velocity that leads from a state to data in one step, with the gradient of `v_BCFHW`.

        A flow map's velocity leads to the next level. From there it is asked again, without gradient.
        """
        sigma, end = state.few.ends(state.call)
        if state.end_B is None or not end:
            return v_BCFHW
        there = state.following(v_BCFHW.detach())
        rest = yield Ask(STUDENT, replace(there, end_B=torch.zeros_like(there.end_B)))
        return ((sigma - end) * v_BCFHW + end * rest.v_BCFHW) / sigma

    def simulated(self, batch: Rollout) -> Generator[Ask, Prediction, Rollout]:
        """Sample from the batch's noise to the state before its drawn call, with the sampler of use.

        Source: backward simulation, Yin et al. 2024, arXiv:2405.14867, section 4.5.
        """
        state = batch
        for _ in range(batch.call, batch.exit):
            student = yield Ask(STUDENT, state)
            state = state.following(student.v_BCFHW)
        return state

    def script(self, role: str, states: dict[str, State], schedule: FlowSchedule) -> Script:
        sample, real = states[ROLLOUT], states.get(REAL)
        return self._student(sample, real, schedule) if role == STUDENT else self._critic(sample, real)

    def _critic(self, sample: Renoised, real: State | None) -> Script:
        """Let the critic learn the velocity of the student's samples and, with heads, to tell them."""
        return self._of_critic(sample, *(yield _learned_by_critic(sample, real)))

    def _student(self, state: Rollout, real: State | None, schedule: FlowSchedule) -> Script:
        """Move the student's samples by the gradient in x0_BCFHW, g = t (v_teacher - v_critic), normalised.

        t (v_teacher - v_critic) = x0_critic - x0_teacher, which is divided by each sample's mean distance
        from the teacher's x0. Source: Yin et al. 2024, arXiv:2311.18828, equations 7 and 8.
        """
        student = yield Learn(state)
        v_BCFHW = yield from self.to_data(state, student.v_BCFHW)
        sample = renoised(state, v_BCFHW.detach())
        if self.gan:
            numel = sample.x0_BCFHW[0].numel()  # inside: a mean's gradient is too small for float16
            slope_BCFHW = yield Slope(CRITIC, sample, lambda p: numel * softplus(-realism(p)).sum())
        to_critic = _learned_by_critic(sample, real) if self.shared else [Ask(CRITIC, sample)]
        teacher, critic, *true = yield [Ask(TEACHER, sample, guided=self.guidance_share), *to_critic]
        velocities = teacher.v_BCFHW, critic.v_BCFHW.detach()
        gradient_BCFHW, numbers = towards_teacher(sample, *velocities, projected=self.projected)
        if self.gan:
            adversarial_BCFHW = self.gan * ((1 - sample.sigma_B.view(-1, 1, 1, 1, 1)) * slope_BCFHW)
            numbers["adversarial"] = _mean_of(adversarial_BCFHW.abs())
            gradient_BCFHW = gradient_BCFHW + adversarial_BCFHW
        x0_BCFHW = clean(state.x_t_BCFHW, v_BCFHW, state.sigma_B)
        loss_B = mean_square(x0_BCFHW - (sample.x0_BCFHW - gradient_BCFHW)) / 2
        carried_BCFHW = None
        if self.carried and state.exit < schedule.exits()[-1]:
            carried_BCFHW = state.following(student.v_BCFHW.detach()).x_t_BCFHW
        numbers["exit"] = torch.full_like(state.sigma_B, state.exit)
        loss = Loss(loss_B[None], numbers, carried_BCFHW)
        return {STUDENT: loss} | ({CRITIC: self._of_critic(sample, critic, *true)} if self.shared else {})

    def _of_critic(self, sample: Renoised, fake: Prediction, real: Prediction | None = None) -> Loss:
        loss_B = mean_square(fake.v_BCFHW - sample.target_BCFHW)
        return Loss(torch.stack([loss_B, heads_loss(fake, real)] if self.gan else [loss_B]))


def _learned_by_critic(sample: Renoised, real: State | None) -> list[Learn]:
    """Return where the critic learns: at samples and, with heads, at cached latents."""
    return [Learn(state, CRITIC) for state in (sample, real) if state is not None]
