"""What a calibration measures, decided before anything is: lengths, batches, and which points are held out. Pure.

A *visit* begins with an empty loop: one prompt comes alone (a cold prefill), then more of the same length join it, and
the decode step is timed at each batch. Who joins is prefilled while the others decode, which is the mixed run. A
*round* makes every visit once; rounds are repeated, so that a disturbance of the machine hits no point alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pool.errors import InvalidRequest

#: Lengths of prompts, evenly in their logarithm, from the shortest to the longest.
LENGTHS = 9
SHORTEST_TOKENS = 32
#: Fewer lengths than this make no model of three coefficients that could be checked.
FEWEST_LENGTHS = 5
#: Steps timed at each batch, and those before them that are not.
TIMED_STEPS, UNTIMED_STEPS = 5, 1
#: Parts of the time that a single prompt, and all visits that decode, may take in a round.
PROMPT_SHARE, DECODING_SHARE = 1 / 15, 1 / 8

#: A session's KV is counted in whole pages of so many positions, more than any engine's.
PAGE_POSITIONS = 64

#: A length of prompts, and a batch of them.
Cell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Room:
    """What there is: `longest_tokens`: of a prompt and its output; `kv_positions`: of all sessions; `sessions`: at
    once; `grid`: tokens that prompts are cut at; `chunk_tokens`: prefilled in one step."""

    longest_tokens: int
    kv_positions: int
    sessions: int
    grid: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Visit:
    """Prompts of one length. `batches`: ascending, at which the decode step is timed; none: the prefill alone.
    `mixed`: those after which a prefill that joins is timed."""

    prompt_tokens: int
    batches: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """`held_prefill`, `held_decode`, `held_mixed`: what no fit sees."""

    visits: tuple[Visit, ...]
    held_prefill: frozenset[int]
    held_decode: frozenset[Cell]
    held_mixed: frozenset[Cell]


def output_tokens(prompt_tokens: int, sessions: int, chunk_tokens: int) -> int:
    """Tokens that the first session of a visit decodes at most: the timed steps of every batch, and a step for each
    piece of the prompts that join."""
    pieces = -(-prompt_tokens // chunk_tokens) + 2
    return sessions * (TIMED_STEPS + UNTIMED_STEPS + pieces) + 1


def longest_prompt(room: Room) -> int:
    """The longest prompt that leaves room for its output, on the grid. Raises InvalidRequest where that is too short to
    tell anything."""
    fits = min(room.longest_tokens, room.kv_positions)
    longest = (fits - output_tokens(fits, room.sessions, room.chunk_tokens)) // room.grid * room.grid
    if len(ladder(longest, room.grid)) < FEWEST_LENGTHS:
        raise InvalidRequest(
            f"The model holds {fits} positions, which is too few to calibrate {room.sessions} sessions with.",
            param="kv_budget_bytes",
        )
    return longest


def ladder(longest: int, grid: int) -> list[int]:
    """Lengths from the shortest to `longest`, ascending, on the grid."""
    if longest < SHORTEST_TOKENS:
        return []
    ratio = longest / SHORTEST_TOKENS
    exact = (SHORTEST_TOKENS * ratio ** (step / (LENGTHS - 1)) for step in range(LENGTHS))
    return sorted({min(max(round(each / grid), 1) * grid, longest) for each in exact})


def batches_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most` itself."""
    powers = [1]
    while powers[-1] * 2 < most:
        powers.append(powers[-1] * 2)
    return (*powers, most) if most > 1 else (1,)


def plan(room: Room, *, longest: int, seconds_per_token: float, seconds: float) -> Plan:
    """The visits of a round for prompts of up to `longest` tokens, in a calibration of `seconds` in all.
    `seconds_per_token`: of prefill, about.

    Long prompts are decoded in smaller batches, as the KV and the time allow; so batch and context vary each by itself.
    """
    lengths = ladder(longest, room.grid)
    decoded = lengths[::-2][::-1]
    share_s = seconds * DECODING_SHARE / len(decoded)
    visits = []
    for length in lengths:
        if length not in decoded:
            visits.append(Visit(length))
            continue
        held = length + output_tokens(length, room.sessions, room.chunk_tokens)
        held = -(-held // PAGE_POSITIONS) * PAGE_POSITIONS
        in_time = int(share_s / (length * seconds_per_token))
        # Two at least, so that a prefill beside decoding is seen at every length.
        most = max(1, min(room.sessions, room.kv_positions // held, max(2, in_time)))
        batches = batches_up_to(most)
        # Short prompts cost little whatever is beside them, and would drown what the long ones say.
        is_long = length >= decoded[len(decoded) // 2]
        visits.append(Visit(length, batches, batches[:-1] if is_long else ()))
    mixed = [(visit.prompt_tokens, batch) for visit in visits for batch in visit.mixed]
    return Plan(
        tuple(visits),
        # Never the ends: a model is asked for what lies between.
        frozenset(lengths[2:-1:3]),
        _held_cells([visit for visit in visits if visit.batches]),
        frozenset(mixed[1::3]),
    )


def _held_cells(visits: Sequence[Visit]) -> frozenset[Cell]:
    """Every third cell, going diagonally through lengths and batches, so that every batch and every length is seen by
    the fit too; neither the first nor the last."""
    cells = [
        ((visit.prompt_tokens, batch), (row + column) % 3 == 2)
        for row, visit in enumerate(visits)
        for column, batch in enumerate(visit.batches)
    ]
    return frozenset(cell for cell, held in cells[1:-1] if held)
