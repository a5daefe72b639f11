"""Image-to-video Wans from data with first frames to students that stock diffusers opens."""

import json
import re
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import pytest
import torch
from diffusers import WanImageToVideoPipeline
from image_data import PROMPTS, image_data, noise, with_last_images
from image_wans import A14B, BOTH_ENDS, ENGINE, SIZE, TI2V, WAN21, Wans
from networks import network_of
from on_ranks.placements import differences
from PIL import Image
from ranks import TEACHERS, call, has_async_io, losses, wandistiller
from recipes import recipe, recipe_file
from safetensors import safe_open
from safetensors.torch import load_file
from slow_cases import slow_but
from small_wan import IMAGE_FORMS, make_wan
from torch import Tensor

from wandistiller.batch import Conditioning
from wandistiller.checkpoint.facts import Facts
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.data.media import MediaReader, Size
from wandistiller.evaluation.candidates import image_problems, read_items
from wandistiller.experts import Expert
from wandistiller.network.sampling import denoise, few_steps
from wandistiller.teacher.base import LocalTeacher
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json
from wandistiller.utils.images import to_pil
from wandistiller.wan.loaded_components import Encoder
from wandistiller.wan.pipeline import open_wan

CPU = torch.device("cpu")

DMD2 = {"name": "dmd2", "steps": 2, "critic_updates": 1}
OBJECTIVES = {
    "velocity": "velocity",
    "consistency": {"name": "consistency", "intervals": 8, "steps": 2},
    "dmd2 with heads": DMD2 | {"gan": 0.03, "projected": True, "compare": "mixed"},
}


@pytest.fixture(scope="module")
def wans(tmp_path_factory: pytest.TempPathFactory) -> Wans:
    return Wans(tmp_path_factory.mktemp("image_to_video"))


@pytest.fixture(scope="module", params=slow_but([A14B], IMAGE_FORMS))
def run(request: pytest.FixtureRequest, wans: Wans) -> tuple[str, Path]:
    """A run of each form on one rank: of two steps of dmd2, on images between black bars."""
    more = {"fit": "letterbox", "background": "black"}
    more |= {"deepspeed_config": ENGINE | {"train_micro_batch_size_per_gpu": 2}}
    return request.param, wans.train(request.param, f"run {request.param}", objective=DMD2, **more)


def first_frame(wans: Wans) -> Tensor:
    """Return pixels_CTHW of a picture of the data."""
    return MediaReader(16.0).read(wans.data.parent / "0.png", Size(SIZE["height"], SIZE["width"], 1))


