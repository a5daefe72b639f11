"""`wandistiller evaluate` on small random pipelines whose comparison is known beforehand."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from drawing import GPU
from PIL import Image
from ranks import wandistiller, write_json
from transformers import (
    BitImageProcessorPil,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    Dinov2Config,
    Dinov2Model,
)

from wandistiller.cli.evaluate import evaluate, read_evaluation
from wandistiller.cli.parser import read as flags_of
from wandistiller.data.dataset import PromptItem
from wandistiller.evaluation.candidates import read_candidate
from wandistiller.evaluation.clip import Clip, Dino
from wandistiller.evaluation.draw_samples import sample
from wandistiller.evaluation.evaluator import Evaluation, bands
from wandistiller.evaluation.metrics import METRICS, DrawnBatch
from wandistiller.evaluation.pipelines import PeakMemory
from wandistiller.evaluation.sampling import Sampling
from wandistiller.experts import Expert
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json
from wandistiller.utils.images import to_pil

HIGH, LOW = Expert
PROMPTS = "a red circle|a blue square|a green circle on red|red , blue|a top left square|a square".split("|")
SMALL = ["--height", "32", "--width", "32", "--steps", "2", "--batch", "4"]
Copy = Callable[..., Path]


def read(*words: str | Path) -> Evaluation:
    """A command line, read as the command reads it."""
    return read_evaluation(flags_of(["evaluate", *map(str, words)])[1], 1)


def comparison(student: Path, output: Path, *flags: str | Path, prompts: list[str] = PROMPTS) -> Evaluation:
    return read("--student", student, "--output", output, *SMALL, "--prompts", *prompts, *flags)


@pytest.fixture(scope="module")
def twin(
    wan2: Path, one_rank: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """A student that is its teacher, and a teacher without guidance: (figures, folder)."""
    output = tmp_path_factory.mktemp("twin")
    return evaluate(comparison(wan2, output, "--teacher_path", wan2, "--guidance_scale", "1")), output


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random CLIP as transformers stores it."""
    folder, letters = tmp_path_factory.mktemp("clip"), "abcdefghijklmnopqrstuvwxyz"
    ends = [",</w>", "<|startoftext|>", "<|endoftext|>"]
    vocab = {t: i for i, t in enumerate([*letters, *(c + "</w>" for c in letters), *ends])}
    tiny = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    text = tiny | dict(vocab_size=len(vocab), max_position_embeddings=24, eos_token_id=len(vocab) - 1)
    torch.manual_seed(0)
    vision = tiny | dict(image_size=16, patch_size=8)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(folder)
    pixels = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(pixels, CLIPTokenizer(vocab=vocab, merges=[])).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random DINOv2 as transformers stores it."""
    folder, tiny = tmp_path_factory.mktemp("dino"), dict(hidden_size=16, num_hidden_layers=2)
    torch.manual_seed(0)
    config = Dinov2Config(**tiny, num_attention_heads=2, image_size=16, patch_size=8, layerscale_value=1.0)
    Dinov2Model(config).save_pretrained(folder)
    crop = {"height": 16, "width": 16}
    BitImageProcessorPil(size={"shortest_edge": 16}, crop_size=crop).save_pretrained(folder)
    return folder


def changed(folder: Path, change: Callable[[WanTransformer3DModel], None]) -> Path:
    """`folder` with its transformers changed in place."""
    for expert in folder.glob("transformer*"):
        model = WanTransformer3DModel.from_pretrained(expert)
        with torch.no_grad():
            change(model)
        model.save_pretrained(expert)
    return folder


def errors_of(result: dict[str, Any]) -> list[float]:
    return [band["value"] for band in result["relative_velocity_error"]["bands"].values()]


def test_a_student_that_is_the_teacher_has_velocity_error_0_and_frechet_distance_0_or_exactly_the_floor(
    twin: tuple[dict[str, Any], Path],
) -> None:
    assert errors_of(twin[0]) == [0.0] * 5
    found = twin[0]["frechet"]["latent"]
    assert found["same_seeds"]["value"] < 1e-10 and found["student"] == found["floor"]
    assert found["floor"]["value"] > 1e-6


@pytest.mark.usefixtures("one_rank")
def test_a_student_whose_output_is_0_has_relative_error_1_in_every_band(
    wan2: Path, copy_of: Copy, tmp_path: Path
) -> None:
    def silenced(model: WanTransformer3DModel) -> None:
        model.proj_out.bias.zero_()
        model.proj_out.weight.fill_(1e-30)  # matrices of zeros are taken for holes in a file

    student = changed(copy_of(wan2, weights=True), silenced)
    quick = ["--teacher_path", wan2, "--quick"]
    found = evaluate(comparison(student, tmp_path, *quick, prompts=PROMPTS[:2]))["relative_velocity_error"]
    figures = [*found["bands"].values(), *found["experts"].values(), found["all"]]
    assert [(e["value"], e["low"], e["high"]) for e in figures] == [(1.0, 1.0, 1.0)] * 8


@pytest.mark.usefixtures("one_rank")
def test_a_student_whose_samples_are_not_finite_is_named_and_draws_no_picture(
    wan1: Path, copy_of: Copy, tmp_path: Path
) -> None:
    student = changed(copy_of(wan1, weights=True), lambda model: model.proj_out.bias.fill_(3e38))
    message = re.escape(f"{student}: its samples in 2 step(s) are not finite")
    sampling = Sampling(height=32, width=32, steps=2)
    output = tmp_path / "pictures"
    with pytest.raises(ConfigError, match=message):
        sample(read_candidate(str(student)), [PromptItem("a")], output, sampling, 0, GPU)
    assert not list(output.glob("*.png"))
    with pytest.raises(ConfigError, match=message):
        evaluate(comparison(student, tmp_path, "--teacher_path", wan1, "--quick", prompts=PROMPTS[:1]))


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_figures_are_the_same_wherever_the_networks_are_and_all_calls_are_counted(
    wan2: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    flags = ["--teacher_path", wan2, "--guidance_scale", "3", "--guidance_scale_2", "2", "--quick"]
    flags += ["--dtype", "float32", "--teacher_deepspeed_config"]
    found = [evaluate(comparison(wan2, tmp_path, *flags, name)) for name in ("files", "stream")]
    assert untimed(found[0]) == untimed(found[1]) and min(errors_of(found[0])) > 1e-3
    bars = [line.partition(",")[0] for line in caplog.messages if re.match(r"\w+: .*: (\d+)/\1, ", line)]
    assert len(bars) == 8 and bars[:4] == bars[4:]  # samples and velocities of each
    drawn, calls = 2 * 2, 2 * 5  # of two batches: steps, bands of the velocities
    assert {bar.rpartition("/")[2] for bar in bars} == {str(drawn), str(calls)}


def untimed(result: dict[str, Any]) -> dict[str, Any]:
    """The figures, without those of time and memory."""
    timed, sides = (
        ("seconds_per_sample", "denoising_seconds", "peak_memory_gib"),
        ("teacher", "student", "ratio"),
    )
    return result | {side: {k: v for k, v in result[side].items() if k not in timed} for side in sides}


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_one_and_two_ranks_find_the_same(wan1: Path, wan2: Path, clip: Path, tmp_path: Path) -> None:
    flags = ["--teacher_path", wan2, "--batch", "2", "--clip_path", clip]
    one = evaluate(comparison(wan1, tmp_path / "1", *flags, prompts=PROMPTS[:5]))
    output = tmp_path / "2"
    words = ["--student", wan1, "--output", output, *SMALL, "--prompts", *PROMPTS[:5], *flags]
    wandistiller("evaluate", *words, ranks=2)
    assert untimed(one) == untimed(json.loads((output / "evaluation.json").read_text()))
    assert one["prompts"] == 5 and set(one["frechet"]) == {"latent", "clip"}


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_nothing_of_an_earlier_evaluation_lies_beside_a_later_one(wan1: Path, tmp_path: Path) -> None:
    """Figures and tables are of one, even if the later one's picture cannot be written."""

    def files(*flags: str) -> set[str]:
        given = ["--teacher_path", wan1, "--quick", "--steps", "1", *flags]
        evaluate(comparison(wan1, tmp_path, *given, prompts=PROMPTS[:2]))
        return {file.name.removeprefix("evaluation") for file in tmp_path.glob("evaluation*")}

    always = {".json", ".md", ".png"}
    assert files("--num_frames", "5") == always | {"_frames.png", ".mp4"}
    assert files() == always
    (tmp_path / "evaluation.png").unlink()
    (tmp_path / "evaluation.png" / "mine").mkdir(parents=True)
    with pytest.raises(OSError, match="evaluation.png"):
        files("--num_frames", "5")
    figures, page = read_json(tmp_path / "evaluation.json"), (tmp_path / "evaluation.md").read_text()
    assert "motion" in figures["student"] and "motion: change" in page


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_several_numbers_of_steps_make_a_table_and_a_picture(tmp_path: Path) -> None:
    words = ["--student", "tiny", "--teacher_path", "tiny", "--guidance_scale", "1", "--num_prompts", "4"]
    result = evaluate(read(*words, "--steps", "1", "2", "--output", tmp_path))
    assert result["steps"] == result["teacher_steps"] == 40  # each in its own, and in the given ones
    for side in ("teacher", "student"):
        assert list(result["by_steps"][side]) == ["1", "2", "40"]
        assert result["by_steps"][side]["40"]["fully_right"] == result[side]["fully_right"]
    same = [[of[n]["picture_error"] for n in ("1", "2", "40")] for of in result["by_steps"].values()]
    assert same[0] == same[1] and len({error["value"] for error in same[0]}) == 3
    table = (tmp_path / "evaluation.md").read_text()
    rows = re.findall(r"^\| (teacher, \d+|student, \d+) ", table, re.MULTILINE)
    assert rows == [f"{side}, {n}" for side in ("teacher", "student") for n in (1, 2, 40)]
    tiles = Image.open(tmp_path / "evaluation.png").height
    assert tiles > 4 * 128  # the teacher, and the student in 40, 2 and 1 steps


