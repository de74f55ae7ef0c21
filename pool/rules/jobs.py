"""The states of a job, and what each means to whoever asks.

    queued -> running -> completed | incomplete | failed | cancelled
       ^---------'   (a hand-back or a lost worker: honestly queued again)

Only terminal is final, and it is written once.
"""

from __future__ import annotations

QUEUED = "queued"
RUNNING = "running"
COMPLETED = "completed"
#: Ended by the token limit of the request, not by the model.
INCOMPLETE = "incomplete"
FAILED = "failed"
CANCELLED = "cancelled"

TERMINAL = frozenset({COMPLETED, INCOMPLETE, FAILED, CANCELLED})


def is_terminal(state: str) -> bool:
    """Whether a job in this state will never change again."""
    return state in TERMINAL


def state_of(finish_reasons: tuple[str, ...]) -> str:
    """The terminal state of a job whose choices all ended by themselves (`stop` or `length` each)."""
    return INCOMPLETE if "length" in finish_reasons else COMPLETED
