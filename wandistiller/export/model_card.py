"""The model card of an export, with the settings of ComfyUI's nodes; each format adds its own text."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load

from wandistiller.checkpoint.facts import Facts
from wandistiller.config.start import recorded_stages
from wandistiller.data.media import LETTERBOX
from wandistiller.experts import Expert, expert_at
from wandistiller.export.source import Source, clip, sampler_in_words, without_places, written
from wandistiller.flow import RENOISE, FlowSchedule
from wandistiller.network.folder import Folder
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import FACTS, read_json, write_json
from wandistiller.utils.images import drawn
from wandistiller.wan.components import ANY_STEP

HUB = "https://huggingface.co"
HERE = "THIS_FOLDER"
"""The folder of an export, in a card that names no repository."""
PICTURE = "samples.png"
BESIDE = "FOLDER_OF_THE_FILES"
"""The folder that holds a card's folder and its files, in the same card."""
LICENCES = ("LICENSE", "LICENSE.md", "LICENSE.txt")
MADE_FOR = """Guidance is folded in: sample with `guidance_scale=1.0` (CFG 1), which takes half the calls. \
Made for
{clip} of width {width} and height {height}, {steps} steps, timestep shift {shift}."""
MADE = (
    """Distilled from `{teacher_path}`: {layers} layers, {n_experts} expert{s}, {parameters:.1f}M \
parameters, {max_steps}
steps of {objective}. """
    + MADE_FOR
)
FEW_STEPS = """

It samples in {steps} step{plural}, {sampler} from the noise level{plural} {levels}: keep their \
number, shift and scheduler."""
ANY_STEPS = """

It samples in any number of steps, 1 to 16 and more: each takes the mean velocity to the next noise level.
Keep its shift and scheduler."""
FIXED_STEPS = """ It is trained for no other number, and diffusers would take wrong noise levels."""
FEWER_STEPS = """ For fewer use `wandistiller sample --steps N`: diffusers would take wrong noise levels."""
GLOBAL_NOISE = """
Between steps diffusers takes noise from torch's own generator: for the same picture again call
`torch.manual_seed` too, with another seed than a `generator` has, or that noise is the first once more."""
TWO_EXPERTS = """

The high-noise expert serves the noise levels (sigma) from {boundary} up, the low-noise expert those \
below."""
NO_LICENCE = """
The teacher's folder names no licence. Whatever it is, it holds for this student: write it into the lines
above before you publish it.
"""


CALL = """\
frames = pipe({image}prompt="a red circle", height={height}, width={width}, num_frames={num_frames}, \
num_inference_steps={steps},
              guidance_scale=1.0, output_type="pil").frames[0]
{save}"""


def student_sentence(facts: Facts) -> str:
    layers, n_experts = facts.config.num_layers, len(facts.experts)
    parameters = facts.config.numel * n_experts / 1e6
    text = MADE + few_steps_sentence(facts) + TWO_EXPERTS * facts.has_boundary
    counts = {"layers": layers, "n_experts": n_experts, "parameters": parameters, "s": "s" * (n_experts > 1)}
    return text.format(**written(facts), **counts, clip=clip(facts))


def few_steps_sentence(facts: Facts) -> str:
    """Say how a student of few steps samples; nothing of another."""
    if not (levels := facts.few_steps):
        return ""
    if facts.is_flow_map:
        return ANY_STEPS
    listed = ", ".join(f"{level:.4g}" for level in levels)
    text = FEW_STEPS.format(
        steps=len(levels), plural="s" * (len(levels) > 1), levels=listed, sampler=sampler_in_words(facts)
    )
    if len(levels) == 1 or facts.sampler != RENOISE:
        return text + FIXED_STEPS
    return text + FEWER_STEPS + GLOBAL_NOISE


