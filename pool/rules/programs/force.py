"""How long a request waits at most: when its Program resumes by force, and when the request is given up.

Absolute times are in ms of the state server's clock, durations of settings and requests in seconds.
"""

from __future__ import annotations

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Rank, State, Status
from pool.rules.programs.windows import target_rounds

#: Nobody is forced sooner, unless its own deadline or the longest force wait is shorter.
LEAST_WAIT_S = 30.0
#: So many times the time that the work ahead should take is the most it may take.
PATIENCE = 3.0


def give_up_ms(settings: ProgramSettings, queued_ms: int, deadline_s: float | None = None) -> int:
    """When a request that came at `queued_ms` has waited for too long: after the queue timeout, or its own deadline
    where that is shorter. The same holds while no rank of its model is up."""
    wait_s = settings.queue_timeout_seconds if deadline_s is None else min(settings.queue_timeout_seconds, deadline_s)
    return queued_ms + round(wait_s * 1000)


def force_ms(
    rank: Rank,
    settings: ProgramSettings,
    now_ms: int,
    *,
    ahead: int,
    deadline_s: float | None = None,
    current_ms: int | None = None,
) -> int:
    """When a Program that begins to wait for `rank` now, behind `ahead` others, resumes by force.

    `current_ms`: what was said at the first request it waits with; a later one never postpones that. A deadline
    shortens the wait; it is never longer than the queue timeout.
    """
    bound_ms = give_up_ms(settings, now_ms, deadline_s)
    if current_ms is not None:
        return min(current_ms, bound_ms)
    return min(now_ms + round(wait_s(rank, settings, ahead=ahead) * 1000), bound_ms)


def wait_s(rank: Rank, settings: ProgramSettings, *, ahead: int) -> float:
    """Seconds: three times what the rounds of the active Programs and of those ahead take at the rank's measured
    throughput, at least 30; at most, and while a figure is missing, `force_resume_timeout_seconds`."""
    longest_s = settings.force_resume_timeout_seconds
    target = target_rounds(rank.means, settings.max_segment_rounds)
    throughput = rank.means.throughput_per_s
    if not target or not throughput:
        return longest_s
    rounds = active_rounds(rank, target) + ahead * target
    return min(max(PATIENCE * rounds / throughput, min(LEAST_WAIT_S, longest_s)), longest_s)


def active_rounds(rank: Rank, target: int) -> int:
    """Rounds that the active Programs of a rank have before them; one that runs has at least that one."""
    return sum(
        max(target - program.rounds, 1 if program.status is Status.REASONING else 0)
        for program in rank.programs
        if program.state is State.ACTIVE
    )
