"""The networks of a run: a table with a row for each, of the teacher, the student and those beside it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from wandistiller.batch import STUDENT
from wandistiller.config.run_config import RunConfig
from wandistiller.config.start import Start
from wandistiller.engine.ds_overrides import apply_overrides
from wandistiller.engine.ds_schema import PEAKS
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.experts import Expert
from wandistiller.network.adapters import Lora
from wandistiller.network.config import NetworkConfig
from wandistiller.network.folder import Folder
from wandistiller.network.network import Parameters, Trained, parameters_of
from wandistiller.objectives.base import Role, RunFacts
from wandistiller.objectives.objective import Objective
from wandistiller.objectives.script import TEACHER
from wandistiller.student.config import IMPORTANCE, StudentConfig, kept_layers, source_expert
from wandistiller.teacher.placements.base import Placement

SHARED, COPY = "the teacher's", "a copy of the teacher's"
CHECKPOINT, RUN, NEW = "the checkpoint's", "the earlier run's", "new"
"""Weights that a network begins with, beside its adapters: another's in memory, or of its own."""


@dataclass(frozen=True, kw_only=True)
class NetworkPlan:
    """A row: one network, with what it is made of and what of it learns."""

    role: str
    """TEACHER, STUDENT, or one of the objective's."""
    expert: Expert
    """Its name in its role."""
    config: NetworkConfig
    engine: EngineConfig
    """The JSON that it is placed by."""
    weights: str = NEW
    """What it begins with: SHARED, COPY, CHECKPOINT, RUN or NEW."""
    base: Expert | None = None
    """The teacher's network that it is, but for adapters."""
    copied: Expert | None = None
    """The teacher's network that COPY is a copy of."""
    trained: Trained | None = None
    """What of it learns, or is added to it; None: it is as its weights are."""
    learns: bool = True
    is_called: bool = True
    as_base: bool = False
    """Its adapters change nothing at first, whatever the student's begin as."""
    setting: Role | None = None
    """The objective's, of a network beside the student."""

    @property
    def parameters(self) -> Parameters:
        """Its parameters, without those that it shares with the teacher."""
        whole = self.all_parameters
        return Parameters(whole.trained) if self.weights == SHARED else whole

    @property
    def all_parameters(self) -> Parameters:
        return parameters_of(self.config, self.trained)


@dataclass(frozen=True)
class NetworkTable:
    """All networks of a run."""

    rows: tuple[NetworkPlan, ...]
    copies_because: str = ""
    """Why networks that are the teacher's but for adapters have copies of its weights, if they have."""

    @cached_property
    def by_role(self) -> dict[str, dict[Expert, NetworkPlan]]:
        by_role: dict[str, dict[Expert, NetworkPlan]] = {}
        for row in self.rows:
            by_role.setdefault(row.role, {})[row.expert] = row
        return by_role

    @property
    def teacher(self) -> dict[Expert, NetworkPlan]:
        """The teacher's networks that the run loads."""
        return self.by_role[TEACHER]

    @property
    def student(self) -> dict[Expert, NetworkPlan]:
        return self.by_role[STUDENT]

    @property
    def first(self) -> NetworkPlan:
        """A network of the student's that learns; all that learn are alike."""
        return next(row for row in self.student.values() if row.learns)

    @property
    def learning(self) -> list[Expert]:
        """The student's networks that learn."""
        return [expert for expert, row in self.student.items() if row.learns]

    @property
    def others(self) -> dict[str, NetworkPlan]:
        """A network of each role beside the student's; all of a role are alike."""
        roles = self.by_role.items()
        return {role: next(iter(rows.values())) for role, rows in roles if role not in (TEACHER, STUDENT)}

    @property
    def bases(self) -> dict[Expert, Expert]:
        """The teacher's network that each of the student's is, but for its adapters; empty if it is not."""
        return {expert: row.base for expert, row in self.student.items() if row.base}

    @property
    def share_base(self) -> bool:
        """True if the teacher, the student and networks beside it are one base with adapters for each."""
        return self.first.weights == SHARED

    def is_teacher_with_adapters(self, folder: Folder) -> bool:
        """Return whether the student is the teacher, network for network, with its adapters."""
        return self.bases == {expert: expert for expert in folder.configs}


