"""The origin of a student and how it samples, as its checkpoints and exports store it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from wandistiller.flow import FLOW_MAP
from wandistiller.network.folder import Folder
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import TINY, read_json
from wandistiller.utils.validation import Count, NotNegative, Positive, types_of, value_problems
from wandistiller.wan.transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a run for its export, `facts` in every checkpoint; defaults are for files without the key."""

    teacher_path: str = ""
    teacher_revision: str | None = None
    transformer: dict[str, Any] = field(default_factory=dict)
    """The student's config.json."""
    init: str | None = None
    """`teacher`, a pipeline's folder, or the name of the run that it starts from."""
    keep_layers: str | list[int] | None = None
    shift: NotNegative | None = None
    experts: list[str] = field(default_factory=list)
    """Folder names of the student's networks."""
    boundary: float | None = None
    """Noise level at which the experts change."""
    height: Count | None = None
    width: Count | None = None
    num_frames: Count | None = None
    steps: Count | None = None
    few_steps: list[float] | None = None
    """The noise levels that a student of few steps is trained for."""
    sampler: str | None = None
    """That of a student of few steps; None in files of versions that had one."""
    teacher_steps: Count | None = None
    guidance_scale: NotNegative | None = None
    guidance_scale_2: NotNegative | None = None
    negative_prompt: str | None = None
    objective: str | None = None
    max_steps: Count | None = None
    """The steps of the whole run; of an export those up to its checkpoint."""
    before: list[str] | None = None
    """Objective and steps of the runs before this one; it and what follows are stored only if set."""
    bases: list[str] | None = None
    """Folder names of the teacher's networks whose weights the student's have beside their adapters."""
    trained_expert: str | None = None
    """The one of two experts that the run trained, as recipes name it."""
    stands_for: list[int] | None = None
    """The teacher's block with whose output that of each student block is compared, as of its first run."""
    teacher_lora: list[dict[str, Any]] | None = None
    """LoRA files added to the teacher's networks, as the recipe key."""
    teacher_lora_digests: list[str] | None = None
    """Hashes of the contents of these files."""
    teacher_identity: str | None = None
    """Commit or fingerprint of the networks in the teacher's folder."""
    teacher_hub_id: str | None = None
    """The published pipeline that a teacher of single files is of."""
    teacher_weights: str | None = None
    """Format of the teacher's quantised weights."""
    image_to_video: bool | None = None
    """True if its clips begin with a given image; then the settings by which its media were read."""
    video_fps: Positive | None = None
    fit: Literal["crop", "letterbox"] | None = None
    background: str | None = None
    ema: float | None = None
    ema_start: int | None = None
    learning_rates: dict[str, float] | None = None
    frozen: list[str] | None = None
    lora: dict[str, Any] | None = None
    averaged: bool | None = None
    """True if an export has the average of the weights."""

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Facts":
        """Take the facts of a checkpoint; keys of other versions are left out."""
        return cls(**{f.name: stored[f.name] for f in fields(cls) if f.name in stored})

    @classmethod
    def read(cls, file: Path) -> "Facts":
        """Read the facts of an exported student; of another pipeline, which has no such file, the defaults.

        Raises:
            ConfigError: it has values of other types.
        """
        stored = read_json(file) if file.is_file() else {}
        if problems := value_problems(file, stored, types_of(cls)):
            raise ConfigError(*problems)
        return cls.of(stored)

    def as_json(self) -> dict[str, Any]:
        names = [f.name for f in fields(self)]
        always = names[: names.index("before")]
        return {key: value for key, value in vars(self).items() if key in always or value is not None}

    @property
    def config(self) -> TransformerConfig:
        config = TransformerConfig.of(self.transformer)
        return replace(config, expands_time=bool(self.image_to_video) and not config.joined_channels)

    @property
    def is_flow_map(self) -> bool:
        """True of a student for any number of steps: its network is told where its velocity leads."""
        return self.sampler == FLOW_MAP

    @property
    def teacher_is_away(self) -> bool:
        """Return whether the teacher is a folder that is not here; one of the hub has its commit."""
        is_elsewhere = self.teacher_revision or self.teacher_path in TINY
        return not (is_elsewhere or Path(self.teacher_path).exists())

    def changed_teacher(self, teacher: Folder) -> list[str]:
        """Say that the networks in the teacher's folder are not those that the student was trained from."""
        same = self.teacher_identity in (None, teacher.weights_identity)
        if same or Path(teacher.name).name != Path(self.teacher_path).name:
            return []
        return [f"warning   {teacher.name}: its weights have changed since the student was trained from them"]

    @property
    def lora_base(self) -> str:
        """The pipeline that a LoRA of the student is added to; empty: none, as it began with new networks."""
        if self.bases or not self.lora:
            return self.teacher_path
        if self.init in (None, "teacher", "random"):
            return ""
        return f"{self.init}/student" if self.before else self.init  # the export of the run before

    @property
    def has_boundary(self) -> bool:
        """True if two experts share the noise levels."""
        return len(self.experts) == 2 and self.boundary is not None
