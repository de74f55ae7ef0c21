"""Hints about what is kept for a holder, and their feedback: an answer at once, and later how each accepted one ended.

| answer | when |
|---|---|
| accepted | it will be tried, and a result follows |
| rejected | nothing is held for the holder, or another hint about it is on its way |
| unsupported | the engine or the settings cannot do it, whatever is held |

Results come in the order in which they happened, one for each accepted hint. Only `applied` has freed anything.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

HintAction = Literal["retain", "offload", "drop"]

#: A hint that could not be carried out for so long is not any more.
EXPIRES_S = 30.0
#: Results that are remembered for whoever asks for them; older ones are forgotten.
REMEMBERED = 4096


class HintAnswer(StrEnum):
    """What is said of a hint at once."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNSUPPORTED = "unsupported"


class HintOutcome(StrEnum):
    """How an accepted hint ended."""

    APPLIED = "applied"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class HintResult:
    """The end of an accepted hint. `freed_tokens`: positions of KV that others can have now; `reason`: why it was not
    applied."""

    holder: str
    action: HintAction
    outcome: HintOutcome
    freed_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Hint:
    """An accepted hint, which expires at `expires_s` of the loop's clock."""

    holder: str
    action: HintAction
    expires_s: float

    def applied(self, freed_tokens: int = 0) -> HintResult:
        """It is done."""
        return HintResult(self.holder, self.action, HintOutcome.APPLIED, freed_tokens)

    def failed(self, reason: str) -> HintResult:
        """It cannot be done."""
        return HintResult(self.holder, self.action, HintOutcome.FAILED, reason=reason)

    def expired(self) -> HintResult:
        """It was not done in time."""
        return HintResult(self.holder, self.action, HintOutcome.EXPIRED, reason="it was not carried out in time")


class HintDesk:
    """Accepted hints, and their results until somebody reads them. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: set[str] = set()
        self._results: deque[HintResult] = deque(maxlen=REMEMBERED)

    def accept(self, holder: str) -> bool:
        """Open the hint about a holder. False: there is one already."""
        with self._lock:
            if holder in self._pending:
                return False
            self._pending.add(holder)
            return True

    def close(self, result: HintResult) -> None:
        """A hint has ended."""
        with self._lock:
            self._pending.discard(result.holder)
            self._results.append(result)

    def results(self) -> list[HintResult]:
        """What has ended since the last call, in order."""
        with self._lock:
            results = list(self._results)
            self._results.clear()
        return results