def call_in_diffusers(source: Source) -> dict[str, str]:
    """Return the class of the `pipeline` in diffusers, the `call` that draws, and what it `imports`."""
    facts, pipeline, helpers, image, pillow = source.published, "WanPipeline", [], "", ""
    save = 'frames[0].save("image.png")'
    if facts.num_frames > 1:
        helpers.append("export_to_video")
        save = f'export_to_video(frames, "video.mp4", fps={source.recipe.get("video_fps", 16)})'
    if facts.image_to_video:
        helpers.append("load_image")
        pipeline, image = "WanImageToVideoPipeline", _images(facts)
        pillow = "from PIL import Image, ImageOps\n"
    pipeline = ANY_STEP if facts.is_flow_map else pipeline
    imports = f"from diffusers.utils import {', '.join(helpers)}\n" if helpers else ""
    call = CALL.format(**vars(facts), image=image, save=save)
    return {"pipeline": pipeline, "imports": imports + pillow, "call": call}


def _images(facts: Facts) -> str:
    """Return the images in the call of an image-to-video pipeline, cut or between bars as in training."""
    has_bars = facts.fit == LETTERBOX
    method, colour = ("pad", f", {facts.background!r}") if has_bars else ("fit", "")
    size = f"({facts.width}, {facts.height})"
    return "".join(
        f'{name}=ImageOps.{method}(load_image("{name}.png"), {size}, Image.Resampling.LANCZOS{colour}), '
        for name in ("image", "last_image")[: len(facts.config.given_places)]
    )


def joined(files: list[str]) -> str:
    return " and ".join(f"`{file}`" for file in files)


def write_card(folder: Path, source: Source, relation: str, text: str) -> None:
    """Write README.md (front matter, `text`, picture, evaluation, recipe) and the facts as JSON.

    The picture is the last one up to the checkpoint's step, the evaluation one of this checkpoint.

    Args:
        relation: to the base model: finetune, adapter.
    """
    run = source.folder.parent.parent
    front, named = _front_matter(source, relation, folder)
    text = f"---\n{front}\n---\n{text}" + NO_LICENCE * (not named)
    if pictures := [picture for picture in drawn(run) if picture.stem <= source.folder.name]:
        shutil.copyfile(pictures[-1], folder / PICTURE)
        text += f"\nAbove the teacher, below the student, from the same noise:\n\n![samples]({PICTURE})\n"
    if tables := _evaluation(run, source):
        measured = "Measured on the student as a diffusers pipeline."
        text += f"\n## How near it is to its teacher\n\n{measured}\n\n{tables}\n"
    settings = without_places(source.recipe) | {"teacher_path": source.published.teacher_path}
    recipe = json.dumps(settings, indent=1, ensure_ascii=False)
    details = f"<details><summary>the recipe</summary>\n\n```json\n{recipe}\n```\n\n</details>"
    before = source.facts.before
    stages = f"Before it, in stages: {'; '.join(before)}.\n\n" if before else ""
    text += f"\n## How it was made\n\n{stages}{details}\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
    write_json(folder / FACTS, source.published.as_json())


def _front_matter(source: Source, relation: str, folder: Path) -> tuple[str, bool]:
    """The metadata of the hub's cards, and whether a licence is in it; a licence's file goes to `folder`.

    Source: https://github.com/huggingface/hub-docs/blob/main/modelcard.md.
    """
    try:
        teacher = source.teacher(weights=False)
    except ConfigError:  # it is gone; its name is left
        teacher = None
    hub_id = source.hub_id or source.facts.teacher_hub_id or ""
    base = {"base_model": [hub_id], "base_model_relation": relation} if hub_id else {}
    terms = licence(teacher, hub_id)
    link = Path(terms.get("license_link", ""))
    inside = not (link.is_absolute() or ".." in link.parts)  # else a card could publish any file
    if teacher and not hub_id and inside and (file := teacher.path / link).is_file():
        shutil.copyfile(file, folder / link.name)
        terms["license_link"] = link.name
    data = ModelCardData(
        library_name="diffusers",
        pipeline_tag="image-to-video" if source.facts.image_to_video else "text-to-video",
        tags=["wan", "distillation"],
        **terms,
        **base,
    )
    return data.to_yaml(), bool(terms)