def test_a_student_opens_in_the_stock_pipeline_and_samples_there_as_here(
    wans: Wans, run: tuple[str, Path]
) -> None:
    form, output = run
    student, facts = open_wan(str(output / "student")), Facts.read(output / "student" / "wandistiller.json")
    pipe = WanImageToVideoPipeline.from_pretrained(output / "student", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    pixels = first_frame(wans)
    frames = [to_pil(pixels[:, 0] / 2 + 0.5)] * len(student.config.given_places)
    theirs = pipe(
        **dict(zip(("image", "last_image"), frames, strict=False)),
        prompt=PROMPTS[0],
        **SIZE,
        num_inference_steps=2,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        max_sequence_length=512,
    ).frames
    given = student.load_given_frames(CPU).encode(pixels.repeat(1, len(frames), 1, 1), SIZE["num_frames"])
    text_LD = Encoder(student.path, torch.float32, CPU).encode(PROMPTS[0])
    conditioning = Conditioning(text_LD[None], **{name: t[None] for name, t in given.items()})
    noise = torch.randn(1, *student.latent_shape(**SIZE), generator=torch.Generator().manual_seed(0))
    velocity = LocalTeacher(dict.fromkeys(Expert, network_of(pipe.transformer))).velocity
    few = few_steps(facts.shift, 2, None)
    ours, _ = denoise(velocity, student, facts.shift, noise, conditioning, 2, few)
    assert (ours - theirs).norm() / theirs.norm() < 1e-3


@pytest.mark.slow
def test_the_call_in_the_card_of_a_student_draws_a_clip(
    run: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, output = run
    code = (output / "student" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    code = code.replace("THIS_FOLDER", str(output / "student")).replace("bfloat16", "float32")
    for seed, name in enumerate(("image.png", "last_image.png")):
        noise(seed)[0].save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    about = next(imageio_ffmpeg.read_frames("video.mp4"))
    assert about["size"] == (SIZE["width"], SIZE["height"])


def test_pictures_of_training_begin_with_the_given_frames(run: tuple[str, Path]) -> None:
    _, height = Image.open(run[1] / "samples" / "step_00000002.png").size
    tile, gap, captions = 2 * SIZE["height"], 6, 28
    # given; teacher and student in three frames
    assert (height - captions) // (tile + gap) == 7


def encoded_frames(cache: Path) -> list[Tensor]:
    """Return the encoded given frames in a cache."""
    tensors = [load_file(file) for file in (cache / "frames").rglob("*.safetensors")]
    return [t for named in tensors for key, t in named.items() if re.search("joined|first", key)]


@pytest.mark.slow
def test_the_evaluation_draws_from_the_given_frames_of_training_and_has_figures_of_motion(
    wans: Wans, run: tuple[str, Path]
) -> None:
    form, output = run
    words = ["--prompts", read_json(output / "resolved" / "run.json")["data_path"], "--num_prompts", "1"]
    wandistiller("evaluate", "--student_path", output, *words, "--quick", "--steps", "2")
    figures = read_json(output / "evaluation.json")
    assert figures["ratio"]["motion"]["value"] > 0 and figures["relative_velocity_error"]["all"]
    (frames,) = encoded_frames(output / "cache")
    assert any(torch.equal(frames, trained) for trained in encoded_frames(wans.folder / f"cache {form}"))


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_two_ranks_learn_what_one_learns(wans: Wans, form: str, objective: str) -> None:
    runs = [
        wans.train(form, f"{form} {objective} {ranks}", ranks, objective=OBJECTIVES[objective])
        for ranks in (1, 2)
    ]
    one, two = map(losses, runs)
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_velocities_of_every_placement_on_two_ranks_are_bitwise_diffusers(
    wans: Wans, form: str, tmp_path: Path
) -> None:
    names = [name for name in TEACHERS if name != "zero_inference_nvme" or has_async_io()]
    tasks = [f"{name} float32 1" for name in names]
    found = call(differences, wans[form], tmp_path, tasks, ranks=2)
    assert [{task: of_rank[task] for task in tasks} for of_rank in found] == [dict.fromkeys(tasks, 0)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "objective"), [(A14B, "velocity"), (TI2V, "velocity"), (TI2V, "dmd2 with heads")]
)
def test_ranks_that_share_sequences_learn_what_one_rank_learns(wans: Wans, form: str, objective: str) -> None:
    more = {"objective": OBJECTIVES[objective], "deepspeed_config": ENGINE}
    one = losses(wans.train(form, f"{form} {objective} alone", 1, **more))
    two = losses(wans.train(form, f"{form} {objective} shared", 2, context_parallel=2, **more))
    # the gradients of a time for each patch are summed in another order
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("form", [A14B, TI2V])
def test_a_resumed_run_is_the_whole_one_bitwise(wans: Wans, form: str) -> None:
    """In the middle of the way of samples that go on from update to update."""
    more = {"objective": DMD2 | {"steps": 4, "shared": True, "carried": True}, "save_every": 1}
    whole = wans.train(form, f"{form} whole", **more, max_steps=3)
    part = wans.train(form, f"{form} part", **more, max_steps=2)
    again = wans.train(form, f"{form} part", **more, max_steps=3)
    assert part == again and losses(again) == losses(whole)


def test_pictures_in_a_run_of_clips_are_first_frames_of_a_wan_that_makes_both(wans: Wans) -> None:
    """Wan2.2 5B's model_index.json names the pipeline of text, as published."""
    folder = wans.folder / "published 5B"
    if not folder.exists():
        make_wan(folder, **IMAGE_FORMS[TI2V] | {"image": ""})
    given = recipe(wans.folder, folder, **wans.settings(TI2V), output_dir="out")
    assert read_job(RunConfig(**given), 1).folder.config.takes_image
    (clips := wans.data.with_name("clip.jsonl")).write_text(wans.data.read_text().splitlines()[-1])
    for other in ({"data_path": str(clips)}, {"num_frames": 1}):
        assert not read_job(RunConfig(**given | other), 1).folder.config.takes_image


def refused(wans: Wans, form: str, **more: Any) -> str:
    file = recipe_file(wans.folder, wans[form], "wrong", **wans.settings(form, **more))
    with pytest.raises(ConfigError) as raised:
        read_job(RunConfig(**json.loads(file.read_text())), 1)
    return str(raised.value)


def test_a_prompt_without_a_first_frame_is_refused(wans: Wans, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    message = refused(wans, A14B, data_path=str(tmp_path / "prompts.txt"), sample_prompts=None)
    assert 'begin with a given image, but "a red circle" has none' in message


def test_an_image_alone_is_refused_where_the_last_frame_is_given_too(wans: Wans) -> None:
    message = refused(wans, BOTH_ENDS, data_path=str(wans.data), sample_prompts=None)
    assert "is given the first and the last frame" in message
    assert "0.png is one image. Write `last_image` too, or `video`, which has both." in message


@pytest.mark.parametrize("form", [A14B, TI2V])
def test_a_last_image_is_refused_where_the_first_frame_alone_is_given(wans: Wans, form: str) -> None:
    rows = with_last_images(wans.data)
    message = refused(wans, form, data_path=str(rows), sample_prompts=None)
    assert "is given the first frame alone" in message
    assert "1.png is a last one. Leave `last_image` out." in message
    for words, images in (([str(rows)], []), (["a"], [[str(wans.data.parent / "0.png")]] * 2)):
        (problem,) = image_problems(open_wan(str(wans[form])), read_items(words, *images))
        assert "is given the first frame alone" in problem


def test_buckets_are_refused_where_samples_are_drawn_at_one_size(wans: Wans) -> None:
    message = refused(wans, A14B, objective=DMD2, buckets=[[32, 32], [32, 64]])
    assert "`buckets` makes samples of several sizes" in message and "Leave `buckets` out" in message


@pytest.mark.slow
def test_clips_are_made_at_the_bucket_of_the_image_that_they_begin_with(wans: Wans, tmp_path: Path) -> None:
    data = image_data(tmp_path / "data", pictures=4)
    for i in (1, 3):
        with Image.open(data.parent / f"{i}.png") as image:
            image.resize((160, 70)).save(data.parent / f"{i}.png")
    cache = tmp_path / "cache"
    more = {"data_path": str(data), "cache_dir": str(cache), "buckets": [[32, 32], [32, 64]], "max_steps": 4}
    run = wans.train(A14B, "buckets", **more, rollout_steps=1)
    sizes = set()
    for file in (cache / "latents").rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            sizes |= {tuple(opened.get_slice(k).get_shape()[-2:]) for k in opened.keys() if k.endswith(".x0")}
    assert len(losses(run)) == 4 and sizes == {(4, 4), (4, 8)}


def test_merged_padding_is_refused_where_states_of_images_stand_before_the_text(wans: Wans) -> None:
    message = refused(wans, WAN21, merge_text_padding=True)
    assert "`merge_text_padding` is true" in message and "512 rows" in message


def test_pictures_of_prompts_that_no_row_has_are_refused(wans: Wans) -> None:
    message = refused(wans, A14B, sample_prompts=["left", "a dog"])
    assert '`sample_prompts` has "a dog", which no row has' in message


@pytest.mark.slow
def test_an_evaluation_leaves_out_and_names_the_images_that_training_skips(
    wans: Wans, tmp_path: Path
) -> None:
    data, wan = image_data(tmp_path / "data", pictures=3), wans[A14B]
    (tmp_path / "data" / "1.png").write_bytes(b"no picture")
    words = ["--teacher_path", wan, "--prompts", data, "--height", "32", "--width", "32", "--num_frames", "5"]
    words += ["--quick", "--steps", "1", "--output", tmp_path]
    log = wandistiller("evaluate", "--student_path", wan, *words).stderr
    assert f"skipped   {tmp_path}/data/1.png: cannot be read: " in log
    assert json.loads((tmp_path / "evaluation.json").read_text())["prompts"] == 3