@pytest.mark.usefixtures("one_rank")
def test_denoising_is_part_of_the_seconds_and_variety_is_0_only_of_a_student_that_ignores_the_noise(
    twin: tuple[dict[str, Any], Path],
) -> None:
    for side in ("teacher", "student"):
        figures = twin[0][side]
        assert 0 < figures["denoising_seconds"]["value"] < figures["seconds_per_sample"]["value"]
        assert figures["variety"]["value"] > 0


CPU = torch.device("cpu")


def pictures(seed: int = 0) -> torch.Tensor:
    return torch.rand(6, 3, 32, 40, generator=torch.Generator().manual_seed(seed))


def test_clip_s_cosine_and_pickscore_are_transformers_own_and_a_long_prompt_is_cut(clip: Path) -> None:
    image_BCHW, scorer = pictures(), Clip(clip, CPU)
    image_BD, cosine_B = scorer.score(image_BCHW, PROMPTS)
    model, processor = CLIPModel.from_pretrained(clip), CLIPProcessor.from_pretrained(clip)
    images = [to_pil(image) for image in image_BCHW]
    with torch.no_grad():
        seen = model(**processor(text=PROMPTS, images=images, return_tensors="pt", padding=True))
    logit_B = seen.logits_per_image.diag()
    torch.testing.assert_close(scorer.preference(image_BCHW, PROMPTS), logit_B.detach())
    torch.testing.assert_close(cosine_B, logit_B / model.logit_scale.exp().detach())
    torch.testing.assert_close(image_BD, seen.image_embeds)
    assert cosine_B.max() > 0.01
    long = ["red circle " * 9, "red circle " * 10]  # longer than CLIP reads
    _, cosine_B = scorer.score(image_BCHW[:1].expand(2, -1, -1, -1), long)
    torch.testing.assert_close(cosine_B[0], cosine_B[1])  # rows may be added up in other orders


