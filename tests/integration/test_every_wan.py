"""Every published Wan: its config without weights, and a small random one of its form from end to end."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from diffusers.utils import load_video
from huggingface_hub import constants
from PIL import Image
from published_wan import PUBLISHED, Published, hub_cache
from ranks import losses, wandistiller
from reading import read_run
from recipes import TORCH_ADAM, recipe_file, student_engine
from safetensors.torch import load_file
from small_wan import FORMS, make_wan

from wandistiller.cli.main import main
from wandistiller.config.job import Job
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.training.prepare import prepare
from wandistiller.wan.folder import WanFolder

FACTS = {  # parameters of each expert; guidance and shift; what height and width are multiples of
    "1.3B": ([1_418_996_800], (5.0, 5.0, 3.0), 16),
    "14B": ([14_288_491_584], (5.0, 5.0, 3.0), 16),
    "5B": ([4_999_787_712], (5.0, 5.0, 5.0), 32),
    "A14B": ([14_288_491_584] * 2, (4.0, 3.0, 3.0), 16),
}
SIZES = [  # height, width, frames; latent C F H W; tokens
    ("1.3B", (480, 832, 81), (16, 21, 60, 104), 32_760),
    ("14B", (720, 1280, 81), (16, 21, 90, 160), 75_600),
    ("14B", (480, 832, 1), (16, 1, 60, 104), 1_560),
    ("A14B", (480, 832, 81), (16, 21, 60, 104), 32_760),
    ("5B", (704, 1280, 1), (48, 1, 44, 80), 880),
    ("5B", (704, 1280, 121), (48, 31, 44, 80), 27_280),
]
Size = tuple[int, int, int]


@pytest.mark.parametrize("it", PUBLISHED.values(), ids=PUBLISHED)
def test_diffusers_knows_every_key_of_a_published_config(it: Published) -> None:
    kinds = {WanTransformer3DModel: it.transformer, AutoencoderKLWan: it.vae, WanPipeline: it.index}
    for kind, config in kinds.items():
        assert set(config) - {"_class_name"} - set(signature(kind.__init__).parameters) == set()


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.usefixtures("one_rank")
def test_a_published_wan_has_its_parameters_defaults_and_multiples_of_a_patch(
    wans: dict[str, WanFolder], published: Path, tmp_path: Path, name: str
) -> None:
    folder, (parameters, defaults, multiple) = wans[name], FACTS[name]
    assert [c.numel for c in folder.configs.values()] == parameters
    assert [n for n in range(1, 65) if not folder.size_problems(n, n, 1)] == [*range(multiple, 65, multiple)]
    paths = {"data_path": str(published / "prompts.txt"), "output_dir": str(tmp_path / "o")}
    run = read_job(RunConfig(teacher_path=folder.name, **paths), world=1).run
    assert (run.guidance_scale, run.guidance_scale_2, run.shift) == defaults


@pytest.mark.parametrize(("name", "size", "shape", "tokens"), SIZES)
def test_a_size_gives_latents_and_tokens(
    wans: dict[str, WanFolder], name: str, size: Size, shape: tuple[int, ...], tokens: int
) -> None:
    folder, x_BCFHW = wans[name], torch.empty(1, *shape, device="meta")
    embedded_BDFHW = folder.config.meta().patch_embedding(x_BCFHW)
    assert folder.size_problems(*size) == [] and folder.latent_shape(*size) == shape
    assert folder.tokens(*size) == embedded_BDFHW[0, 0].numel() == tokens


@pytest.mark.parametrize("name", FACTS)
def test_the_vae_makes_the_channels_that_the_transformer_takes(wans: dict[str, WanFolder], name: str) -> None:
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(wans[name].vae)
        z_BCFHW = vae.encode(torch.empty(1, 3, 1, 64, 96)).latent_dist.mode()
    assert z_BCFHW.shape[1:] == wans[name].latent_shape(64, 96, 1)


@dataclass(frozen=True)
class Run:
    """One small pipeline that went the whole path."""

    job: Job
    prepared: set[Path]
    """The cache's files right after `prepare`."""
    student: Path
    """The folder that `export` wrote, in bfloat16."""


def as_hub_id(teacher: Path, patch: pytest.MonkeyPatch) -> str:
    """Put a pipeline into an offline hub's cache for this process and its children; remove the folder."""
    cache = str(hub_cache(teacher.parent / "hub", "org/wan", teacher, "main"))
    patch.setenv("HF_HUB_CACHE", cache)
    patch.setattr(constants, "HF_HUB_CACHE", cache)
    shutil.rmtree(teacher)
    return "org/wan"


