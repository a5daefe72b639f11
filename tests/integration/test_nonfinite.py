"""Steps whose loss or gradient is not finite: nothing is learned from them, and their samples are named."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpointed import spoil_cached
from on_ranks.tuning import batch, build, engine
from ranks import metrics, wandistiller, write_json
from recipes import TORCH_ADAM, recipe, student_engine
from slow_cases import slow_but
from torch import Tensor
from trainers import trainer_of

from wandistiller.batch import STUDENT
from wandistiller.checkpoint import loading
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.engine.workarounds import uncount_skipped_step
from wandistiller.experts import Expert
from wandistiller.student.learner import Learner
from wandistiller.training.prepare import prepare
from wandistiller.training.update import propagate_nonfinite
from wandistiller.utils.errors import NonFinite

NO_NORM = {"stage": 2, "compute_grad_norm": False}
ENGINES: dict[str, dict[str, Any]] = {
    "0 float32": {},
    "0 float32, unclipped": {"gradient_clipping": 0.0},
    "0 bfloat16": {},
    "1 bfloat16": {},
    "2 float32": {},
    "2 float32, not offloaded": {"zero_optimization": {"stage": 2}},
    "2 float32, no norm": {"zero_optimization": NO_NORM, "gradient_clipping": 0.0},
    "2 bfloat16, unchecked": {"bf16": {"enabled": True, "check_grad_overflow": False}},
    "3 float32": {},
    "3 bfloat16, not offloaded": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
}


def student(name: str) -> Learner:
    stage, dtype = re.match(r"(\d) (\w+)", name).groups()
    params = {"warmup_num_steps": 4, "warmup_max_lr": 1e-3}
    more = {"gradient_accumulation_steps": 2, "scheduler": {"type": "WarmupLR", "params": params}}
    made = engine(int(stage), dtype, **more | ENGINES[name])
    own = {key: section for key, section in ENGINES[name].items() if key == "bf16"}
    return build(RunConfig(), made.replaced(**own), ema=0.8)


USUAL = ["2 bfloat16, unchecked"]
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a loss that is not a number": lambda loss: loss * math.nan,
    "an infinite loss with a finite gradient": lambda loss: loss + math.inf,
    "a gradient that is 0 times infinity": lambda loss: loss + (loss - loss.detach()).square().sqrt(),
}


def learn(taught: Learner, step: int, wrong: Callable[[Tensor], Tensor] | None = None) -> float:
    """A step of two micro-steps towards velocities of zero, the last with the loss that `wrong` makes."""
    trained = taught.engine(Expert.HIGH_NOISE)
    for micro in range(2):
        loss = taught.velocity(batch(2 * step + micro)).square().mean()
        losses = {STUDENT: wrong(loss) if micro and wrong else loss}
        trained.backward(propagate_nonfinite(losses)[STUDENT])
        trained.step()
    taught.update_ema(Expert.HIGH_NOISE, step + 1)
    return loss.item()


def everything(taught: Learner) -> dict[str, Tensor]:
    """All that a step may change: master weights, moments, averages, weights of the network, counters."""
    trained, average = taught.trained[Expert.HIGH_NOISE], taught.averages[Expert.HIGH_NOISE]
    found = {f"{kind} {f.number}": t.clone() for f in trained.flats for kind, t in trained.tensors(f).items()}
    found |= {f"average {f.number}": average.of(f).clone() for f in trained.flats}
    with torch.no_grad():
        found["velocity"] = taught.velocity(batch(99)).clone()
    of = trained.engine
    counters = [of.global_steps, of.global_samples, of.skipped_steps, of.lr_scheduler.last_batch_iteration]
    return found | {"counters": torch.tensor([*counters, trained.steps() or 0])}


def differ(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)] + sorted(
        found.keys() ^ wanted.keys()
    )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", slow_but(USUAL, ENGINES))
def test_every_engine_skips_a_step_that_is_not_finite(name: str) -> None:
    whole, broken = student(name), student(name)
    learn(whole, 0), learn(broken, 0)
    before = everything(broken)
    for what, wrong in WRONG.items():
        learn(broken, 1, wrong)
        assert not broken.engine(Expert.HIGH_NOISE).was_step_applied(), what
        uncount_skipped_step(broken.engine(Expert.HIGH_NOISE))
        assert differ(everything(broken), before) == []
    assert [learn(broken, step) for step in (1, 2)] == [learn(whole, step) for step in (1, 2)]
    assert differ(everything(broken), everything(whole)) == []


SMALL: dict[str, Any] = {"save_every": 3, "max_steps": 6, "sample_prompts": [], "guidance_scale": 1.0}


def run_of(folder: Path, wan: Path, name: str, **more: Any) -> dict[str, Any]:
    """A recipe of 4 samples a step, 2 a micro-step on one rank: a prompt comes in every second step."""
    ds = student_engine(2, **{"train_batch_size": 4, "optimizer": TORCH_ADAM, **more.pop("engine", {})})
    return recipe(folder, wan, output_dir=str(folder / name), deepspeed_config=ds, **SMALL | more)


class Broken(NamedTuple):
    """A folder whose cache holds a latent that is not finite."""

    folder: Path
    prompt: str
    indices: list[int]
    """Position of a sample among the 24 of a run."""
    sigmas: list[float]

    @property
    def steps(self) -> list[int]:
        """Counted from 1."""
        return [i // 4 + 1 for i in self.indices]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, wan1: Path, one_rank: torch.device) -> Broken:
    folder = tmp_path_factory.mktemp("broken")
    job = read_job(RunConfig(**run_of(folder, wan1, "prepared")), 1)
    data, *_ = prepare(job)
    prompts = [data.item_at(i).prompt for i in range(24)]
    bad = prompts[6]  # of the second step
    spoil_cached(folder / "cache" / "latents", bad, (0, 0, 1, 2), math.inf, "x0")
    indices = [i for i, prompt in enumerate(prompts) if prompt == bad]
    return Broken(
        folder, bad, indices, [job.schedule.draw_sigma(Expert.HIGH_NOISE, i // 4, i) for i in indices]
    )


def stopped(given: dict[str, Any]) -> str:
    """The message of a run on this rank as it stops."""
    with pytest.raises(NonFinite) as error:
        trainer_of(given).train()
    return str(error.value)


@pytest.mark.slow
def test_two_ranks_stop_and_name_the_sample_and_one_that_goes_on_comes_to_the_same(
    broken: Broken, wan1: Path
) -> None:
    given, output, index = run_of(broken.folder, wan1, "stop"), broken.folder / "stop", broken.indices[0]
    file, good = output / "nonfinite" / "step_00000002.json", output / "checkpoints" / "step_00000001"
    recipe_file = write_json(broken.folder / "stop.json", given)
    both = wandistiller("train", "--recipe", recipe_file, ranks=2, code=1)  # torchrun's own
    assert "exitcode  : 4" in both.stderr
    for ranks in (2, 1):
        message = both.stderr if ranks == 2 else stopped(given)
        where = f"sample {index} on rank {ranks - 1}, sigma {broken.sigmas[0]:.4f}, expert transformer"
        assert f"{where}: {broken.prompt!r}; its cached latent is not finite" in message
        assert "1 of 4 samples is not finite" in message and str(file) in message
        case = json.loads(file.read_text())
        assert (case["step"], case["checkpoint"]) == (2, str(good))
        assert [s["sample"] for s in case["samples"]] == [4, 5, 6, 7]
        assert [s["sample"] for s in case["samples"] if s["not_finite"]] == [index]
        assert case["samples"][index - 4]["losses"] == {"velocity": None}
        assert [line["step"] for line in metrics(output)] == [1]
        assert [p.name for p in output.glob("checkpoints/step_*")] == [good.name]


@pytest.mark.slow
def test_a_run_that_skips_is_bitwise_the_same_after_a_cut(broken: Broken, wan1: Path) -> None:
    params = {"warmup_num_steps": 6, "warmup_max_lr": 1e-3, "warmup_type": "linear"}
    warmup = {"type": "WarmupLR", "params": params}
    how = {"on_nonfinite": "skip", "ema": 0.8, "engine": {"bf16": {"enabled": True}, "scheduler": warmup}}
    names = ("whole", "cut")
    for name, steps in (("whole", 6), ("cut", 3), ("cut", 6)):
        trainer_of(run_of(broken.folder, wan1, name, max_steps=steps, **how)).train()
    whole, cut = (metrics(broken.folder / name) for name in names)
    keys = ("step", "loss", "grad_norm", "lr", "skipped")
    assert [[line.get(k) for k in keys] for line in cut] == [[line.get(k) for k in keys] for line in whole]
    assert [line["step"] for line in whole if line.get("skipped")] == broken.steps
    assert [line["step"] for line in whole if line["loss"] is None] == broken.steps
    rates = [
        max(0, n - 1) * 1e-3 / 6 for n in range(6)
    ]  # as if none was skipped; DeepSpeed begins with two zeros
    assert [line["lr"] for line in whole] == pytest.approx(rates, abs=1e-4)
    ends = [broken.folder / name / "checkpoints" / "step_00000006" for name in names]
    assert [loading.read_state(end)["skipped_steps"] for end in ends] == [len(broken.steps)] * 2
    for averaged in (False, True):
        a, b = (dict(loading.read_weights(end, Expert.HIGH_NOISE, averaged)) for end in ends)
        assert differ(a, b) == [] and all(value.isfinite().all() for value in a.values())


def test_skipped_steps_are_counted_across_resumes_up_to_the_limit(broken: Broken, wan1: Path) -> None:
    given = run_of(broken.folder, wan1, "limit", on_nonfinite="1")
    for _ in range(2):  # the second goes on after the first skipped step
        assert "more than 1 such steps left out (--on_nonfinite 2)" in stopped(given)
        assert [line["step"] for line in metrics(broken.folder / "limit")] == list(range(1, broken.steps[1]))
    last = broken.folder / "limit" / "checkpoints" / f"step_{broken.steps[1] - 1:08d}"
    assert loading.read_state(last)["skipped_steps"] == 1
    trainer_of(given | {"on_nonfinite": "3"}).train()
    assert len(metrics(broken.folder / "limit")) == 6


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose cache is as it was made."""
    return tmp_path_factory.mktemp("sound")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("stage", "bf16"), slow_but([(3, True)], [(0, False), (0, True), (3, True)]))
