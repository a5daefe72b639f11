"""The flags of each command, as a dataclass from which the parser follows. Nothing heavy is imported.

Those of `train` and `prepare` are the recipe's keys, in `config.run_config`.
"""

from argparse import BooleanOptionalAction
from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from wandistiller.utils.registry import names_in
from wandistiller.utils.validation import Count, Index, Scale, Seed, Steps

Gib = Annotated[float, Gt(0), Lt(10**7)]
Price = Annotated[float, Ge(0), Lt(10**6)]

PLACED = "where the networks are: a shipped JSON's name, or a file; auto: the simplest that fits"
AUTO_DTYPE = "of the arithmetic; auto: as a named JSON says, else bfloat16 on a GPU, float32 on the CPU"
SHARED = "ranks that compute each sample together, for long videos; a divisor of ranks, heads and patches"
LORA = "LoRA files to add, or a run of them; of two experts high_noise=FILE, low_noise=FILE or both=FILE"


def _flag(default: Any, text: str, names: tuple[str, ...] = (), group: str = "", **argparse: Any) -> Any:
    """Define a flag with its help; MISSING: it is required. `argparse` has a metavar, an action and so on."""
    made = {"default_factory": default.copy} if isinstance(default, list | dict) else {"default": default}
    return field(**made, metadata={"help": text, "names": names, "group": group, "argparse": argparse})


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Flags of `prepare` and `train`."""

    recipe: str | None = _flag(None, "a whole run in one JSON; its keys are the flags below", metavar="FILE")
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of RunConfig by name, as given: they are checked together with the recipe's values."""


_machine = partial(_flag, group="machine")


