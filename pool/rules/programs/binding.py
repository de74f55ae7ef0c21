"""On which rank a Program begins: chosen once a generation, by one of five strategies. Ties go to the smallest id.

The consistent-hash ring is a sorted list of points, the same on every node and whatever the order of the ranks it is
made from. A store can keep it in a sorted set: a point fits a double exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from pool.errors import ConfigurationError

#: Position and rank of one virtual node.
Point = tuple[int, str]
Ring = list[Point]

#: Bytes of a position: 48 bits are exact in a double (a sorted set's score, a Lua number).
POSITION_BYTES = 6


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rank that is up. `programs`: active ones, and those that wait there; `private_tokens`: of these, in sum;
    `kv_pressure`: part of its KV in use, 0 to 1; `admissible`: whether the Program could become active there at once;
    `matched_share`: part of its prompt that the rank has cached, 0 to 1."""

    rank: str
    programs: int = 0
    private_tokens: int = 0
    capacity_tokens: int | None = None
    kv_pressure: float = 0.0
    admissible: bool = True
    matched_share: float = 0.0


def choose(strategy: str, candidates: Collection[Candidate], *, key: str, turn: int = 0, ring: Ring) -> str | None:
    """The rank where a Program begins; None where none is up: its request then waits until one is.

    `key`: what consistent hashing goes by; `turn`: a number of the model that goes up with every binding; `ring`: of
    the model, may hold ranks that are away. Raises ConfigurationError where `reasoning_token_balance` meets a rank
    without token capacity. Cost: linear in the ranks.
    """
    ranks = sorted(candidates, key=lambda candidate: candidate.rank)
    if not ranks:
        return None
    match strategy:
        case "program_round_robin":
            return ranks[turn % len(ranks)].rank
        case "least_program_count":
            return min(ranks, key=lambda candidate: candidate.programs).rank
        case "reasoning_token_balance":
            return max(ranks, key=_balance).rank
        case "cache_aware":
            admissible = [candidate for candidate in ranks if candidate.admissible]
            return max(admissible or ranks, key=cache_score).rank
        case _:
            up = {candidate.rank for candidate in ranks}
            # A ring that knows none of them is about to change; the answer is still the same on every node.
            return home(ring, key, up) or home(ring_of(up, 1), key)


def refuses_without_rank(registered: int, *, fail_fast: bool) -> bool:
    """Whether a request of a model without a healthy rank is refused (503): only where none is registered at all and
    the operator asked for it. Else it waits, durably, up to its queue timeout."""
    return fail_fast and registered == 0


def _balance(candidate: Candidate) -> int:
    """Capacity that nobody accounts for."""
    if candidate.capacity_tokens is None:
        raise ConfigurationError(
            f"binding_strategy: reasoning_token_balance needs token_capacity_per_dp_rank, but rank {candidate.rank} "
            "has none.",
            param="binding_strategy",
        )
    return candidate.capacity_tokens - candidate.private_tokens


def cache_score(candidate: Candidate) -> float:
    """How good a rank is for a prompt: more for what it has cached of it, less for KV in use."""
    return (1 + candidate.matched_share) * (1 - candidate.kv_pressure)


# -- the ring ---------------------------------------------------------------------------------------------------------


def position(text: str) -> int:
    """Where a text lies on the ring: 0 to 2^48 - 1, the same everywhere."""
    return int.from_bytes(blake2b(text.encode(), digest_size=POSITION_BYTES).digest(), "big")


def points(rank: str, virtual_nodes: int) -> list[Point]:
    """The points of one rank: all that a store adds or removes when it comes or goes."""
    return [(position(f"{rank}#{node}"), rank) for node in range(virtual_nodes)]


def ring_of(ranks: Iterable[str], virtual_nodes: int) -> Ring:
    """The ring of some ranks. Cost: n log n in ranks times virtual nodes."""
    return sorted(point for rank in set(ranks) for point in points(rank, virtual_nodes))


def home(ring: Sequence[Point], key: str, up: Collection[str] | None = None) -> str | None:
    """The rank of the first point at or after the key's position, round the ring. `up`: others are passed over, so that
    a rank which is away for a moment moves only its own. Cost: log n, and the points of those that are passed over."""
    start = bisect_left(ring, (position(key), ""))
    for step in range(len(ring)):
        rank = ring[(start + step) % len(ring)][1]
        if up is None or rank in up:
            return rank
    return None
