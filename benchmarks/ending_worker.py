"""A worker's part in the waiters benchmark: it takes jobs through the store's worker side, and ends them when told to.

    python -m benchmarks.ending_worker URL MODEL RATE

The dialogue is that of `benchmarks.peers.plain_waits`, so that both sides' jobs end alike.
"""

from __future__ import annotations

import sys

from benchmarks.peers.dialogue import answer_text, serve_endings
from pool.store.connection import connect
from pool.store.delivery import Delivery
from pool.store.handouts import Ending, Handout, Write
from pool.store.log import LogEntry
from pool.store.ranks import Card, RankRegistry
from pool.store.records import Output
from pool.store.taking import BATCH
from workers.engines.tiny import tiny_vocabulary

#: No lease runs out during a round.
LEASE_MS = 600_000
CONTEXT_LENGTH = 2048


class EndingWorker:
    """One rank that begins jobs at once and ends them later."""

    def __init__(self, url: str, model: str) -> None:
        # Every connection is named, those beside a pool too: the others are the API's.
        reader, writer = (connect(f"{url}?client_name=bench-worker", max_connections=1) for _ in range(2))
        vocabulary = tiny_vocabulary()
        card = Card(
            CONTEXT_LENGTH, CONTEXT_LENGTH, fingerprint=vocabulary.fingerprint(), vocabulary=vocabulary.to_blob()
        )
        RankRegistry(writer, model).publish(card)
        self._delivery = Delivery(reader, writer, model, "bench-rank", lease_ms=LEASE_MS, result_ttl_ms=LEASE_MS)
        self._delivery.heal()

    def take(self) -> list[Handout]:
        """Jobs that wait, begun; none when there is none for a second."""
        return self._delivery.take(BATCH, block_ms=1000).handouts

    def end(self, handouts: list[Handout]) -> None:
        """End these jobs, each with one token of text, and hint to those who wait."""
        answers = self._delivery.write([_last_write(handout) for handout in handouts])
        news: dict[str, list[str]] = {}
        for handout, answer in zip(handouts, answers, strict=True):
            for node in answer.watch.split():
                news.setdefault(node, []).append(handout.lease.token)
        self._delivery.hint(news)


def _last_write(handout: Handout) -> Write:
    text = answer_text(handout.lease.token)
    ending = Ending("completed", (Output(text, "stop", 1),), prompt_tokens=handout.prompt_tokens)
    return Write(handout.lease, handout.logged, (LogEntry(handout.logged, 0, (7,), text),), ending)


if __name__ == "__main__":
    worker = EndingWorker(sys.argv[1], sys.argv[2])
    serve_endings(worker.take, worker.end, lambda handout: handout.lease.token, rate=float(sys.argv[3]))