def test_two_seeds_differ_by_one_less_the_cosine_of_transformers_own_class_tokens(dino: Path) -> None:
    model, pixels = Dinov2Model.from_pretrained(dino), BitImageProcessorPil.from_pretrained(dino)
    x_SBCHW = torch.stack([pictures(0), pictures(1)])
    with torch.no_grad():
        seen = [model(**pixels(images=[*map(to_pil, x)], return_tensors="pt")) for x in x_SBCHW]
    cosine_B = torch.cosine_similarity(*(output.last_hidden_state[:, 0] for output in seen))
    other = None
    for x_BCHW in x_SBCHW.flip(0):
        x_BCFHW = x_BCHW.unsqueeze(2)
        other = DrawnBatch(PROMPTS, x_BCFHW, x_BCFHW, {"dino": Dino(dino, CPU)}, other=other)
    (variety,) = (m for m in METRICS if m.name == "dino_variety")
    torch.testing.assert_close(variety.compute(other), 1 - cosine_B)
    assert variety.compute(other).min() > 1e-3


@pytest.mark.usefixtures("one_rank")
def test_folders_of_clip_pickscore_and_dino_give_scores_distances_and_the_variety_of_a_student(
    wan1: Path, clip: Path, dino: Path, tmp_path: Path
) -> None:
    flags = ["--teacher_path", wan1, "--clip_path", clip, "--pickscore_path", clip, "--dino_path", dino]
    flags += ["--steps", "1", "--guidance_scale", "1"]
    result = evaluate(comparison(wan1, tmp_path, *flags, prompts=PROMPTS[:2]))
    names = ("clip_score", "pickscore", "clip_variety", "dino_variety")
    assert all(result["teacher"][name]["value"] == result["student"][name]["value"] for name in names)
    assert result["student"]["dino_variety"]["value"] > 0
    assert set(result["frechet"]) == {"latent", "clip", "dino"}


