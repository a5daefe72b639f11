"""The LoRA file or full model that the adapters of each of a student's networks begin with."""

from pathlib import Path
from typing import Any

from wandistiller.experts import Expert
from wandistiller.student.lora import Lora
from wandistiller.utils.errors import ConfigError
from wandistiller.wan.lora_experts import expert_of, require_one_side, unclear_problems

OF_AN_EXPERT = '{{"{expert}": "{file}"}}'


def start_places(job: Any) -> dict[Expert, Path]:
    """Return the place for each network of a `config.job.Job` whose adapters `lora.start` begins.

    A file of an expert is for the network that is made of that one of the teacher's.

    Raises:
        ConfigError: a file is for an expert that no network is made of, or is for one and would begin both.
    """
    starts = Lora(**job.run.lora or {}).starts
    bases = job.bases or {expert: expert for expert in job.student_experts}
    if others := [one for one in starts if one[1] and one[1] not in bases.values()]:
        raise ConfigError(*(_of_none(place, said, [*bases.values()]) for place, said in others))
    if len(job.folder.configs if job.bases else bases) == 1:
        require_one_side("recipe: `lora.start`", [place for place, said in starts if not said])
        return {network: place for place, _ in starts for network in bases}
    experts = [(place, said or expert_of(place)) for place, said in starts]
    unclear = [place for place, expert in experts if not expert and place.is_file()]
    if problems := unclear_problems("recipe: `lora.start`", unclear, OF_AN_EXPERT):
        raise ConfigError(*problems)
    found = {network: place for network, base in bases.items() for place, of in experts if of in (None, base)}
    if lacking := [base for network, base in bases.items() if network not in found]:
        for place, of in [one for one, (_, said) in zip(experts, starts, strict=True) if not said]:
            raise ConfigError(_of_one(place, of, lacking, alone=len(bases) == 1))
    return found


def _of_none(place: Path, said: Expert, bases: list[Expert]) -> str:
    key, own = said.key, " and ".join(f'"{base.key}"' for base in bases)
    return (
        f"recipe: `lora.start.{key}` is {place}, and no network of the student is made of the "
        f"{said.in_words}. Leave it out, or write {own} in place of it."
    )


def _of_one(place: Path, of: Expert, lacking: list[Expert], *, alone: bool) -> str:
    """Say that a file for one expert would begin the adapters of another too, or of another alone."""
    others = " and ".join(f"the {base.in_words}" for base in lacking)
    whole = f"the student is made of {others} alone" if alone else f"the student has {others} too"
    key = (lacking[0] if alone else of).key
    remedy = f'Write {{"{key}": "{place}"}}' + (", if it is meant for that" if alone else "")
    more = "" if alone else f', with "{lacking[0].key}" beside it where that has a file'
    return f"recipe: `lora.start` is {place}, which is for the {of.in_words}, and {whole}. {remedy}{more}."
