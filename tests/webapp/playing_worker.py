"""A worker's part, played by the test through the store's own worker side: it takes real jobs and writes real logs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pool.rules import jobs
from pool.store.connection import connect
from pool.store.delivery import Delivery
from pool.store.handouts import Ending, Handout, Write, Written, failed
from pool.store.keys import ModelKeys
from pool.store.log import LogEntry, TokenLogprobs
from pool.store.ranks import Card, RankRegistry
from pool.store.records import Output
from tests.waiting import wait_until
from workers.engines.tiny import tiny_vocabulary

MODEL = "tiny"
CONTEXT_LENGTH = 256


@dataclass
class Turn:
    """One job in the worker's hands: what was said so far, by choice."""

    handout: Handout
    seq: int = 0
    said: dict[int, str] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)


class PlayingWorker:
    """One rank of MODEL. With `hints` False it writes all it should, and what it says of ends gets lost."""

    def __init__(self, url: str, rank: str = "rank-of-the-test") -> None:
        self.rank = rank
        self.hints = True
        self.client = connect(url, max_connections=4)
        self.delivery = Delivery(
            self.client, connect(url, max_connections=1), MODEL, rank, lease_ms=60_000, result_ttl_ms=60_000
        )
        self.registry = RankRegistry(self.client, MODEL)
        self.keys = ModelKeys(f"{MODEL}:0")

    def register(self) -> None:
        """Publish the model's card and be a live rank."""
        vocabulary = tiny_vocabulary()
        self.registry.publish(
            Card(CONTEXT_LENGTH, CONTEXT_LENGTH, fingerprint=vocabulary.fingerprint(), vocabulary=vocabulary.to_blob())
        )
        assert self.registry.beat(self.rank, "life-1", lease_ms=60_000, facts={})

    def take(self) -> Turn:
        """The next job, begun."""
        found = wait_until(lambda: self.delivery.take(1, block_ms=100).handouts, description="a job in the queue")
        return Turn(found[0], seq=found[0].logged)

    def say(self, turn: Turn, *pieces: str, choice: int = 0) -> None:
        """Append one token a piece."""
        for piece in pieces:
            self._write(turn, Write(turn.handout.lease, turn.seq, (self._entry(turn, piece, choice),)))

    def tell(self, turn: Turn, *tokens: tuple[int, TokenLogprobs], text: str, choice: int = 0) -> None:
        """Append these tokens as one entry, with their log-probabilities."""
        self._add(turn, choice, text, len(tokens))
        ids, logprobs = zip(*tokens, strict=True)
        self._write(turn, Write(turn.handout.lease, turn.seq, (LogEntry(turn.seq, choice, ids, text, logprobs),)))

    def finish(self, turn: Turn, reason: str = "stop", *, cached_tokens: int = 0) -> None:
        """End the job with what was said."""
        n = turn.handout.n
        outputs = tuple(Output(turn.said.get(i, ""), reason, turn.counts.get(i, 0)) for i in range(n))
        ending = Ending(
            jobs.state_of((reason,) * n),
            outputs,
            prompt_tokens=turn.handout.prompt_tokens,
            cached_tokens=cached_tokens,
        )
        self._write(turn, Write(turn.handout.lease, turn.seq, (), ending))

    def fail(self, turn: Turn, code: str) -> None:
        """End the job as failed."""
        self._write(turn, Write(turn.handout.lease, turn.seq, (), failed(code, "The test failed it.")))

    def cancel_all(self) -> None:
        """End whatever is still queued or running, so that a test leaves nothing behind."""
        for key in self.client.scan_iter(match=f"gp:{{{MODEL}:0}}:job:*"):
            if self.client.ttl(key) == -1:
                self.client.pexpire(key, 1000)
        for key in self.client.scan_iter(match=f"gp:{{{MODEL}:0}}:log:*"):
            self.client.pexpire(key, 1000)
        keys = self.keys
        self.client.delete(
            keys.index,
            keys.leases,
            keys.queue,
            keys.ranks,
            keys.outbox,
            keys.timers,
            keys.tenants,
            *keys.lanes.values(),
        )

    @property
    def held(self) -> int:
        """Jobs that have not ended."""
        return int(self.client.zcard(self.keys.index))

    @contextmanager
    def answering(self, *pieces: str, reason: str = "stop") -> Iterator[None]:
        """Answer every job with these pieces, on each choice, from a thread."""
        stop = threading.Event()
        thread = threading.Thread(target=self._answer, args=(stop, pieces, reason))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _answer(self, stop: threading.Event, pieces: Sequence[str], reason: str) -> None:
        while not stop.is_set():
            for handout in self.delivery.take(8, block_ms=50).handouts:
                turn = Turn(handout)
                for choice in range(handout.n):
                    self.say(turn, *pieces, choice=choice)
                self.finish(turn, reason)

    def _entry(self, turn: Turn, piece: str, choice: int) -> LogEntry:
        self._add(turn, choice, piece, 1)
        return LogEntry(seq=turn.seq, choice=choice, token_ids=(7,), text=piece)

    def _add(self, turn: Turn, choice: int, text: str, tokens: int) -> None:
        turn.said[choice] = turn.said.get(choice, "") + text
        turn.counts[choice] = turn.counts.get(choice, 0) + tokens

    def _write(self, turn: Turn, write: Write) -> Written:
        written = self.delivery.write([write])[0]
        assert written.code == "ok", written
        turn.seq += write.count
        if self.hints and write.ending is not None:
            self.delivery.hint({node: [turn.handout.lease.token] for node in written.watch.split()})
        return written

    def close(self) -> None:
        """Close all connections."""
        self.client.connection_pool.disconnect()
        self.delivery.writer.connection_pool.disconnect()
