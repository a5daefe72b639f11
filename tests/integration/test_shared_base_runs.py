"""Runs of adapters on the teacher's own weights: bit-equal to copies, to plain PyTorch, resumed, exported."""

from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import exported
from diffusers import WanTransformer3DModel
from plain import PlainDmd2
from ranks import losses, metrics
from recipes import recipe, student_engine, train
from safetensors.torch import load_file
from slow_cases import slow_but
from states import state
from styles import style
from trainers import trainer_of

from wandistiller.batch import STUDENT
from wandistiller.experts import Expert
from wandistiller.export.source import read_source
from wandistiller.objectives.dmd2 import CRITIC
from wandistiller.objectives.script import TEACHER
from wandistiller.planner.passes import base_sweeps
from wandistiller.teacher.base import local_modules
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.transformer import velocity

STEPS = 2
LORA = {"student_config": {}, "lora": {"rank": 4}, "max_steps": STEPS, "save_every": 1, "sample_prompts": []}
DMD2 = {"name": "dmd2", "steps": 4, "critic_updates": 2, "critic_lr": 2e-3}
SHARED = DMD2 | {"critic_updates": 1, "shared": True, "projected": True, "compare": "mixed"}
CONSISTENCY = {"name": "consistency", "edges": 4}
OBJECTIVES = {
    "velocity": "velocity",
    "consistency": CONSISTENCY,
    "dmd2": DMD2,
    "heads": DMD2 | {"gan": 0.03},
    "shared": SHARED,
    "shared heads": SHARED | {"gan": 0.03},
    "carried": SHARED | {"carried": True},
    "sum": [DMD2 | {"sampler": "renoise"}, {"name": "consistency"}],
    "feature": ["velocity", {"name": "feature", "blocks": [1, 3]}],
}
PLAIN = [DMD2, SHARED | {"carried": True}]
COPIES = {"wandistiller": {"placement": "owner"}}
PLACEMENTS = {
    "replicated": {"zero_optimization": {"stage": 0}},
    "streamed": {"wandistiller": {"placement": "streamed"}},
    "files": {"wandistiller": {"placement": "files"}},
}


def trained(
    folder: Path, wan: Path, name: str, teacher: dict[str, Any], *, ranks: int = 1, **more: Any
) -> Path:
    return train(folder, wan, name, ranks=ranks, teacher_deepspeed_config=teacher, **LORA | more)


def learned(output: Path) -> dict[str, torch.Tensor]:
    """All that the last checkpoint has of every role: weights and moments."""
    last = max((output / "checkpoints").glob("step_*"))
    files = sorted(last.rglob("rank_*.safetensors"))
    return {f"{file.relative_to(last)} {name}": t for file in files for name, t in load_file(file).items()}


def assert_same(output: Path, reference: Path) -> None:
    """The same losses and gradients, of all roles, and the same weights and moments, bit for bit."""
    numbers = [
        [(line["loss"], line["grad_norm"], line.get("critic", {}).get("loss")) for line in metrics(one)]
        for one in (output, reference)
    ]
    assert numbers[0] == numbers[1]
    ours, theirs = learned(output), learned(reference)
    assert ours.keys() == theirs.keys()
    assert [name for name, t in theirs.items() if not torch.equal(ours[name], t)] == []


RUNS = [(o, p) for o in OBJECTIVES for p in PLACEMENTS]


@pytest.fixture(scope="module")
def copies(folder: Path, wan2: Path) -> dict[str, Path]:
    """Runs whose teacher, student and critic have weights of their own, by objective; filled as needed."""
    return {}


@pytest.mark.parametrize(("objective", "placement"), slow_but([], RUNS))
def test_adapters_on_one_base_learn_what_they_learn_on_copies_bitwise(
    folder: Path, wan2: Path, copies: dict[str, Path], objective: str, placement: str
) -> None:
    given = {"objective": OBJECTIVES[objective]}
    if objective not in copies:
        copies[objective] = trained(folder, wan2, f"{objective}_copies", COPIES, **given)
    teacher = PLACEMENTS[placement]
    assert_same(trained(folder, wan2, f"{objective}_{placement}", teacher, **given), copies[objective])


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["replicated", "streamed"])
def test_two_ranks_on_one_base_learn_what_they_learn_on_copies_bitwise(
    folder: Path, wan2: Path, placement: str
) -> None:
    given = {"ranks": 2, "objective": OBJECTIVES["dmd2"]}
    reference = trained(folder, wan2, f"two_copies_{placement}", COPIES, **given)
    assert_same(trained(folder, wan2, f"two_{placement}", PLACEMENTS[placement], **given), reference)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "nf4", "float8"])