@pytest.fixture(scope="module", params=[*((form, 1) for form in FORMS), ("Wan2.2-TI2V-5B", 5)], ids=str)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_rank: torch.device
) -> Iterator[Run]:
    """Each form, with an image; one with a video; the sharded one by a hub id."""
    form, frames = request.param
    folder = tmp_path_factory.mktemp("run")
    pictures = [Image.fromarray(np.full((80, 80, 3), 40 * i, dtype=np.uint8)) for i in range(frames)]
    pictures[0].save(folder / "given.gif", save_all=True, append_images=pictures[1:])
    kind = "video" if frames > 1 else "image"
    data = [{"prompt": "a red circle", kind: "given.gif"}, {"prompt": "a blue square"}]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    teacher, experts = make_wan(folder / "wan", **FORMS[form]), ("one", "two")[FORMS[form]["experts"] - 1]
    with pytest.MonkeyPatch.context() as patch:
        where = as_hub_id(teacher, patch) if "max_shard_size" in FORMS[form] else teacher
        more = {
            "data_path": str(folder / "data.jsonl"),
            "student_config": {"num_layers": 2, "experts": experts},
        }
        more |= {"max_steps": 2, "rollout_steps": 2, "height": 32, "width": 64, "num_frames": frames}
        more |= {"deepspeed_config": student_engine(2, offload=False, optimizer=TORCH_ADAM)}
        file = recipe_file(folder, where, **more)
        job = read_job(read_run(str(file), {}), world=1)
        prepare(job)
        prepared = set(job.cache.rglob("*.safetensors"))
        wandistiller("train", "--recipe", file)
        student = folder / "student"
        assert main(["export", "--checkpoint", str(job.output), "--output", str(student)]) == 0
        yield Run(job, prepared, student)


@pytest.mark.slow
def test_prepare_makes_latents_of_the_medium_and_of_the_prompt_alone(run: Run) -> None:
    latents = [file for file in run.prepared if file.parent.parent.name == "latents"]
    shapes = [t.shape for file in latents for t in load_file(file).values()]
    assert shapes == [run.job.folder.latent_shape(32, 64, run.job.run.num_frames)] * 2


@pytest.mark.slow
def test_training_uses_what_prepare_left(run: Run) -> None:
    files = {file for file in run.job.cache.rglob("*.safetensors") if "measured" not in file.parts}
    assert files == run.prepared
    assert len(losses(run.job.output)) == 2 and np.isfinite(losses(run.job.output)).all()


@pytest.mark.slow
def test_the_export_keeps_the_teacher_s_fields(run: Run) -> None:
    index, teacher = (
        json.loads((f / "model_index.json").read_text()) for f in (run.student, run.job.folder.path)
    )
    assert index["expand_timesteps"] is teacher["expand_timesteps"] is (run.job.folder.spatial == 16)
    for key in ("transformer", "transformer_2", "boundary_ratio", "vae"):
        assert index[key] == teacher[key]


@pytest.mark.slow
def test_the_stock_pipeline_draws_what_sample_drew(run: Run, tmp_path: Path) -> None:
    size = f"--height 32 --width 64 --num_frames {run.job.run.num_frames}".split()
    words = ["--model", run.student, "--prompts", "a red circle", "--output", tmp_path, *size]
    wandistiller("sample", *words, *"--steps 2 --seed 3 --dtype float32".split())
    pipe = WanPipeline.from_pretrained(run.student, dtype=torch.float32)
    how = {"num_frames": run.job.run.num_frames, "num_inference_steps": 2, "guidance_scale": 1.0}
    how |= {"generator": torch.Generator().manual_seed(3), "output_type": "np"}
    frames = pipe("a red circle", height=32, width=64, **how).frames[0]
    if len(frames) == 1:
        drawn = np.asarray(Image.open(tmp_path / "0000.png"))
        assert np.abs(drawn - (frames[0] * 255).round()).max() <= 1  # it rounds otherwise
    else:  # MP4 loses detail
        with closing(imageio_ffmpeg.read_frames(str(tmp_path / "0000.mp4"))) as frames_of_file:
            assert next(frames_of_file)["fps"] == (24 if run.job.folder.spatial == 16 else 16)
        drawn = np.stack([np.asarray(f) for f in load_video(str(tmp_path / "0000.mp4"))])
        assert drawn.shape == (5, 32, 64, 3)
        assert np.abs(drawn.mean((1, 2)) - 255 * frames.mean((1, 2))).max() < 8
