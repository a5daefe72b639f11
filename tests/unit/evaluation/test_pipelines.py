"""Samples are diffusers' own, wherever the networks are; those of few steps have their noise levels."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drawing import of_stock, pixels, stock
from ranks import TEACHERS, has_async_io, write_json
from shipped import placement
from slow_cases import slow_but
from styles import style
from torch import Tensor

from wandistiller.checkpoint.facts import Facts
from wandistiller.evaluation.candidates import Candidate, read_candidate
from wandistiller.evaluation.sampling import Sampling, sampler
from wandistiller.network.sampling import few_step_scheduler, few_steps
from wandistiller.utils.files import TINY
from wandistiller.utils.keyed_random import keyed_generator, keyed_normal
from wandistiller.wan.pipeline import open_wan

PROMPTS = ["a red circle on a blue background, left", "a green square on a black background, top"]
OWN = few_steps(3.0, 4, 0.875)
FACTS: dict[str, Any] = {
    "shift": 3.0,
    "steps": 4,
    "few_steps": list(OWN.sigmas),
    "sampler": "renoise",
    "experts": ["transformer", "transformer_2"],
    "boundary": OWN.boundary,
}
FEW = ["replicated", "streamed", "files"]
GUIDED = Sampling(
    height=32, width=32, steps=2, guidance_scale=2.0, guidance_scale_2=1.5, negative_prompt="a square"
)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("names", slow_but([FEW], [FEW, TEACHERS]))
def test_each_placement_draws_the_same_bits_which_are_diffusers_own_to_1e_5(
    names: list[str], tmp_path: Path
) -> None:
    theirs = of_stock(stock(TINY["tiny"]), PROMPTS, [7, 8], GUIDED)
    names = [name for name in names if name != "zero_inference_nvme" or has_async_io()]
    drawn = {}
    for name in names:
        placed = placement(name, "float32", swap=tmp_path / "swap")
        drawn[name] = pixels(open_wan("tiny"), tmp_path, PROMPTS, [7, 8], GUIDED, placed=placed)
    first = drawn["replicated"]
    torch.testing.assert_close(first, theirs, rtol=0, atol=1e-5)
    assert [name for name in names if not torch.equal(drawn[name], first)] == []


@pytest.mark.usefixtures("one_rank")
def test_a_student_of_few_steps_takes_the_noise_of_its_seed_between_them_as_diffusers_would(
    wan1: Path, tmp_path: Path
) -> None:
    pipe = stock(wan1)
    pipe.scheduler = few_step_scheduler(3.0, 2, "renoise")
    generators = [keyed_generator(seed, "fresh") for seed in (7, 8)]
    pipe.scheduler.step = partial(pipe.scheduler.step, generator=generators)
    how, facts = Sampling(height=32, width=32, steps=2), Facts.of(FACTS | {"experts": [], "boundary": None})
    theirs = of_stock(pipe, PROMPTS, [7, 8], how)
    ours = partial(pixels, open_wan(str(wan1)), tmp_path, sampling=how, facts=facts)
    both = ours(PROMPTS, [7, 8])
    torch.testing.assert_close(both, theirs, rtol=0, atol=1e-5)
    torch.rand(3)  # neither torch's own stream nor the batch counts
    alone = [ours([prompt], [seed]) for prompt, seed in zip(PROMPTS, (7, 8), strict=True)]
    torch.testing.assert_close(both, torch.cat(alone), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_lora_files_are_beside_the_weights_or_in_them_as_diffusers_has_them(
    wan1: Path, tmp_path: Path
) -> None:
    file = style(wan1, tmp_path / "lora.safetensors", "to_q", "ffn")
    how = Sampling(height=32, width=32, steps=2)
    pipe = stock(wan1)
    before = of_stock(pipe, PROMPTS, [7, 8], how)
    pipe.load_lora_weights(str(file))
    theirs = of_stock(pipe, PROMPTS, [7, 8], how)
    assert (theirs - before).abs().max() > 0.01
    folder = read_candidate(str(wan1), [str(file)]).folder
    for name in ("replicated", "streamed", "files", "host_cpu"):  # the last merges them
        drawn = pixels(folder, tmp_path, PROMPTS, [7, 8], how, placed=placement(name, "float32"))
        torch.testing.assert_close(drawn, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", [7, 8])
def test_the_noise_between_steps_is_not_the_first_again(seed: int) -> None:
    first: Tensor = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    between = keyed_normal((16, 1, 8, 8), seed, "fresh")
    assert torch.corrcoef(torch.stack([first.flatten(), between.flatten()]))[0, 1].abs() < 0.1


@pytest.fixture(scope="module", params=["pipeline", "LoRA"])
def student(
    request: pytest.FixtureRequest, wan2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Candidate:
    """The teacher's networks, or the teacher with a LoRA on both, as a student of 4 steps."""
    folder = tmp_path_factory.mktemp("student")
    if request.param == "LoRA":
        for name in ("pytorch_lora_weights", "pytorch_lora_weights_2"):
            style(wan2, folder / f"{name}.safetensors", "to_q")
        write_json(folder / "wandistiller.json", FACTS)
        return read_candidate(str(wan2), [str(folder)])
    for part in wan2.iterdir():
        (folder / part.name).symlink_to(part)
    write_json(folder / "wandistiller.json", FACTS)
    return read_candidate(str(folder))


def test_the_experts_change_between_the_same_levels_in_any_number_of_steps(student: Candidate) -> None:
    assert OWN.boundary == pytest.approx((0.9 + 0.75) / 2, abs=0.002)  # the teacher's 0.875 lies there too
    of_three = sampler(student.folder, student.facts, 3)
    assert of_three.boundary == pytest.approx((0.857 + 0.6) / 2, abs=0.002)  # of levels 1, 6/7 and 3/5
    assert sampler(student.folder, student.facts, 4) == few_steps(3.0, 4, OWN.boundary, "renoise")
