"""Adapters that begin as a full model: the teacher plus changes of known rank, in every form of file."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from recipes import recipe
from safetensors.torch import load_file, save_file
from small_wan import small_transformer
from states import state
from torch import Tensor, nn
from trainers import job_of

from wandistiller.config.identity import adapters
from wandistiller.config.job import Job
from wandistiller.experts import Expert
from wandistiller.export.formats.original import original_state
from wandistiller.planner.disk import written
from wandistiller.student.full_start import FullStart, full_starts, prepare_full_starts
from wandistiller.student.lora import is_adapter
from wandistiller.training.network_builder import NetworkBuilder
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.pipeline import TINY
from wandistiller.wan.transformer import velocity

RANK = 3
COPIES = {"wandistiller": {"placement": "owner"}}
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
FORMS = ["pipeline", "shards", "original", "ComfyUI's"]


def full_model(wan: Path, expert: str = "transformer", seed: object = 0) -> WanTransformer3DModel:
    """The teacher plus b a of rank 3 in the maps of all attentions."""
    model = WanTransformer3DModel.from_pretrained(wan, subfolder=expert)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.endswith(TARGETS):
                a = keyed_normal((RANK, module.in_features), seed, name, "a")
                module.weight += 0.01 * keyed_normal((module.out_features, RANK), seed, name, "b") @ a
    return model


def stored(model: WanTransformer3DModel, folder: Path, form: str) -> Path:
    """Write it; return what a user writes as `lora.start`."""
    if form == "pipeline":
        model.save_pretrained(folder / "transformer")
        return folder
    if form == "shards":
        model.save_pretrained(folder, max_shard_size="100KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        return folder
    prefix = "model.diffusion_model." if form == "ComfyUI's" else ""
    weights = original_state(model.state_dict(), False)
    folder.mkdir()
    save_file({prefix + name: t for name, t in weights.items()}, folder / "few_steps.safetensors")
    return folder / "few_steps.safetensors"


def job_with(folder: Path, wan: Path, start: Any, rank: int = 4, **more: Any) -> Job:
    given = recipe(folder, wan, output_dir=str(folder / "run"), teacher_deepspeed_config=COPIES, max_steps=1)
    student = {"student_config": {"experts": "all"}, "lora": {"rank": rank, "start": start}}
    return job_of(given | student | more)


def output_of(model: nn.Module) -> Tensor:
    x, text = keyed_normal((2, 16, 1, 4, 4), "x"), keyed_normal((2, 9, 32), "text")
    with torch.no_grad():
        return velocity(model, state(x, torch.tensor([0.9, 0.3]), text))


@pytest.mark.parametrize("form", FORMS)
def test_adapters_of_enough_rank_make_the_teacher_that_model(
    form: str, wan1: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    full = full_model(wan1)
    start = stored(full, tmp_path / "full", form)
    model = NetworkBuilder(job_with(tmp_path, wan1, str(start))).trainable(Expert.HIGH_NOISE)
    wanted, teacher = output_of(full), output_of(WanTransformer3DModel.from_pretrained(wan1 / "transformer"))
    torch.testing.assert_close(output_of(model), wanted, rtol=1e-5, atol=1e-5)
    assert (wanted - teacher).abs().max() > 1e-2


def test_adapters_of_less_rank_have_the_largest_directions_and_their_share_is_logged(
    wan1: Path, tmp_path: Path, one_rank: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Of diag(4, 3, 0, ...) rank 1 keeps 16 / 25; a bias and a layer without an adapter differ by 5 each."""
    full = WanTransformer3DModel.from_pretrained(wan1 / "transformer")
    with torch.no_grad():
        full.blocks[1].attn1.to_q.weight[0, 0] += 4
        full.blocks[1].attn1.to_q.weight[1, 1] += 3
        full.blocks[0].ffn.net[2].weight[2, 1] += 5
        full.blocks[0].attn1.to_q.bias[7] += 5
    job = job_with(tmp_path, wan1, str(stored(full, tmp_path / "full", "pipeline")), rank=1)
    model = NetworkBuilder(job).trainable(Expert.HIGH_NOISE)
    wanted = torch.zeros(64, 64)
    wanted[0, 0] = 4
    change = model.blocks[1].attn1.to_q.get_delta_weight("default")
    torch.testing.assert_close(change.detach(), wanted, rtol=1e-5, atol=1e-4)
    ((expert, place),) = full_starts(job).items()
    start = FullStart(job, expert, place)
    start.fill()
    with caplog.at_level("INFO", "wandistiller"):
        start.log_share()
    assert "begin with 64.0 % of the squared difference of their layers" in caplog.text
    assert "33.3 % is in other linear layers, and 33.3 % in biases, norms and tables" in caplog.text


