"""A diffusers Wan pipeline on disk: its sizes, its parts, its sampler, and checks that it is complete."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import SchedulerMixin
from huggingface_hub import constants

from wandistiller.experts import Expert
from wandistiller.network.folder import Folder, Need, Usual
from wandistiller.network.weight_reader import WeightReader
from wandistiller.utils.errors import ConfigError, Place, problem, readable
from wandistiller.utils.files import TINY, read_json
from wandistiller.wan import added_lora, checks, components, hub, loaded_components, vae
from wandistiller.wan.added_lora import AddedLora
from wandistiller.wan.components import IMAGE_PARTS, text_config
from wandistiller.wan.fake_tensor_memory import coding, text_encoding
from wandistiller.wan.transformer_config import TransformerConfig


@dataclass(frozen=True)
class WanFolder(Folder):
    """A diffusers Wan pipeline on disk, described from its JSON files; no weight is read."""

    path: Path
    name: str
    configs: dict[Expert, TransformerConfig]
    boundary: float | None
    shift: float
    vae: dict[str, Any]
    revision: str | None = None
    added: tuple[AddedLora, ...] = ()
    expands_time: bool = False
    """Its networks take a time for each patch (Wan2.2 5B), and so make clips of text, or of a first frame."""

    def with_first_frames(self) -> Self:
        if not self.expands_time:
            return self
        return replace(self, configs={e: replace(c, expands_time=True) for e, c in self.configs.items()})

    @property
    def is_tiny(self) -> bool:
        return self.path in TINY.values()

    @property
    def hub_id(self) -> str | None:
        is_of_files = self.name.endswith(".json")
        return read_json(self.path / "model_index.json").get("_name_or_path") if is_of_files else None

    @property
    def spatial(self) -> int:
        return self.vae.get("scale_factor_spatial", 8)

    @property
    def fps(self) -> int:
        return 24 if self.spatial == 16 else 16  # Wan2.2 5B, which has its own VAE

    @property
    def temporal(self) -> int:
        return self.vae.get("scale_factor_temporal", 4)

    @property
    def added_settings(self) -> list[dict[str, Any]]:
        return added_lora.as_settings(self.added)

    @property
    def added_lines(self) -> list[str]:
        return added_lora.added_lines(self.added, self.configs)

    def added_changes(self, expert: Expert, *, weights: bool = True) -> dict[str, Any]:
        return added_lora.added_changes(self.added, self.configs[expert], expert, weights=weights)

    def with_loras(self, added: Sequence[AddedLora]) -> Self:
        if problems := added_lora.added_problems(Place(self.name), added, self.configs):
            raise ConfigError(*problems)
        held = {e for e in self.configs if added_lora.added_second_time(added, e)}
        configs = {e: c.with_second_time() if e in held else c for e, c in self.configs.items()}
        return replace(self, added=(*self.added, *added), configs=configs)

    def reader(self, expert: Expert) -> WeightReader:
        folder = self.path / expert.value
        if self.added:
            second_time = added_lora.added_second_time(self.added, expert)
            return added_lora.MergingReader(folder, self.added_changes(expert), second_time)
        return WeightReader(folder)

    def size_problems(self, height: int, width: int, num_frames: int) -> list[str]:
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
    def require_weights(self) -> None:
        remedy, weights = "Give the whole pipeline.", ("*.safetensors*", "*.bin*")  # also what is like them
        if self.revision:
            weights = ("*.safetensors",)
            hub.fetch(self.name, self.revision, hub.CONFIG_FILES + hub.WEIGHT_FILES)
            if constants.HF_HUB_OFFLINE:
                where = f"{constants.HF_HUB_CACHE}, and this machine is offline (HF_HUB_OFFLINE)"
                elsewhere = hub.fetch_elsewhere(self.name, self.revision, weights=True)
                remedy = f"It is not in {where}. {elsewhere}"
        parts = [*(e.value for e in self.configs), "vae", "text_encoder"]
        empty = [p for p in parts if not any(any((self.path / p).glob(pattern)) for pattern in weights)]
        problems = [f"{self.name}: no .safetensors file in {part}/. {remedy}" for part in empty]
        for expert, config in self.configs.items():
            if expert.value not in empty:
                held = added_lora.added_second_time(self.added, expert)
                problems += checks.transformer_problems(self.path / expert.value, config, held)
        if not {"vae", "text_encoder"} & {*empty}:
            problems += checks.component_problems(self.path, image=bool(self.config.image_dim))
        if problems:
            raise ConfigError(*problems)

    @property
    def parts(self) -> dict[str, list[Path]]:
        names = {"vae": ["vae"], "text_encoder": ["text_encoder", "tokenizer"]}
        names |= {"image_encoder": [*IMAGE_PARTS]} if self.config.image_dim else {}
        return {part: [self.path / folder for folder in folders] for part, folders in names.items()}

    @property
    def given_frames_parts(self) -> list[Path]:
        return [self.path / part for part in ("vae", *IMAGE_PARTS) if (self.path / part).is_dir()]

    def load_vae(self, device: torch.device) -> loaded_components.Vae:
        return loaded_components.Vae(self.path / "vae", self.vae, device)

    def load_text_encoder(
        self, dtype: torch.dtype, device: torch.device, room: int, swap: Path
    ) -> loaded_components.Encoder:
        folder = self.path / "text_encoder"
        offload = loaded_components.offload_kwargs(folder, dtype, room, swap, device)
        return loaded_components.Encoder(self.path, dtype, device, **offload)

    def load_given_frames(self, device: torch.device) -> loaded_components.GivenFramesEncoder:
        return loaded_components.GivenFramesEncoder(self, device)

    @property
    def text_width(self) -> int:
        return text_config(self.path)["d_model"]

    def text_need(self, dtype: torch.dtype, *, accelerator: bool) -> tuple[Need, torch.dtype]:
        config = text_config(self.path)
        stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), dtype)
        return text_encoding(config, str(dtype).removeprefix("torch."), accelerator=accelerator), stored

    def vae_need(
        self, call: str, shape: tuple[int, ...], room: float, *, accelerator: bool
    ) -> tuple[Need, bool]:
        weights = coding(call, self.vae, shape, accelerator=accelerator).weights
        return vae.fitting(call, self.vae, shape, room - weights, accelerator=accelerator)

    @property
    def image_encoder_bytes(self) -> int:
        if not self.config.image_dim:
            return 0
        with torch.device("meta"):
            encoder = components.image_encoder_of(components.image_config(self.path))
        return sum(p.nbytes for p in encoder.parameters())

    def bytes_to_fetch(self) -> int | None:
        return hub.bytes_to_fetch(self.name, self.revision)

    @property
    def usual(self) -> Usual:
        if self.is_tiny:
            side = 64 if self.path == TINY["tiny"] else 48  # the latter of nine frames
            return Usual(side, side, (2.0, 2.0))
        # Source of the others: Wan's wan/configs/*.py
        two_experts = (3.5, 3.5) if self.config.takes_image else (4.0, 3.0)
        return Usual(480, 832, (5.0, 5.0) if self.boundary is None else two_experts)

    def scheduler_config(self, shift: float) -> dict[str, Any]:
        config = components.known_config(self.path / "scheduler" / "scheduler_config.json")
        return config | {components.shift_key(config): shift}

    def scheduler(self, shift: float) -> SchedulerMixin:
        config = self.scheduler_config(shift)
        return components.scheduler_class(config["_class_name"]).from_config(config)

    def noise_problems(self) -> list[str]:
        scheduler, nothing = self.scheduler(self.shift), torch.zeros([1] * 5)
        scheduler.set_timesteps(3)
        first = next(iter(scheduler.timesteps))
        with torch.random.fork_rng(devices=[]):
            if not scheduler.step(nothing, first, nothing, return_dict=False)[0].any():
                return []
        remedy = "Write `stochastic_sampling` false, or an `algorithm_type` without sde, for a teacher."
        text = "this scheduler adds noise of its own in each step, other noise in each run"
        return [f"{self.name}/scheduler/scheduler_config.json: {text}. {remedy}"]
