"""A diffusers Wan pipeline on disk: its folder or hub id, its sizes, and checks that it is complete."""

import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from huggingface_hub import constants

from wandistiller.experts import Expert
from wandistiller.utils.errors import ADDRESS, ConfigError, Place, problem, readable
from wandistiller.utils.files import digest, fingerprint, read_json
from wandistiller.wan import checks, components
from wandistiller.wan.added_lora import AddedLora, MergingReader, added_changes, added_problems
from wandistiller.wan.defaults import EMBEDDED, EMBEDDED_VIDEO, WAN21, WAN22, WAN22_IMAGE, Usual
from wandistiller.wan.hub import CONFIG_FILES, WEIGHT_FILES, fetch, fetch_elsewhere
from wandistiller.wan.schedulers import own_settings, shift_key
from wandistiller.wan.transformer import meta_transformer
from wandistiller.wan.transformer_config import TransformerConfig
from wandistiller.wan.weight_reader import WeightReader, unfinished

_EMBEDDED = Path(__file__).parent.parent / "tiny"
FOLDERS = {"tiny": "pipeline", "tiny-video": "video_pipeline", "tiny-i2v": "image_pipeline"}
TINY = {name: _EMBEDDED / folder for name, folder in FOLDERS.items()}


@dataclass(frozen=True, slots=True)
class WanFolder:
    """A diffusers Wan pipeline on disk, described from its JSON files; no weight is read."""

    path: Path
    name: str
    """The folder or hub id in the user's words."""
    configs: dict[Expert, TransformerConfig]
    """Transformer config per expert; two for Wan2.2 A14B, one otherwise."""
    boundary: float | None
    shift: float
    vae: dict[str, Any]
    revision: str | None = None
    """Commit of a hub id; later fetches use the same."""
    added: tuple[AddedLora, ...] = ()
    """LoRA files that are added to the networks' weights when they are read."""
    expands_time: bool = False
    """Its networks take a time for each patch (Wan2.2 5B), and so make clips of text, or of a first frame."""

    def only(self, experts: Iterable[Expert]) -> Self:
        """Return the folder with these experts alone."""
        return replace(self, configs={expert: self.configs[expert] for expert in experts})

    @property
    def config(self) -> TransformerConfig:
        """Of its first expert; of a part of it, as where one expert trains, this may be the low-noise one."""
        return next(iter(self.configs.values()))

    def with_first_frames(self) -> "WanFolder":
        """Return the pipeline as it makes clips that begin with a given image, if it makes both kinds."""
        if not self.expands_time:
            return self
        return replace(self, configs={e: replace(c, expands_time=True) for e, c in self.configs.items()})

    @property
    def is_tiny(self) -> bool:
        return self.path in TINY.values()

    @property
    def spatial(self) -> int:
        """Pixels per latent pixel."""
        return self.vae.get("scale_factor_spatial", 8)

    @property
    def fps(self) -> int:
        """Frames a second of its videos: 24 for Wan2.2 5B, which has its own VAE; else 16."""
        return 24 if self.spatial == 16 else 16

    @property
    def temporal(self) -> int:
        """Frames per latent frame."""
        return self.vae.get("scale_factor_temporal", 4)

    @property
    def shortest(self) -> int:
        """Least number of frames of its samples: an image, or one latent frame after the given one."""
        return 1 + self.temporal if self.config.takes_image else 1

    @property
    def shortest_latent(self) -> int:
        return (self.shortest - 1) // self.temporal + 1

    @property
    def identity(self) -> str:
        """Equal for networks of the same weights: a commit or the files' fingerprint, and what is added."""
        # a hub id's weights may not be here yet, but its commit identifies them
        own = self.revision or fingerprint(self.path / expert.value for expert in self.configs)
        return digest(own, self.added_identities) if self.added else own

    @property
    def weights_identity(self) -> str:
        """Equal for pipelines whose networks have the same weights, before anything is added to them."""
        folders = (self.path / expert.value for expert in Expert)
        return self.revision or fingerprint(folder for folder in folders if folder.is_dir())

    @property
    def added_identities(self) -> list[list[Any]]:
        return [one.identity for one in self.added]

    def reader(self, expert: Expert) -> WeightReader:
        folder = self.path / expert.value
        if not self.added:
            return WeightReader(folder)
        return MergingReader(folder, added_changes(self.added, self.configs[expert], expert))

    def latent_shape(self, height: int, width: int, num_frames: int) -> tuple[int, int, int, int]:
        """Return (C, F, H, W) of one sample of the given size in pixels and frames."""
        frames = (num_frames - 1) // self.temporal + 1
        return self.config.out_channels, frames, height // self.spatial, width // self.spatial

    @property
    def multiple(self) -> tuple[int, int]:
        """Divisors of every height and every width, in pixels: those of a patch."""
        _, height, width = self.config.patch_size
        return self.spatial * height, self.spatial * width

    def tokens(self, height: int, width: int, num_frames: int) -> int:
        """Return the number of patches of a sample of the given size: the length of attention's sequence."""
        shape = self.latent_shape(height, width, num_frames)[1:]
        return math.prod(n // p for n, p in zip(shape, self.config.patch_size, strict=True))

    def size_problems(self, height: int, width: int, num_frames: int) -> list[str]:
        """List the sizes that are not whole latents and whole patches, or are too large."""
        (t, h, w), rope, n = self.config.patch_size, self.config.rope_max_seq_len, self.temporal
        rules, sides = [], {"height": (height, self.spatial * h), "width": (width, self.spatial * w)}
        for key, (value, multiple) in sides.items():
            near = max(multiple, round(value / multiple) * multiple)
            remedy = f"This teacher needs a multiple of {multiple}, e.g. {near}."
            rules.append((key, value, rope * multiple, value % multiple, remedy))
        remedy = f"Write {n}k + 1, e.g. {(num_frames - 1) // n * n + 1}."
        rules.append(("num_frames", num_frames, (rope * t - 1) * n + 1, (num_frames - 1) % n, remedy))
        too_large = "This teacher supports sizes up to {}. Write less."
        problems = [
            problem(self.name, key, value, too_large.format(most) if value > most else remedy)
            for key, value, most, rest, remedy in rules
            if value > most or rest
        ]
        if 1 <= num_frames < self.shortest:
            remedy = f"It makes clips that begin with a given image. Write at least {self.shortest}."
            problems.append(problem(self.name, "num_frames", num_frames, remedy))
        return problems


@readable()
def require_weights(folder: WanFolder) -> None:
    """Check that all weights are here and fit their configs, before any is loaded; fetch a hub id's.

    Raises:
        ConfigError: names every part without a safetensors file, and every missing, truncated or misshapen
            tensor.
    """
    remedy, weights = "Give the whole pipeline.", ("*.safetensors*", "*.bin*")  # also what is like them
    if folder.revision:
        weights = ("*.safetensors",)
        fetch(folder.name, folder.revision, CONFIG_FILES + WEIGHT_FILES)
        if constants.HF_HUB_OFFLINE:
            offline = f"It is not in {constants.HF_HUB_CACHE}, and this machine is offline (HF_HUB_OFFLINE)."
            remedy = f"{offline} {fetch_elsewhere(folder.name, folder.revision, weights=True)}"
    parts = [*(e.value for e in folder.configs), "vae", "text_encoder"]
    empty = [p for p in parts if not any(any((folder.path / p).glob(pattern)) for pattern in weights)]
    problems = [f"{folder.name}: no .safetensors file in {part}/. {remedy}" for part in empty]
    for expert, config in folder.configs.items():
        if expert.value not in empty:
            problems += checks.weight_problems(folder.path / expert.value, meta_transformer(config))
    if not {"vae", "text_encoder"} & {*empty}:
        problems += checks.component_problems(folder.path, image=bool(folder.config.image_dim))
    if problems:
        raise ConfigError(*problems)


@readable()
def open_wan(name: str, weights: bool = False, revision: str | None = None) -> WanFolder:
    """Describe a diffusers Wan pipeline: a folder, a hub id, `tiny` or `tiny-video`.

    Args:
        weights: for a hub id, fetch the weights too and not only the JSON files.
        revision: branch, tag or commit of a hub id; None is its main branch.
    Raises:
        ConfigError: there is no such folder, or it is not a Wan pipeline that can be distilled.
    """
    path, commit = TINY.get(name, Path(name)), None
    if ADDRESS.match(name):
        hub_id = "/".join(PurePosixPath(name).parts[2:4])
        raise ConfigError(f"{name}: is an address. Give the hub id, such as {hub_id}, or a folder here.")
    if not path.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        path = fetch(name, revision or "main", CONFIG_FILES + WEIGHT_FILES if weights else CONFIG_FILES)
        commit = path.name
    elif revision:
        remedy = "Only a hub id has revisions; leave it out."
        raise ConfigError(problem(name, "teacher_revision", revision, remedy))
    if of_run := run_problem(path, name):
        raise ConfigError(of_run)
    if problems := unfinished(path, [file for file in CONFIG_FILES if file != "README.md"]):
        raise ConfigError(*problems)
    index = _read(path, name, "model_index.json")
    if index.values.get("_class_name") not in (checks.TEXT_TO_VIDEO, checks.IMAGE_TO_VIDEO):
        both = f"text-to-video ({checks.TEXT_TO_VIDEO}) or image-to-video ({checks.IMAGE_TO_VIDEO})"
        remedy = f"Give a diffusers Wan of {both}."
        raise ConfigError(index.problem("_class_name", f"{remedy} {checks.UNSUPPORTED}"))
    # boundary_ratio alone proves nothing: a converted Wan2.1 can carry it without a second transformer
    experts = [e for e in Expert if (path / e.value / "config.json").is_file()]
    if Expert.HIGH_NOISE not in experts:
        raise ConfigError(f"{name}: no transformer/config.json. Give a complete diffusers pipeline folder.")
    configs = {e: _read(path, name, f"{e.value}/config.json") for e in experts}
    vae = _read(path, name, "vae/config.json")
    scheduler = _read(path, name, "scheduler/scheduler_config.json")
    boundary = index.values.get("boundary_ratio") if len(experts) == 2 else None
    image = bool(configs[Expert.HIGH_NOISE].values.get("image_dim"))
    parts = [*(e.value for e in experts), *(components.IMAGE_PARTS if image else ())]
    problems = components.index_problems(index, parts, scheduler.values.get("_class_name"))
    problems += [p for config in configs.values() for p in checks.part_problems("transformer", config)]
    problems += checks.part_problems("vae", vae) + checks.scheduler_problems(scheduler)
    text = None
    if (path / "text_encoder" / "config.json").is_file():
        text = components.PartConfig(f"{name}/text_encoder/config.json", components.text_config(path))
        problems += checks.part_problems("text_encoder", text)
    problems += components.tokenizer_problems(f"{name}/tokenizer", path / "tokenizer")
    if len(experts) == 2 and not (isinstance(boundary, float) and 0 < boundary < 1):
        remedy = "It has two experts; write where they meet (Wan2.2 A14B: 0.875)."
        problems.append(index.problem("boundary_ratio", remedy))
    if problems := problems or checks.unequal_problems(index, [*configs.values()], vae, text):
        raise ConfigError(*problems)
    shift = own_settings(scheduler.values)[shift_key(scheduler.values)]
    expands_time = bool(index.values.get("expand_timesteps"))
    transformers = {expert: TransformerConfig.of(config.values) for expert, config in configs.items()}
    described = path, name, transformers, boundary, float(shift), vae.values
    folder = WanFolder(*described, revision=commit, expands_time=expands_time)
    return folder.with_first_frames() if index.values["_class_name"] == checks.IMAGE_TO_VIDEO else folder


def with_loras(folder: WanFolder, added: list[AddedLora]) -> WanFolder:
    """Return the pipeline with LoRA files added to its networks, after those that it has.

    Raises:
        ConfigError: they are not for its networks.
    """
    if problems := added_problems(Place(folder.name), added, folder.configs):
        raise ConfigError(*problems)
    return replace(folder, added=(*folder.added, *added))


def student_of(name: str) -> str:
    """Return the student that a run has exported, for the name of its folder; else the name as it is."""
    inside = Path(name) / "student"
    is_run = not (Path(name) / "model_index.json").exists() and (inside / "model_index.json").is_file()
    return str(inside) if is_run else name


def run_problem(path: Path, name: str) -> str | None:
    """Return the problem of the folder of a run, or of a checkpoint, in place of a pipeline's."""
    if (path / "model_index.json").exists():
        return None
    if (inside := student_of(name)) != name:
        return f"{name}: is the folder of a run. Give its student: {inside}."
    if (path / "resolved" / "run.json").is_file() or (path / "run_state.json").is_file():
        words = shlex.join(["wandistiller", "export", "--checkpoint", name, "--output", "students/mine"])
        remedy = f"Export its student and give that: `{words}`."
        return f"{name}: is a run or a checkpoint, not a pipeline. {remedy}"
    return None


def _read(folder: Path, name: str, file: str) -> components.PartConfig:
    """Read a file of the pipeline, with the values of keys that are needed and that it may lack."""
    if not (folder / file).is_file():
        remedy = "Give a complete diffusers Wan pipeline folder, a hub id, or `tiny`."
        raise ConfigError(f"{name}: no file {folder / file}. {remedy}")
    values, part = read_json(folder / file), file.partition("/")[0]
    is_network = part.startswith(("vae", "transformer"))
    return components.PartConfig(f"{name}/{file}", components.filled(part, values) if is_network else values)


def usual_for(folder: WanFolder) -> Usual:
    if folder.is_tiny:
        return EMBEDDED if folder.path == TINY["tiny"] else EMBEDDED_VIDEO
    if folder.boundary is None:
        return WAN21
    return WAN22_IMAGE if folder.config.takes_image else WAN22