def test_a_learning_rate_that_is_far_too_high_stops_at_the_second_step(
    stage: int, bf16: bool, sound: Path, wan1: Path
) -> None:
    name = f"high_{stage}_{bf16}"
    how = {"bf16": {"enabled": bf16}, "zero_optimization": {"stage": stage}}
    message = stopped(run_of(sound, wan1, name, engine=how, learning_rates={"*": 1e30}))
    assert message.startswith(
        "step 2: the loss of 4 of 4 samples is not finite. Nothing was learned from it; see "
    )
    assert "(--lr 0.0003 --allow_changed optimizer)" in message and "cached" not in message
    assert loading.read_state(sound / name / "checkpoints" / "step_00000001")["step"] == 1


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", slow_but([2], [0, 2]))
def test_a_gradient_that_is_too_large_for_its_norm_stops_a_run_whose_losses_are_finite(
    stage: int, sound: Path, wan1: Path
) -> None:
    name = f"steep_{stage}"
    zero, objective = {"zero_optimization": {"stage": stage}}, {"name": "velocity", "weight": 3e38}
    message = stopped(run_of(sound, wan1, name, objective=objective, engine=zero))
    assert message.startswith(
        "step 1: each loss is finite, but the gradient is not, or is too large for its norm."
    )
    checkpoint = sound / name / "checkpoints" / "step_00000000"
    saved = json.loads((checkpoint / "transformer" / "engine.json").read_text())
    assert (saved["global_steps"], saved["skipped_steps"], saved["global_samples"]) == (0, 0, 0)
    case = json.loads((sound / name / "nonfinite" / "step_00000001.json").read_text())
    assert all(sample["losses"]["velocity"] and not sample["not_finite"] for sample in case["samples"])
