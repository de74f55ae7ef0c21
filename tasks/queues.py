"""What `genpool queues` shows: each model's queue at one instant, and its rates: of jobs since the look before, of
tokens as its workers last reported them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from pool.store.connection import Client
from pool.store.ranks import RankRegistry
from pool.store.totals import Survey, surveys
from tasks.config import Settings

HEAD = ("MODEL", "QUEUED", "OLDEST", "RUNNING", "SLOTS", "RANKS", "DEAD", "SUBMITTED/S", "ENDED/S", "TOKENS/S")


@dataclass(frozen=True, slots=True)
class Queue:
    """One model. Rates of jobs are None at the first look; that of tokens is what its ranks reported last, over some
    seconds."""

    model: str
    queued: int
    oldest_seconds: float
    running: int
    slots: int
    ranks: int
    dead_letters: int
    submitted_per_second: float | None
    ended_per_second: float | None
    output_tokens_per_second: float

    def row(self) -> tuple[str, ...]:
        """As cells under HEAD."""
        rates = (self.submitted_per_second, self.ended_per_second, self.output_tokens_per_second)
        return (
            self.model,
            str(self.queued),
            duration(self.oldest_seconds) if self.queued else "-",
            str(self.running),
            str(self.slots),
            str(self.ranks),
            str(self.dead_letters),
            *("-" if rate is None else f"{rate:.1f}" for rate in rates),
        )


class Queues:
    """Looks at the queues of all models of the catalogue, again and again."""

    def __init__(self, settings: Settings, client: Client) -> None:
        self._models = list(settings.models)
        self._client = client
        self._before: dict[str, Survey] = {}

    def look(self) -> list[Queue]:
        """The queues now. Raises StateUnavailable."""
        found = surveys(self._client, self._models)
        queues = [self._queue(model, survey) for model, survey in found.items()]
        self._before = found
        return queues

    def _queue(self, model: str, now: Survey) -> Queue:
        ranks = RankRegistry(self._client, model).live()
        submitted, ended = _rates(self._before.get(model), now)
        return Queue(
            model=model,
            queued=now.queued,
            oldest_seconds=now.oldest_ms / 1000,
            running=now.running,
            slots=sum(rank.slots for rank in ranks),
            ranks=len(ranks),
            dead_letters=now.dead_letters,
            submitted_per_second=submitted,
            ended_per_second=ended,
            output_tokens_per_second=round(sum(rank.tokens_per_second for rank in ranks), 1),
        )


def _rates(before: Survey | None, now: Survey) -> tuple[float | None, float | None]:
    """Per second of the state server's clock; None without a look before, or when that clock was set back."""
    if before is None or now.at_ms <= before.at_ms:
        return None, None
    seconds = (now.at_ms - before.at_ms) / 1000
    counts = zip(_counts(before), _counts(now), strict=True)
    submitted, ended = (round((new - old) / seconds, 3) for old, new in counts)
    return submitted, ended


def _counts(survey: Survey) -> tuple[int, int]:
    totals = survey.totals
    return totals.submitted, sum(totals.ended.values())


def duration(seconds: float) -> str:
    """`0.4s`, `59s`, `3m05s`, `2h10m`, `4d03h`."""
    whole = int(seconds)
    if whole < 10:
        return f"{seconds:.1f}s"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def as_json(queues: Iterable[Queue]) -> str:
    """One line."""
    return json.dumps([asdict(queue) for queue in queues])