def test_a_streamed_base_in_few_bits_learns_what_a_resident_one_does_bitwise(
    folder: Path, wan2: Path, weights: str
) -> None:
    given = {"objective": OBJECTIVES["dmd2"], "max_steps": 2}
    resident, streamed = (
        trained(folder, wan2, f"{weights}_{n}", {"wandistiller": {"weights": weights} | block}, **given)
        for n, block in (("resident", {}), ("streamed", {"placement": "streamed"}))
    )
    assert_same(streamed, resident)


@pytest.mark.parametrize(
    ("dmd2", "micro"), slow_but([(PLAIN[-1], 2)], [(dmd2, micro) for dmd2 in PLAIN for micro in (8, 2)])
)
def test_losses_and_adapters_after_two_steps_equal_those_of_plain_pytorch_and_peft(
    folder: Path, wan2: Path, one_rank: torch.device, dmd2: dict[str, Any], micro: int
) -> None:
    engine = student_engine(2, train_micro_batch_size_per_gpu=micro)
    more = {"guidance_scale": 4.0, "guidance_scale_2": 3.0, "deepspeed_config": engine}
    more |= {"teacher_deepspeed_config": PLACEMENTS["streamed"], "objective": dmd2}
    trainer = trainer_of(recipe(folder, wan2, output_dir=str(folder / "plain"), **LORA | more))
    plain = PlainDmd2(trainer.job)
    for step in range(2):
        result, (loss, critic) = trainer.train_step(step), plain.step(step)
        # of the square of a difference of velocities that are nearly equal
        assert result.loss == pytest.approx(loss, rel=5e-5)
        assert result.others[CRITIC]["loss"] == pytest.approx(critic, rel=1e-5)
    assert max(plain.differences(trainer).values()) < 2e-4


POLICIES = [{}, {"checkpoint_but_last": 3}, {"checkpoint": "attention"}, {"checkpoint_every": 2}]


@pytest.mark.parametrize("placement", slow_but(["streamed"], ["streamed", "files"]))
def test_no_bit_depends_on_which_blocks_of_weights_that_come_and_go_are_recomputed(
    folder: Path, wan2: Path, one_rank: torch.device, placement: str
) -> None:
    engine = student_engine(2, train_micro_batch_size_per_gpu=4)
    engines = [engine | {"wandistiller": block} for block in POLICIES]
    engines.append({key: value for key, value in engine.items() if key != "activation_checkpointing"})
    more = {"objective": OBJECTIVES["carried"], "teacher_deepspeed_config": PLACEMENTS[placement]}
    numbers = []
    for n, each in enumerate(engines):
        given = {"deepspeed_config": each, "output_dir": str(folder / f"recomputed_{placement}_{n}")}
        trainer = trainer_of(recipe(folder, wan2, **LORA | more | given))
        steps = [trainer.train_step(step) for step in range(2)]
        numbers.append([(step.loss, step.grad_norm, step.others[CRITIC]["loss"]) for step in steps])
    assert numbers == numbers[:1] * len(engines)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["velocity", "consistency", "dmd2", "carried", "sum"])