@dataclass(frozen=True, kw_only=True)
class PlanFlags(RunFlags):
    """Flags of `plan`: those of `train`, the machine, and what to print and write."""

    gpus: Index | None = _machine(
        None, "GPUs of a node, a rank each; default those here; 0: ranks on CPUs, one or a launcher's"
    )
    gpu_memory: Gib | None = _machine(None, "memory of each GPU; default what is free here", metavar="GIB")
    gpu_name: str | None = _machine(
        None, "kind of GPU, such as H100, for its usual rates; default by its memory", metavar="NAME"
    )
    host_memory: Gib | None = _machine(None, "CPU memory of a node; default what is free here", metavar="GIB")
    disk: Gib | None = _machine(None, "free disk of a node; default what is free here", metavar="GIB")
    nodes: Count | None = _machine(None, "number of nodes; default 1, or a launcher's")
    price_per_gpu_hour: Price | None = _machine(None, "print the cost of the run too")
    recommend: Path | None = _machine(
        None, "write the recipe with the simplest JSONs that fit", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    """Flags of `export`; None where a format has a default of its own."""

    checkpoint: Path = _flag(
        MISSING, "an output folder (newest) or checkpoints/step_...; or a whole model, with --teacher_path"
    )
    output: Path = _flag(MISSING, "the folder to write, or NAME.safetensors")
    format: Literal[tuple(names_in("wandistiller.export.formats"))] = _flag(
        "diffusers",
        "diffusers: a pipeline folder; original: original-Wan weights as ComfyUI reads them, a file an "
        "expert; lora: as --adapter",
    )
    ema: bool | None = _flag(
        None,
        "the averaged weights or the last; default the averaged where the run has `ema`",
        action=BooleanOptionalAction,
    )
    adapter: bool = _flag(
        False, "a LoRA: the run's own, or the difference to its teacher; with --format original for ComfyUI"
    )
    energy: float | None = _flag(None, "share of its square to keep; default 0.99")
    rank: int | None = _flag(None, "the largest rank to keep it with; default 128, or the run's own")
    targets: list[str] | None = _flag(
        None, "the parts that it changes, as `lora.targets`; default all linear layers", metavar="PART"
    )
    teacher_path: str | None = _flag(
        None, "with --adapter: the pipeline that a whole model at --checkpoint, of any origin, differs from"
    )
    dtype: Literal["bfloat16", "float16", "float32", "float8_e4m3fn"] = _flag(
        "bfloat16", "float8_e4m3fn: with --format original, the blocks' matrices with a scale each"
    )
    max_shard_size: str | None = _flag(None, "largest file of a pipeline; default 10GB", metavar="SIZE")
    push_to_hub: str | None = _flag(None, "upload it too; needs HF_TOKEN", metavar="ORG/NAME")
    private: bool = _flag(False, "make a new repository private")


@dataclass(frozen=True, kw_only=True)
class DrawingFlags:
    """Flags of `sample` and `evaluate`; None is what the pipeline or the student was made for."""

    lora: list[str] | None = _flag(None, LORA, metavar="FILE")
    strength: float = _flag(1.0, "factor of these LoRA files")
    height: Count | None = _flag(None, "pixels; default what it was made for")
    width: Count | None = _flag(None, "pixels; default what it was made for")
    num_frames: Count | None = _flag(None, "4k+1, 1 is an image; default what a student was made for")
    seed: Seed = _flag(0, "of the first prompt; the next gets seed + 1")
    teacher_deepspeed_config: str = _flag("auto", PLACED, metavar="FILE")
    context_parallel: Count = _flag(1, SHARED)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _flag("auto", AUTO_DTYPE)


@dataclass(frozen=True, kw_only=True)
class SampleFlags(DrawingFlags):
    """Flags of `sample`."""

    model: str | None = _flag(
        None, "a diffusers Wan pipeline, a run, a hub id, or `tiny`; default what --lora is for"
    )
    prompts: list[str] = _flag(MISSING, "texts, or one file of prompts")
    image: list[str] | None = _flag(
        None, "first frame of clips, for image-to-video: one of each prompt, or of all", metavar="FILE"
    )
    last_image: list[str] | None = _flag(
        None, "the same of their last frame, where that is given too", metavar="FILE"
    )
    output: Path = _flag(MISSING, "folder for the pictures")
    layout: Literal["numbered", "vbench"] = _flag(
        "numbered", "vbench: five of each prompt as OUTPUT/vbench/PROMPT-0.mp4 and so on, for VBench"
    )
    steps: Steps | None = _flag(None, "sampling steps; default those that a student is trained for, else 40")
    guidance_scale: Scale = _flag(1.0, "1 for a student that has it folded in")
    guidance_scale_2: Scale | None = _flag(None, "of the low-noise expert; default --guidance_scale")
    negative_prompt: str | None = _flag(None, "of guidance above 1; default none")


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags(DrawingFlags):
    """Flags of `evaluate`."""

    student: str | None = _flag(
        None,
        "an exported student, the folder of a run, or any Wan pipeline; default what --lora is for",
        names=("--student_path", "--student"),
        dest="student",
    )
    teacher_path: str | None = _flag(None, "default: the one it was distilled from")
    prompts: list[str] = _flag(["tiny:held_out"], "texts, or one file of prompts")
    num_prompts: Count = _flag(64, "spread evenly over those given")
    steps: list[Steps] | None = _flag(
        None,
        "sampling steps of both; of several numbers (1 2 4 40) also a table and a picture by steps; "
        "default what each was made with",
    )
    guidance_scale: Scale | None = _flag(None, "of the teacher; default as folded into the student")
    guidance_scale_2: Scale | None = _flag(None, "of the teacher; default as folded into the student")
    negative_prompt: str | None = _flag(None, "the teacher's; default as folded into the student")
    clip_path: Path | None = _flag(None, "a CLIP folder of transformers: scores with it too")
    pickscore_path: Path | None = _flag(None, "the folder of PickScore_v1: scores with it too")
    dino_path: Path | None = _flag(None, "a DINOv2 folder of transformers: variety and a distance by it")
    quick: bool = _flag(False, "draw each prompt once: no floor, no variety")
    batch: Count = _flag(8, "prompts drawn at once, or fewer where memory is short")
    output: Path | None = _flag(None, "folder; default: next to the student")


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Flags of `report`."""

    output: Path = _flag(MISSING, "the folder of a run, ended or not", names=("output",), metavar="OUTPUT")


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """Flags of `doctor`: none."""


def of(command: str) -> type:
    """Return the type of a command's flags, which is named after it."""
    return globals().get(f"{command.title()}Flags", RunFlags)