@dataclass(frozen=True, kw_only=True)
class TableMaker:
    """The parts of a run that decide whose weights each of its networks has, and what of it learns."""

    run: RunConfig
    folder: Folder
    student: StudentConfig
    config: NetworkConfig
    """Of the student's networks."""
    engine: EngineConfig
    """Of the student."""
    teacher: Placement
    objective: Objective
    start: Start | None
    """The run whose student this one trains on."""
    resumes: bool
    """Weights come from a checkpoint."""

    def table(self) -> NetworkTable:
        bases = self._bases()
        why = _needs_copies(self.engine, self.teacher) if bases else ""
        student = {expert: self._student(expert, bases, why) for expert in self._experts}
        others = [
            self._other(name, role, student[expert])
            for name, role in self.objective.others.items()
            for expert, row in student.items()
            if row.learns
        ]
        configs, engine = self.folder.configs, self.teacher.engine
        teacher = [
            NetworkPlan(role=TEACHER, expert=expert, config=configs[expert], engine=engine, learns=False)
            for expert in self._loaded(student.values())
        ]
        return NetworkTable((*teacher, *student.values(), *others), why)

    @property
    def _experts(self) -> list[Expert]:
        return list(Expert) if self.student.experts == "two" else [Expert.HIGH_NOISE]

    def _bases(self) -> dict[Expert, Expert]:
        """Return the teacher's network that each of the student's is, but for adapters, or nothing."""
        lora, folder, start = self.run.lora, self.folder, self.start
        if lora is None or self.config.one_time != folder.config.one_time:
            return {}
        if start:
            is_same_kind = start.facts.bases and without_start(start.facts.lora) == without_start(lora)
            if not is_same_kind or start.teacher != folder.identity:
                return {}
            return dict(zip(self._experts, map(Expert, start.facts.bases), strict=True))
        return copied_experts(self.student, self.config, folder, self._experts)

    def _student(self, expert: Expert, bases: dict[Expert, Expert], why: str) -> NetworkPlan:
        """Make the row of one of the student's networks; `why` says why its base is copied, if it is."""
        own_weights = CHECKPOINT if self.resumes else RUN if self.start else NEW
        learns = self.objective.trained_expert in (None, expert)
        trained = Trained(
            lora=self.run.lora,
            frozen=self.run.frozen or (),
            seed=self.run.seed,
            compared=self._compared() if learns else (),
            teacher_width=self.folder.config.width,
        )
        return NetworkPlan(
            role=STUDENT,
            expert=expert,
            config=self.config,
            engine=self.engine,
            weights=(COPY if why else SHARED) if bases else own_weights,
            base=bases.get(expert),
            copied=bases.get(expert),
            trained=trained if learns or bases else None,
            learns=learns,
            # samples begin with the high-noise expert, and none of its own reach the other
            is_called=learns or expert is Expert.HIGH_NOISE,
        )

    def _compared(self) -> tuple[int, ...]:
        """Return the student's blocks that are compared; what they stand for may not be known yet."""
        layers = self.config.num_layers
        if self.objective.combined_problems(RunFacts(layers, self.folder.config.num_layers)):
            return ()
        return tuple(self.objective.for_student([*range(layers)]).student_blocks)

    def _other(self, name: str, role: Role, student: NetworkPlan) -> NetworkPlan:
        """Make the row of a network beside one of the student's, whose shape it has by default."""
        trained = replace(student.trained, compared=(), has_heads=role.has_heads)
        of_teacher = role.start == "teacher"
        row = replace(
            student,
            role=name,
            engine=_derived(self.engine, role),
            trained=trained,
            as_base=of_teacher,
            setting=role,
        )
        if not of_teacher or student.base:
            return row
        copied = source_expert(StudentConfig(experts=self.student.experts), self.folder, student.expert)
        return replace(
            row,
            config=self.folder.config,
            weights=CHECKPOINT if self.resumes else COPY,
            copied=copied,
            trained=Trained(seed=self.run.seed, has_heads=role.has_heads),
        )

    def _loaded(self, student: Iterable[NetworkPlan]) -> list[Expert]:
        """List the teacher's experts that the run needs: all but with an objective of one expert."""
        if not (trained := self.objective.trained_expert):
            return [*self.folder.configs]
        needed = {trained, *(row.base for row in student if row.weights == SHARED and row.is_called)}
        return [expert for expert in self.folder.configs if expert in needed]


def copied_experts(
    student: StudentConfig, config: NetworkConfig, folder: Folder, experts: Iterable[Expert]
) -> dict[Expert, Expert]:
    """Return the teacher's network that each of a new student's is a whole copy of; empty if they are not."""
    is_other = student.init != "teacher" or config.one_time != folder.config.one_time
    if is_other or student.keep_layers == IMPORTANCE:
        return {}
    copies_all = kept_layers(student, config, folder) == list(range(config.num_layers))
    return {e: source_expert(student, folder, e) for e in experts if copies_all}


def without_start(lora: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of adapters, with the defaults, without what they began with."""
    if lora is None:
        return None
    settings = Lora(**lora)
    alpha = settings.alpha or (None if settings.ranks else settings.rank)
    return asdict(replace(settings, start=None, alpha=alpha, ranks=settings.ranks or None))


def _needs_copies(engine: EngineConfig, teacher: Placement) -> str:
    """Say why networks that are the teacher's but for adapters cannot have its weights; empty if they can."""
    if not teacher.can_be_shared():
        return f"the teacher is {teacher.describe()}"
    if engine.dtype != teacher.engine.dtype:
        return f"its JSON has {teacher.engine.precision}, the student's {engine.precision}"
    return ""


def _derived(engine: EngineConfig, role: Role) -> EngineConfig:
    """Return the student's JSON with the role's learning rate and, in a schedule, number of updates.

    The schedule has the student's shape: its lowest rate is the same share of its highest, and its parts end
    at the same steps of the run, but for `warmup_num_steps`, which count the role's own updates.
    """
    rates, engine = engine.section("scheduler.params"), apply_overrides(engine, lr=role.lr)
    schedule = engine.section("scheduler.params")
    highest = rates.get(PEAKS.get(engine.schedule))
    if role.lr is not None and highest and "warmup_min_lr" in rates:
        schedule["warmup_min_lr"] = rates["warmup_min_lr"] * role.lr / highest
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = schedule["total_num_steps"] * role.updates
    return engine
