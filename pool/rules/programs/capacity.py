"""How many KV tokens of a rank are used, and who says so: its engine, or our own ledger. All figures are in tokens.

An engine's figure is the truth of a moment. What transitions changed since that moment is added to it; when it is too
old, or there is none, the ledger counts alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import CapacitySource, Observation, Program, Rank, State, Status
from pool.rules.programs.tokens import private_tokens

#: An observation counts for so many polling intervals: one may be lost and the next be slow.
FRESH_INTERVALS = 3


@dataclass(frozen=True, slots=True)
class Usage:
    """Used tokens of a rank, and their source. `age_ms`: of the observation there is, usable or not; None without."""

    used_tokens: int
    source: CapacitySource
    age_ms: int | None


def is_fresh(observation: Observation, settings: ProgramSettings, now_ms: int) -> bool:
    """Whether an observation may still be used. One from the future is not: the clock has stepped back, and nobody
    knows how old it is."""
    return 0 <= now_ms - observation.began_ms <= FRESH_INTERVALS * settings.metrics_interval_seconds * 1000


def engine_waiting(rank: Rank, settings: ProgramSettings, now_ms: int) -> int:
    """Requests that wait inside the rank's engine; 0 where no fresh observation says so."""
    seen = rank.observation
    return seen.waiting if seen is not None and is_fresh(seen, settings, now_ms) else 0


def usage(rank: Rank, settings: ProgramSettings, now_ms: int) -> Usage:
    """The used tokens of a rank: what its engine held when it was last looked at, and what transitions changed since;
    without a usable look, the private tokens of the active Programs there and of those whose KV is still leaving."""
    ledger = rank.ledger_tokens + rank.leaving_tokens
    seen = rank.observation
    if seen is None:
        return Usage(ledger, CapacitySource.MISSING, None)
    age_ms = now_ms - seen.began_ms
    if not is_fresh(seen, settings, now_ms):
        return Usage(ledger, CapacitySource.STALE, age_ms)
    if seen.tokens is None:
        return Usage(ledger, CapacitySource.NO_ESTIMATE, age_ms)
    return Usage(max(seen.tokens + seen.changed_tokens, 0), CapacitySource.OBSERVATION, age_ms)


# -- a remote engine --------------------------------------------------------------------------------------------------


def remote_tokens(
    *,
    kv_usage: float | None,
    capacity_tokens: int | None,
    running: int | None,
    reasoning: int,
    acting_tokens: int,
) -> int | None:
    """What a remote engine's series say of a rank's used tokens; None: nothing, as a missing series is never a zero.

    `kv_usage`: part of its KV in use, 0 to 1; `running`: requests it runs; `reasoning`: active Programs with a request
    in flight. Those that it does not run yet will use as much each as those it does, hence the scaling. Its figure
    leaves out KV that is only cached, so the private tokens of Programs between requests, `acting_tokens`, are added.
    """
    if kv_usage is None or capacity_tokens is None or running is None:
        return None
    if running == 0 and reasoning > 0:
        return None
    scale = max(reasoning, running) / running if running else 1.0
    return round(kv_usage * capacity_tokens * scale) + acting_tokens


def acting_tokens(programs: tuple[Program, ...], decode_buffer_tokens: int) -> int:
    """Private tokens of the active Programs among these that are between two requests."""
    return sum(
        private_tokens(program, decode_buffer_tokens)
        for program in programs
        if program.state is State.ACTIVE and program.status is Status.ACTING
    )


# -- installing an observation ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scrape:
    """A look at an engine. `rank_set`: version of the set of ranks it was begun with; `transitions_tokens`: the running
    total of the rank when it began, of all that transitions ever added to its ledger and to what is leaving (KV that a
    report finds gone is no transition); the rest as in `Observation`."""

    began_ms: int
    rank_set: int
    transitions_tokens: int
    tokens: int | None
    waiting: int
    running: int


def installed(
    current: Observation | None, scrape: Scrape, *, rank_set: int, transitions_tokens: int
) -> Observation | None:
    """The observation that a scrape makes, now that the rank's running total is `transitions_tokens`.

    What transitions did before the scrape began is in the engine's figure; what they did during it may not be, and
    stays. None: it is dropped whole, because the ranks are others by now, or because a look that began later is in.
    """
    if scrape.rank_set != rank_set or (current is not None and current.began_ms > scrape.began_ms):
        return None
    return Observation(
        began_ms=scrape.began_ms,
        tokens=scrape.tokens,
        changed_tokens=transitions_tokens - scrape.transitions_tokens,
        waiting=scrape.waiting,
        running=scrape.running,
    )


# -- edges ------------------------------------------------------------------------------------------------------------


class Edge(StrEnum):
    """A change of source that is worth a line in the log, by the name of its event."""

    FALLBACK = "capacity_observation_fallback"
    RECOVERED = "capacity_observation_recovered"


def edge(before: CapacitySource | None, after: CapacitySource) -> Edge | None:
    """What to log when the source of a rank goes from `before` (None: it had none yet) to `after`: one line on the way
    into the ledger and one on the way back, none between the ways to fall back."""
    was_observed = before in (None, CapacitySource.OBSERVATION)
    is_observed = after is CapacitySource.OBSERVATION
    if was_observed == is_observed:
        return None
    return Edge.RECOVERED if is_observed else Edge.FALLBACK
