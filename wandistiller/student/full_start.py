"""Adapters that begin as a full model: the largest directions of its difference to the teacher's weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.data.tensor_cache import TensorCache
from wandistiller.distributed import collectives
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.round_robin import batched, own_batches, until_stopped
from wandistiller.experts import Expert
from wandistiller.student.lora import Lora, linear_layers, set_change
from wandistiller.student.start_places import start_places
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import digest, fingerprint
from wandistiller.utils.low_rank import in_halves, largest_directions
from wandistiller.utils.parameter_patterns import any_names
from wandistiller.wan.full_models import FullModel, content, is_full_model, place_of
from wandistiller.wan.transformer import meta_transformer, shapes

WEIGHTS_PER_FILE = 16
CHUNK = 2**20
KEPT = (
    "start     %s: the adapters begin with %.1f %% of the squared difference of their layers to the "
    "teacher's; of all of it %.1f %% is in other linear layers, and %.1f %% in biases, norms and tables"
)


def full_starts(job: Any) -> dict[Expert, Path]:
    """Return the place of the full model that each network's adapters begin with; none of LoRA files."""
    full = {expert: path for expert, path in start_places(job).items() if is_full_model(path)}
    return {expert: place_of(path, job.bases.get(expert, expert)) for expert, path in full.items()}


def full_start_problems(job: Any) -> list[str]:
    """List the problem of what adapters begin with: of full models from their headers."""
    try:
        starts = full_starts(job)
    except ConfigError as error:
        return error.problems
    for place in starts.values():
        named, problem = f"recipe: `lora.start` is {place}, ", ""
        if not job.bases:
            problem = (
                "a full model, whose difference to the teacher is taken, but here the student is another "
                "network than the teacher. Give a LoRA file, or leave `student_config` out"
            )
        elif len(set(starts.values())) < len(starts):
            problem = (
                "one network, and the student has two. Give a pipeline's folder with transformer and "
                'transformer_2, or {"high_noise": PLACE, "low_noise": PLACE}'
            )
        else:
            try:
                problem = FullModel(place, job.student_transformer).problem()
            except ConfigError as error:
                return error.problems
        if problem:
            return [f"{named}{problem}."]
    return []


def starts_to_prepare(job: Any) -> dict[Expert, Path]:
    """Return `full_starts`; none if the adapters go on from a checkpoint, or from another run's."""
    return {} if job.resume_from or job.start else full_starts(job)


def prepare_full_starts(job: Any) -> None:
    """Complete the cache with what adapters begin with, and log the share that they have. Collective."""
    for expert, place in starts_to_prepare(job).items():
        start = FullStart(job, expert, place)
        start.fill()
        start.log_share()


class FullStart:
    """The start of one network's adapters, in the cache: one weight after the other, each by one rank."""

    def __init__(self, job: Any, expert: Expert, place: Path):
        """Read the headers of the full model and of the teacher."""
        config, lora = job.student_transformer, Lora(**job.run.lora)
        base = job.folder.path / job.bases[expert].value
        self.model, self._base = FullModel(place, config), job.folder.reader(job.bases[expert])
        self._shapes = shapes(config)
        self._linear = linear_layers(meta_transformer(config))
        self.ranks = {n: lora.rank_of(n) for n in self._linear if any_names(lora.targets, n)}
        """By layer."""
        made_of = content(place), fingerprint([base]), *job.folder.added_identities
        self._cache = TensorCache(job.cache / "adapters" / digest(*made_of))

    def _key(self, name: str) -> str:
        return digest(name, self.ranks.get(name.removesuffix(".weight"), 0))

    def fill(self) -> None:
        """Compute what is missing in the cache, divided among the ranks. Collective.

        Raises:
            ConfigError: on all ranks; a weight is damaged on any.
        """
        by_key = {self._key(name): name for name in self._shapes}
        missing = self._cache.missing_keys(by_key)
        files = own_batches(batched(missing, WEIGHTS_PER_FILE))
        if files:
            progress = Progress(f"difference of {self.model.place}", sum(map(len, files)), "weight")
            decomposed = progress.counting(self._decomposed)
        with collectives.raise_on_all_ranks():
            for keys in until_stopped(files):
                made = {key: decomposed(by_key[key]) for key in until_stopped(keys)}
                if made:
                    self._cache.write(made, {key: by_key[key] for key in made})
        collectives.raise_if_stop_requested(
            "while the start of the adapters is computed; finished parts are kept"
        )
        self._cache.find_written(missing)

    @torch.no_grad()
    def _decomposed(self, name: str) -> dict[str, Tensor]:
        """Return the squared difference of a weight; where it has an adapter, that and what it keeps."""
        difference, base = self.model.read(name), torch.empty(self._shapes[name])
        self._base.read(name, base)
        if self._base.faults:
            raise ConfigError(*self._base.faults)
        found = {"square": _square(difference.sub_(base))}
        if rank := self.ranks.get(name.removesuffix(".weight"), 0) if name.endswith(".weight") else 0:
            u, s, v = largest_directions(difference.to(collectives.device()), rank)
            a, b = in_halves(u, s, v)
            found |= {"kept": _square(s), "a": a, "b": b}
        return found

    def log_share(self) -> None:
        """Log the shares of the squared difference that the adapters have, and that they cannot have."""
        square = {name: self._cache.read(self._key(name), "square")[0].item() for name in self._shapes}
        kept = sum(self._cache.read(self._key(f"{layer}.weight"), "kept")[0].item() for layer in self.ranks)
        whole = sum(square.values()) or 1.0
        linear = sum(square[f"{layer}.weight"] for layer in self._linear)
        inside = sum(square[f"{layer}.weight"] for layer in self.ranks)
        outside = whole - linear
        shares = kept / (inside or 1.0), (linear - inside) / whole, outside / whole
        collectives.log0(KEPT, self.model.place, *(100 * share for share in shares))

    def begin(self, model: nn.Module) -> None:
        for layer in self.ranks:
            set_change(model, layer, *self._cache.read(self._key(f"{layer}.weight"), "a", "b"))


def _square(values: Tensor) -> Tensor:
    """Return the sum of squares in float64, of which little is held at a time."""
    parts = values.flatten().split(CHUNK)
    # numbers, not tensors, which would lie between the freed parts and keep the heap from using them again
    return torch.tensor(sum(part.double().square().sum().item() for part in parts), dtype=torch.float64)