def test_the_base_comes_to_the_device_as_often_as_planned(
    folder: Path, wan1: Path, wan2: Path, one_rank: torch.device, objective: str
) -> None:
    """A block or two may be there still when a sweep turns or begins; roll-outs may end early."""
    engine, output = student_engine(2, train_micro_batch_size_per_gpu=8), str(folder / f"count_{objective}")
    more = {"objective": OBJECTIVES[objective], "teacher_deepspeed_config": PLACEMENTS["streamed"]}
    more |= {"deepspeed_config": engine, "output_dir": output}
    trainer = trainer_of(recipe(folder, wan1 if objective == "carried" else wan2, **LORA | more))
    networks = trainer.student.networks.values()
    (buffers,) = {network.module.block_source._buffers for network in networks}
    fetch, fetched = buffers.fetch, []
    buffers.fetch = lambda *args: (fetched.append(args), fetch(*args))
    trainer.train_step(0)
    planned, sweeps = (
        sum(base_sweeps(trainer.job).values()),
        len(fetched) / trainer.job.folder.config.num_layers,
    )
    assert 0.5 * planned <= sweeps <= planned


def test_in_an_update_of_two_networks_the_critic_learns_beside_the_teacher_and_both_go_back_together(
    folder: Path, wan2: Path, one_rank: torch.device
) -> None:
    engine = student_engine(2, train_micro_batch_size_per_gpu=4)
    more = {"objective": OBJECTIVES["carried"], "deepspeed_config": engine}
    more |= {"teacher_deepspeed_config": PLACEMENTS["streamed"], "output_dir": str(folder / "beside")}
    trainer, entered = trainer_of(recipe(folder, wan2, **LORA | more)), []
    networks = {role: [*learner.networks.values()] for role, learner in trainer.learners.items()}
    for role, of_role in (networks | {TEACHER: local_modules(trainer.teacher)}).items():
        for number, block in ((n, block) for network in of_role for n, block in enumerate(network.blocks)):
            block.register_forward_pre_hook(lambda *_, at=(number, role): entered.append(at))
    trainer.train_step(0)
    layers = range(trainer.job.folder.config.num_layers)
    forward = [(n, {STUDENT}) for n in layers] + [(n, {TEACHER, CRITIC}) for n in layers]
    micro_step = forward + [(n, {CRITIC, STUDENT}) for n in reversed(layers)]
    found = [(number, {role for _, role in of_one}) for number, of_one in groupby(entered, itemgetter(0))]
    assert found == merged(micro_step * 2)
    assert sum(base_sweeps(trainer.job).values()) == 2 * 3


def merged(sweeps: list[tuple[int, set[str]]]) -> list[tuple[int, set[str]]]:
    """The blocks of sweeps, of which the first may be the last one's last."""
    groups = groupby(sweeps, itemgetter(0))
    return [(number, set().union(*(roles for _, roles in of_one))) for number, of_one in groups]


@pytest.fixture(scope="module")
def adapters(folder: Path, wan2: Path) -> str:
    """A LoRA file that no run here has made, for both experts."""
    return f"both={style(wan2, folder / 'begun.safetensors', 'to_q', 'to_k', 'to_v', 'to_out')}"


def test_a_critic_from_the_teacher_begins_as_it_whatever_the_student_s_adapters_begin_with(
    folder: Path, wan2: Path, adapters: str, one_rank: torch.device
) -> None:
    more = {"lora": {"rank": 4, "start": adapters}, "output_dir": str(folder / "as_teacher")}
    more |= {"teacher_deepspeed_config": PLACEMENTS["streamed"]}
    teacher = WanTransformer3DModel.from_pretrained(wan2 / "transformer_2")
    text = keyed_normal((2, 512, 32), "text")
    given = state(keyed_normal((2, 16, 1, 4, 4), "x"), torch.tensor([0.9, 0.3]), text)
    given = replace(given, expert=Expert.LOW_NOISE)
    for start, equal in (("teacher", True), ("student", False)):
        objective = DMD2 | {"critic_start": start}
        trainer = trainer_of(recipe(folder, wan2, **LORA | more | {"objective": objective}))
        with torch.no_grad():
            student, critic = (learner.velocity(given) for learner in trainer.learners.values())
            assert torch.equal(critic, velocity(teacher, given)) is equal
        assert torch.equal(critic, student) is not equal


