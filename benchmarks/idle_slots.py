"""What replicas did with their slots, from when jobs came, began and left: how long slots were idle while work waited,
and how evenly the replicas were filled. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A job's way: submitted, begun by a replica's engine, gone from it; seconds of one clock."""

    came_s: float
    began_s: float
    left_s: float
    replica: str


def idle_gaps_s(spans: Sequence[Span], slots: Mapping[str, int]) -> list[float]:
    """How long, each time, a replica had a free slot while a job waited: from when both began to be true until one no
    longer was. Slots that were taken again at once count as 0, so that most of many turns is known, too."""
    busy: Counter[str] = Counter()
    waiting = 0
    since_s: dict[str, float] = {}
    gaps: list[float] = []
    for at_s, _, change, replica in sorted(_changes(spans)):
        if change == "came":
            waiting += 1
        elif change == "began":
            waiting -= 1
            busy[replica] += 1
            if replica not in since_s:
                gaps.append(0.0)
        else:
            busy[replica] -= 1
        for name, most in slots.items():
            is_idle = waiting > 0 and busy[name] < most
            if is_idle:
                since_s.setdefault(name, at_s)
            elif name in since_s:
                gaps.append(at_s - since_s.pop(name))
    return gaps


def excess(spans: Sequence[Span], slots: Mapping[str, int]) -> list[float]:
    """Of each job, how much fuller the replica that began it was, before, than the emptiest one: 0 is ideal, 1 is a
    full one beside an empty one."""
    busy: Counter[str] = Counter()
    found: list[float] = []
    for _, _, change, replica in sorted(_changes(spans)):
        if change == "began":
            found.append(busy[replica] / slots[replica] - min(busy[name] / most for name, most in slots.items()))
            busy[replica] += 1
        elif change == "left":
            busy[replica] -= 1
    return found


def _changes(spans: Sequence[Span]) -> Iterator[tuple[float, int, str, str]]:
    """What happened when; at the same moment a slot is free before it is taken."""
    for span in spans:
        yield span.came_s, 0, "came", span.replica
        yield span.began_s, 2, "began", span.replica
        yield span.left_s, 1, "left", span.replica