def licence(teacher: Folder | None, hub_id: str) -> dict[str, str]:
    """The licence on the teacher's own card; without one, `other` with a link to the hub or to its file.

    Nothing if there is neither: `other` needs a link.

    Args:
        hub_id: the teacher's, or empty.
    """
    if teacher and teacher.is_tiny:
        return {"license": "apache-2.0"}  # as all that comes with this package
    card: dict[str, Any] = {}
    if teacher and (file := teacher.path / "README.md").is_file():
        with suppress(ValueError, yaml.YAMLError):  # a mistake in the teacher's card
            card = metadata_load(file) or {}
    keys = ("license", "license_name", "license_link")
    known = {key: card[key] for key in keys if isinstance(card.get(key), str)}
    if known.setdefault("license", "other") == "other":
        file = next((name for name in LICENCES if teacher and (teacher.path / name).is_file()), "")
        if not (link := known.get("license_link") or file or hub_id and f"{HUB}/{hub_id}"):
            return {}
        known = {"license_name": "as-the-teacher"} | known | {"license_link": link}
    if hub_id and "://" not in (link := known.get("license_link", "://")):
        known["license_link"] = f"{HUB}/{hub_id}/blob/main/{link}"
    return known


def _evaluation(run: Path, source: Source) -> str:
    """The tables of OUTPUT/evaluation.md, if `evaluate` has run on this checkpoint's student.

    Of a last stage they are in the whole recipe's folder, too, where `evaluate` leaves them by default.
    """
    for folder in [run, run.parent] if recorded_stages(run.parent)[-1:] == [run] else [run]:
        file, figures = folder / "evaluation.md", folder / "evaluation.json"
        steps = read_json(figures).get("trained_steps") if figures.is_file() else None
        if steps == source.facts.max_steps and file.is_file():
            blocks = file.read_text(encoding="utf-8").split("\n\n")
            return "\n\n".join(block for block in blocks if block.startswith("|"))
    return ""


COMFY = """
In ComfyUI, `{latent}` has width {width}, height {height}, length {num_frames}. ComfyUI knows neither the
shift nor the guidance of this student:

| node | set |
|---|---|
"""
ONE_SAMPLER = """\
| ModelSamplingSD3, after {loader} | shift {shift} |
| KSampler | steps {steps}{fewer}, cfg 1, sampler {sampler}, scheduler simple |
"""
TWO_SAMPLERS = """\
| two ModelSamplingSD3, one after each {loader} | shift {shift} |
| both KSamplerAdvanced | steps {steps}, cfg 1, sampler {sampler}, scheduler simple |
| the first, with the high-noise model | add_noise enable, start_at_step 0, end_at_step {split}, \
return_with_leftover_noise enable |
| the second, with the low-noise model | add_noise disable, start_at_step {split}, end_at_step 10000, \
return_with_leftover_noise disable |

Step {split} of {steps} is the first whose noise level is below the boundary {boundary}.
"""


def comfy_nodes(facts: Facts, loader: str) -> str:
    """The settings of ComfyUI's nodes, in a table.

    Args:
        loader: the node whose model is shifted.
    """
    latent = "EmptyHunyuanLatentVideo" if facts.config.out_channels == 16 else "Wan22ImageToVideoLatent"
    if facts.image_to_video:
        latent = "WanImageToVideo" if facts.config.joined_channels else latent
        latent = "WanFirstLastFrameToVideo" if len(facts.config.given_places) == 2 else latent
    text = COMFY + (TWO_SAMPLERS if facts.has_boundary else ONE_SAMPLER)
    words = {"latent": latent, "loader": loader, "sampler": "euler or uni_pc", "fewer": ""}
    if facts.few_steps:
        renoise = facts.sampler == RENOISE
        words["sampler"] = "lcm" if renoise else "euler"
        words["fewer"] = " or fewer" * (renoise and facts.steps > 1)  # it shifts any number by itself
    return text.format(**written(facts) | words, split=split_step(facts, facts.steps))


def split_step(facts: Facts, steps: int) -> int:
    """The steps of the high-noise expert, by ComfyUI's scheduler `simple` as by diffusers."""
    path = FlowSchedule(facts.shift, facts.boundary, seed=0)
    sigmas = [round(path.shifted(1 - step / steps), 6) for step in range(steps)]
    return sum(expert_at(sigma, path.boundary) is Expert.HIGH_NOISE for sigma in sigmas)