def test_each_expert_begins_as_its_own_network_of_a_pipeline(
    wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    full = {e: full_model(wan2, e.value, e.value) for e in Expert}
    for expert, model in full.items():
        model.save_pretrained(tmp_path / "full" / expert.value)
    builder = NetworkBuilder(job_with(tmp_path, wan2, str(tmp_path / "full")))
    for expert, model in full.items():
        torch.testing.assert_close(
            output_of(builder.trainable(expert)), output_of(model), rtol=1e-5, atol=1e-5
        )


def test_a_full_model_for_one_expert_goes_with_no_start_for_the_other(
    wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    low = full_model(wan2, "transformer_2")
    start = {"low_noise": str(stored(low, tmp_path / "low", "original"))}
    builder = NetworkBuilder(job_with(tmp_path, wan2, start))
    torch.testing.assert_close(output_of(builder.trainable(Expert.LOW_NOISE)), output_of(low))
    teacher = WanTransformer3DModel.from_pretrained(wan2 / "transformer")
    assert torch.equal(output_of(builder.trainable(Expert.HIGH_NOISE)), output_of(teacher))


def test_what_is_computed_once_is_read_by_every_later_network_and_run_of_the_cache(
    wan1: Path, tmp_path: Path, one_rank: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_with(tmp_path, wan1, str(stored(full_model(wan1), tmp_path / "full", "pipeline")))
    found = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level("INFO", "wandistiller"):
            model = NetworkBuilder(job).trainable(Expert.HIGH_NOISE)
        changes = {name: p.detach() for name, p in model.named_parameters() if is_adapter(name)}
        found.append((changes, "weights/s" in caplog.text))
    (first, is_computed), (second, is_computed_again) = found
    assert is_computed and not is_computed_again
    assert [name for name, p in first.items() if not torch.equal(second[name], p)] == []


def test_a_run_s_identity_has_the_full_model_by_its_content_wherever_it_lies(
    wan1: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    here = stored(full_model(wan1), tmp_path / "here", "pipeline")
    there = Path(shutil.copytree(here, tmp_path / "there"))
    other = stored(full_model(wan1, seed=1), tmp_path / "other", "pipeline")
    found = [adapters(job_with(tmp_path, wan1, str(place)))["start"] for place in (here, there, other)]
    assert found[0] == found[1] != found[2]


def test_the_cache_of_the_embedded_teacher_s_start_has_the_planned_bytes(
    tmp_path: Path, one_rank: torch.device
) -> None:
    """Beside the factors each weight's squares, of 8 bytes, with the names and places of all."""
    for expert in Expert:
        full_model(TINY["tiny"], expert.value).save_pretrained(tmp_path / "full" / expert.value)
    with_start, without = (job_with(tmp_path, Path("tiny"), s) for s in (str(tmp_path / "full"), None))
    planned = [written(job, accelerator=False).cache for job in (with_start, without)]
    prepare_full_starts(with_start)
    tensors = [t for file in (tmp_path / "cache").rglob("*.safetensors") for t in load_file(file).values()]
    assert sum(t.nbytes for t in tensors if t.dtype == torch.float32) == planned[0] - planned[1] > 0
    assert all(t.nbytes == 8 for t in tensors if t.dtype != torch.float32)


def refusal(folder: Path, wan: Path, start: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as error:
        job_with(folder, wan, start, **more)
    (problem,) = error.value.problems
    return problem


def test_a_model_of_other_sizes_or_blocks_is_refused_with_the_first_weight_that_differs(
    wan1: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    def file(name: str, **sizes: int) -> str:
        return str(stored(small_transformer(0, **sizes), tmp_path / name, "original"))

    wide = refusal(tmp_path, wan1, file("wide", ffn_dim=64))
    assert "`lora.start` is" in wide and "`blocks.0.ffn.0.weight` is [64, 64]" in wide
    assert "the teacher's is [96, 64]. Give one of the teacher's architecture." in wide
    assert "which has no `blocks.3." in refusal(tmp_path, wan1, file("fewer", layers=3))
    assert "which has `blocks.4." in refusal(tmp_path, wan1, file("more", layers=5))


def test_a_folder_with_another_setting_is_refused(wan1: Path, tmp_path: Path, one_rank: torch.device) -> None:
    heads = {"num_attention_heads": 4, "attention_head_dim": 16}
    start = stored(small_transformer(0, **heads), tmp_path / "heads", "pipeline")
    text = refusal(tmp_path, wan1, str(start))
    assert "whose config.json has `attention_head_dim` 16, and the teacher's 32" in text


def test_weights_in_8_bits_are_refused(wan1: Path, tmp_path: Path, one_rank: torch.device) -> None:
    state_dict = original_state(full_model(wan1).state_dict(), True)
    save_file(state_dict, tmp_path / "small.safetensors")
    assert "which has weights in 8 bits" in refusal(tmp_path, wan1, str(tmp_path / "small.safetensors"))


def test_one_network_for_two_experts_is_refused(wan2: Path, tmp_path: Path, one_rank: torch.device) -> None:
    start = stored(full_model(wan2), tmp_path / "full", "pipeline")
    assert "one network, and the student has two" in refusal(tmp_path, wan2, str(start))


def test_a_student_that_is_not_the_teacher_is_refused(
    wan1: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    start = str(stored(full_model(wan1), tmp_path / "full", "pipeline"))
    text = refusal(tmp_path, wan1, start, student_config={"num_layers": 2})
    assert "the student is another network than the teacher" in text


def test_a_damaged_full_model_is_an_error_that_names_its_weight(
    wan1: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    full = full_model(wan1)
    with torch.no_grad():
        full.blocks[0].attn1.to_q.weight[0, 0] = torch.nan
    job = job_with(tmp_path, wan1, str(stored(full, tmp_path / "full", "pipeline")))
    with pytest.raises(ConfigError, match=r"blocks\.0\.attn1\.to_q\.weight.* not finite"):
        NetworkBuilder(job).trainable(Expert.HIGH_NOISE)


def test_a_file_with_another_ending_is_refused_whatever_lies_beside(
    wan1: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    file = stored(full_model(wan1), tmp_path / "full", "original")
    start = Path(shutil.copy(file, file.with_suffix(".sft")))
    assert refusal(tmp_path, wan1, str(start)) == (
        f"{start}: is read by its ending. Rename it to few_steps.safetensors."
    )


def test_a_folder_without_weights_is_refused(wan1: Path, tmp_path: Path, one_rank: torch.device) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty" in refusal(tmp_path, wan1, str(tmp_path / "empty"))