@pytest.mark.parametrize(
    ("teacher", "student", "edges"),
    [
        (None, None, [0, 0.25, 0.5, 0.75, 0.875, 1]),
        (0.9, None, [0, 0.25, 0.5, 0.75, 0.875, 0.9, 1]),
        (0.875, 0.6, [0, 0.25, 0.5, 0.6, 0.75, 0.875, 1]),
    ],
)
def test_bands_are_cut_where_an_expert_takes_over(
    teacher: float | None, student: float | None, edges: list[float]
) -> None:
    cut = bands(teacher, student)
    assert [b.start for b in cut] == edges[:-1] and [b.end for b in cut] == edges[1:]
    assert [b.expert for b in cut] == [LOW if teacher and b.end <= teacher else HIGH for b in cut]
    assert [b.student_expert for b in cut] == [LOW if student and b.end <= student else HIGH for b in cut]


def test_peak_memory_counts_what_is_held_inside_and_not_what_was_held_before() -> None:
    before = torch.ones(2**25)  # 128 MiB
    memory = PeakMemory()
    with memory.running():
        inside = torch.ones(2**26)  # 256 MiB
    assert before[0] == 1 and inside[0] == inside[-1] and 0.24 < memory.peak_gib()["host"] < 0.3


@pytest.mark.usefixtures("one_rank")
def test_all_that_is_wrong_with_the_parts_comes_at_once_and_then_what_does_not_go_together(
    wan1: Path, tmp_path: Path
) -> None:
    def assert_wrong(output: Path, words: str, messages: list[str]) -> None:
        together = ["--teacher_path", wan1, "--height", "30"]
        with pytest.raises(ConfigError) as caught:
            comparison(wan1, output, *together, *words.split())
        assert [next((m for m in messages if m in p), p) for p in caught.value.problems] == messages

    placed = write_json(tmp_path / "placed.json", {"wandistiller": {"placement": "near"}})
    words = f"--batch 0 --clip_path {tmp_path} --teacher_deepspeed_config {placed}"
    messages = ["`batch` is 0", '`wandistiller.placement` is "near"', "none.txt: no such file"]
    messages += ["`output` is", "`clip_path` is"]
    assert_wrong(write_json(tmp_path / "file", 0), f"{words} --prompts none.txt", messages)
    assert_wrong(tmp_path / "out", "", ["`height` is 30"])


@pytest.mark.usefixtures("one_rank")
def test_a_student_in_the_folder_of_its_run_is_compared_with_the_teacher_of_that_run(finished: Path) -> None:
    teacher = Path(read_json(finished / "resolved" / "run.json")["teacher_path"])
    assert read_json(finished / "student" / "wandistiller.json")["teacher_path"] == teacher.name
    found = read("--student_path", finished / "student", "--prompts", "a red circle")
    assert found.teacher.path == teacher


@pytest.mark.usefixtures("one_rank")
def test_settings_that_a_student_was_made_with_are_used_where_no_flag_is_given(
    wan2: Path, copy_of: Copy, tmp_path: Path
) -> None:
    student = copy_of(wan2, weights=True)
    facts = {"teacher_path": str(wan2), "teacher_revision": None, "negative_prompt": "blue", "steps": 7}
    facts |= {"height": 48, "width": 16, "num_frames": 5, "guidance_scale": 2.5, "guidance_scale_2": 1.5}
    write_json(student / "wandistiller.json", facts)
    found = read("--student_path", student, "--steps", "9", "--prompts", "a red circle")
    guided, plain = found.teacher_sampling, found.student_sampling
    assert (guided.height, guided.width, guided.num_frames, guided.steps) == (48, 16, 5, 9)
    assert (guided.guidance_scale, guided.guidance_scale_2, guided.negative_prompt) == (2.5, 1.5, "blue")
    assert (plain.guidance_scale, plain.guidance_scale_2, plain.steps) == (1.0, None, 9)
    assert found.output == student.parent