def changes(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What adapters add to the weights of each layer."""
    return {
        name: module.lora_B["default"].weight @ module.lora_A["default"].weight
        for name, module in network.named_modules()
        if hasattr(module, "lora_A")
    }


@pytest.mark.slow
def test_a_critic_from_the_teacher_that_follows_has_its_share_of_the_student_s_change_of_each_weight(
    folder: Path, wan2: Path, adapters: str, one_rank: torch.device
) -> None:
    more = {"lora": {"rank": 8, "start": adapters}, "output_dir": str(folder / "followed")}
    more |= {"objective": DMD2 | {"critic_start": "teacher", "critic_follows": 0.25}}
    more |= {"teacher_deepspeed_config": PLACEMENTS["streamed"]}
    student, critic = trainer_of(recipe(folder, wan2, **LORA | more)).learners.values()
    critic.follow(student, 0.25)
    for expert, network in student.networks.items():
        ours, theirs = changes(critic.networks[expert].module), changes(network.module)
        assert max(change.abs().max() for change in theirs.values()) > 0
        assert all(torch.equal(ours[layer], change / 4) for layer, change in theirs.items())


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_critic_from_the_teacher_learns_on_its_base_what_it_learns_on_a_copy_bitwise_and_goes_on(
    folder: Path, wan2: Path, adapters: str, placement: str
) -> None:
    given = {"lora": {"rank": 4, "start": adapters}, "max_steps": 2, "save_every": 1}
    given |= {"objective": DMD2 | {"critic_start": "teacher", "critic_follows": 0.03}}
    apart = trained(folder, wan2, f"from_copies_{placement}", COPIES, **given)
    one = trained(folder, wan2, f"from_{placement}", PLACEMENTS[placement], **given)
    assert_same(one, apart)
    middle = str(one / "checkpoints" / "step_00000001")
    resumed = trained(folder, wan2, f"from_{placement}_on", PLACEMENTS[placement], resume=middle, **given)
    assert losses(resumed) == losses(one)[1:]
    ours, theirs = learned(resumed), learned(one)
    assert [name for name, t in theirs.items() if not torch.equal(ours[name], t)] == []


@pytest.fixture(scope="module")
def streamed(folder: Path, wan2: Path) -> Path:
    return trained(folder, wan2, "whole", PLACEMENTS["streamed"], objective=DMD2)


def test_a_checkpoint_has_the_adapters_and_their_optimizer_alone(streamed: Path) -> None:
    last = max((streamed / "checkpoints").glob("step_*"))
    assert not (last / "frozen").exists()
    assert learned(streamed) and all(".lora_" in name for name in learned(streamed))


@pytest.mark.parametrize("name", slow_but(["copies"], ["copies", "streamed"]))
def test_a_run_goes_on_bit_for_bit_with_its_base_shared_or_not(
    folder: Path, wan2: Path, streamed: Path, name: str
) -> None:
    teacher = COPIES if name == "copies" else PLACEMENTS[name]
    middle = str(streamed / "checkpoints" / "step_00000001")
    resumed = trained(folder, wan2, f"resumed_{name}", teacher, objective=DMD2, resume=middle)
    assert losses(resumed) == losses(streamed)[1:]
    ours, theirs = learned(resumed), learned(streamed)
    assert [name for name, t in theirs.items() if not torch.equal(ours[name], t)] == []


def test_the_exported_student_is_the_teacher_with_the_adapters_added(streamed: Path, wan2: Path) -> None:
    student = exported(streamed)
    teacher = WanTransformer3DModel.from_pretrained(wan2 / "transformer_2")
    last = learned(streamed)
    adapters = {
        n.split("/")[-1].removesuffix(".default.weight"): t for n, t in last.items() if " weights/0/" in n
    }
    for name, p in teacher.named_parameters():
        layer, value = name.removesuffix(".weight"), p.detach()
        if f"{layer}.lora_A" in adapters:
            a, b = adapters[f"{layer}.lora_A"].view(4, -1), adapters[f"{layer}.lora_B"].view(-1, 4)
            value = value + b @ a
        assert torch.equal(student[name], value.to(student[name].dtype)), name


def test_adapters_are_not_added_to_a_teacher_that_has_changed(streamed: Path) -> None:
    source = read_source(streamed)._replace(teacher_identity="another")
    with pytest.raises(ConfigError, match="not as they were when they were trained"):
        next(source.finished("transformer", torch.float32))
