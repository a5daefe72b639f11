"""The objectives by name, and the one that a recipe asks for."""

from typing import Any

from wandistiller.objectives.base import TO_DATA, Term
from wandistiller.objectives.objective import Objective
from wandistiller.utils.errors import RECIPE, ConfigError, Problem, nearest, problem
from wandistiller.utils.registry import classes_in
from wandistiller.utils.validation import check, types_of

OBJECTIVES = classes_in("wandistiller.objectives", Term)
"""Every term, by the name of its file."""


def read_objective(given: str | dict[str, Any] | list[str | dict[str, Any]]) -> Objective:
    """Read a recipe's "objective": a name, {"name": ..., settings}, or a list of these to be summed.

    Raises:
        ConfigError: with all problems at once.
    """
    several = isinstance(given, list)
    terms: list[Term] = []
    problems = [] if given != [] else [problem("recipe", "objective", given, _choice(given))]
    for i, one in enumerate(given if several else [given]):
        where = f"objective[{i}]" if several else "objective"
        settings = {"name": one} if isinstance(one, str) else dict(one)
        name = settings.pop("name", "velocity")
        if not isinstance(name, str) or name not in OBJECTIVES:
            problems.append(problem("recipe", where, name, _choice(name)))
            continue
        wrong, good = check("recipe", settings, types_of(OBJECTIVES[name]), f"{where}.")
        terms.append(OBJECTIVES[name](**good))
        problems += wrong or terms[-1].problems(where)
    names = [term.name for term in terms]
    texts = [f"names {name} twice. Keep one." for name in OBJECTIVES if names.count(name) > 1]
    steps = {term.name: n for term in terms if (n := term.aim.steps)}
    if len(terms) > 1 and (one := next((term for term in terms if term.aim.expert), None)):
        remedy = "Write it alone, or without `expert`."
        texts.append(f"sums {one.name} of one `expert` with other terms. {remedy}")
    destinations = {term.name: words for term in terms if (words := term.aim.destination)}
    if len(set(destinations.values())) > 1:
        listed = ", and ".join(f"{name}, which leads {words}" for name, words in destinations.items())
        remedy = (
            "The student would learn a mean of both. Write them as `stages`; dmd2 and consistency go "
            'together with "sampler" "renoise" of dmd2, and neither `edges` nor `steps` of consistency.'
        )
        texts.append(f"sums {listed}. {remedy}")
    elif TO_DATA in destinations.values() and not steps:
        text = f"leads {TO_DATA}, and in how many steps the student then samples is not said"
        texts.append(f"{text}. Write `edges` or `steps` of consistency, such as 4.")
    if len(set(steps.values())) > 1:
        listed = " and ".join(f"{name} for {n}" for name, n in steps.items())
        texts.append(f"trains {listed} sampling steps. Write one number in both.")
    problems += [Problem(f"`objective` {text}", RECIPE, "objective") for text in texts]
    if problems:
        raise ConfigError(*problems)
    return Objective(tuple(terms))


def _choice(name: object) -> str:
    return f"Write one of: {', '.join(OBJECTIVES)}.{nearest(name, OBJECTIVES)}"
