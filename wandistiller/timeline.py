"""Memory over time by owner: of what was counted between phases, and of what an accelerator's allocator wrote down."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from wandistiller.census import ACTIVATIONS, BUFFERS, OPTIMIZER, OTHERS, OWNERS, Storage

CALL, BACKWARD = "a call of the teacher", "the backward pass"
"""Owners that only an allocator's own record can tell from others."""
PASSED_OVER = ("/deepspeed/runtime/engine.py", "/deepspeed/runtime/zero/linear.py", "/deepspeed/utils/nvtx.py",
               "/deepspeed/runtime/activation_checkpointing/")  # fmt: skip
"""DeepSpeed's (0.19.8) that only call a network."""
FILES = {
    "/wandistiller/teacher.py": CALL, "/wandistiller/student.py": ACTIVATIONS, "/wandistiller/blocks.py": ACTIVATIONS,
    "/wandistiller/data.py": OTHERS, "/wandistiller/noise.py": OTHERS, "/wandistiller/batch.py": OTHERS,
    "/wandistiller/objectives.py": OTHERS, "/torch/optim/": OPTIMIZER, "/deepspeed/ops/": OPTIMIZER, "/deepspeed/": BUFFERS,
}  # fmt: skip
PHASES = {"teacher's forward": CALL, "student's forward": ACTIVATIONS, "backward": BACKWARD, "optimizer's step": OPTIMIZER}
"""Words of what the process was doing -> whose an allocation is that no known file made: autograd's threads have no frames."""
MOST_POINTS = 2000
"""Of an allocator's record."""


class Span(NamedTuple):
    """A time in which the process did one thing, after a count of what was there."""

    step: int
    what: str
    owners: dict[str, dict[str, int]]
    """Bytes by owner in each kind of memory, as it begins."""
    begin: float
    """Seconds of the monotonic clock."""
    end: float


class Clock:
    """Seconds of the spans alone: it stands still between them, while tensors are counted."""

    def __init__(self, spans: list[Span]):
        self._spans, self._begins = spans, [s.begin for s in spans]
        self._before = [0.0, *accumulate(s.end - s.begin for s in spans)]

    def span(self, moment: float) -> Span | None:
        """The one at a second of the monotonic clock."""
        i = bisect_right(self._begins, moment) - 1
        return self._spans[i] if i >= 0 and moment <= self._spans[i].end else None

    def at(self, moment: float) -> float:
        """The seconds before a second of the monotonic clock."""
        i = bisect_right(self._begins, moment) - 1
        return 0.0 if i < 0 else self._before[i] + min(moment, self._spans[i].end) - self._begins[i]


def told(spans: list[Span], samples: list[tuple[float, int, int]]) -> dict[str, Any]:
    """What was recorded, as JSON: seconds of `Clock`, bytes.

    Args:
        samples: seconds of the monotonic clock, bytes resident in CPU memory, bytes that torch holds of the accelerator.
    """
    clock = Clock(spans)
    places = {"cpu": 1} | ({"cuda": 2} if "cuda" in spans[0].owners else {})
    within = [s for s in samples if clock.span(s[0])]
    return {
        "steps": sorted({s.step for s in spans}),
        "phases": [{"step": s.step, "what": s.what, "begin": clock.at(s.begin), "end": clock.at(s.end)}
                   for s in spans if s.end > s.begin],
        **{place: {"owners": [{"second": clock.at(s.begin), **s.owners[place]} for s in spans],
                   "resident": [{"second": clock.at(s[0]), "bytes": s[column]} for s in within]}
           for place, column in places.items()},
    }  # fmt: skip


def owner_of(frames: list[dict[str, Any]], doing: str) -> str:
    """The owner of an allocation: its innermost frame in a known file decides, or else what the process was doing.

    Args:
        frames: as in torch.cuda.memory._snapshot, the innermost first.
    """
    for name in (frame["filename"] for frame in frames):
        if not any(part in name for part in PASSED_OVER):
            if found := next((owner for part, owner in FILES.items() if part in name), None):
                return found
    return next((owner for words, owner in PHASES.items() if words in doing), OTHERS)


def allocated(
    events: Iterable[dict[str, Any]], before: dict[int, Storage], total: int, doing: Callable[[float], str]
) -> list[tuple[float, dict[str, int]]]:
    """Bytes of each owner after each event: (seconds of the wall clock, bytes).

    Args:
        events: one device's of `device_traces` in a snapshot.
        before: the storages on the accelerator when the record began, by address.
        total: what the allocator held then, of which others have the rest.
        doing: what the process was doing at a second of the wall clock.
    """
    live = {address: (s.owner, s.nbytes) for address, s in before.items()}
    held = Counter({OTHERS: total - sum(nbytes for _, nbytes in live.values())})
    for owner, nbytes in live.values():
        held[owner] += nbytes
    found = []
    for event in events:
        second = event["time_us"] / 1e6
        if event["action"] == "alloc":
            owner = owner_of(event["frames"], doing(second))
            live[event["addr"]] = owner, event["size"]
            held[owner] += event["size"]
        elif event["action"] == "free_completed":
            owner, nbytes = live.pop(event["addr"], (OTHERS, event["size"]))
            held[owner] -= nbytes
        else:
            continue
        found.append((second, {owner: max(0, held[owner]) for owner in (*OWNERS, CALL, BACKWARD)}))
    return found


def thinned(points: list[tuple[float, dict[str, int]]]) -> list[tuple[float, dict[str, int]]]:
    """At most MOST_POINTS of them: of neighbours that in which most was held."""
    each = -(-len(points) // MOST_POINTS)
    return [max(points[i : i + each], key=lambda p: sum(p[1].values())) for i in range(0, len(points), each or 1)]
