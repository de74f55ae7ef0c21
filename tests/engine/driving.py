"""Drives an engine in tests: whole prompts, greedy streams, and many sessions in random schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt
import pytest

from tasks.ports import Engine, Logits, Member, StepLogits, StepResult, TokenIds

#: Positions a session is given beyond its prompt.
ROOM = 70

_scopes = count()


def new_scope() -> str:
    """One in which no engine holds anything yet."""
    return f"scope-{next(_scopes)}"


def ids(*token_ids: int) -> TokenIds:
    return np.array(token_ids, np.int32)


def some_tokens(engine: Engine, count: int, *, seed: int = 0) -> TokenIds:
    """`count` random tokens that are no control tokens in the vocabularies of the tests."""
    return np.random.default_rng(seed).integers(17, engine.vocabulary.size, count).astype(np.int32)


def needs(engine: Engine, flag: str) -> None:
    """Skips where the engine says that it cannot."""
    if not getattr(engine.capability(), flag):
        pytest.skip(f"this engine has no {flag}")


def row_of(result: StepResult) -> Logits:
    """A copy of the logits of a result that must hold some: the engine's own may hold until its next step."""
    assert isinstance(result, StepLogits), result
    assert result.row is not None
    return result.row.copy()


def begin(
    engine: Engine, session: str, prompt: TokenIds, *, epoch: int = 0, scope: str | None = None, room: int = ROOM
) -> int:
    """Begin a session with `room` positions beyond its prompt, where the model has them; how many it holds. Without a
    `scope` it finds nothing."""
    positions = min(len(prompt) + room, engine.capability().max_positions)
    held = engine.begin(session, epoch, prompt, positions, new_scope() if scope is None else scope)
    assert held is not None, "no room"
    return held


def prefill(
    engine: Engine,
    session: str,
    prompt: TokenIds,
    *,
    epoch: int = 0,
    chunk: int | None = None,
    scope: str | None = None,
    room: int = ROOM,
) -> Logits:
    """Begin a session and feed its prompt, in chunks of `chunk` tokens if given; the logits after its last token."""
    held = begin(engine, session, prompt, epoch=epoch, scope=scope, room=room)
    return feed(engine, session, prompt, held, epoch=epoch, chunk=chunk)


def feed(
    engine: Engine, session: str, prompt: TokenIds, held: int, *, epoch: int = 0, chunk: int | None = None
) -> Logits:
    """The rest of a prompt, of which the session holds `held` positions, in chunks that end at multiples of `chunk`;
    the logits after its last token."""
    size, start = chunk or len(prompt), held
    while start < len(prompt):
        stop = min(start // size * size + size, len(prompt))
        (result,) = engine.step([Member(session, epoch, prompt[start:stop], start, stop == len(prompt))])
        start = stop
    return row_of(result)


def decode(engine: Engine, session: str, tokens: Sequence[int], start: int, *, epoch: int = 0) -> list[Logits]:
    """Feed given tokens one by one from position `start` on; the logits after each."""
    rows = []
    for offset, token in enumerate(tokens):
        (result,) = engine.step([Member(session, epoch, ids(token), start + offset)])
        rows.append(row_of(result))
    return rows


@dataclass(slots=True)
class Stream:
    """A greedy generation: `rows[k]` are the logits that `tokens[k]` was taken from. It began with `cached` positions;
    now the engine holds `held`."""

    prompt: TokenIds
    tokens: list[int] = field(default_factory=list)
    rows: list[Logits] = field(default_factory=list)
    cached: int = 0
    held: int = 0

    def take(self, row: Logits) -> None:
        self.rows.append(row)
        self.tokens.append(int(np.argmax(row)))


def greedy(engine: Engine, session: str, prompt: TokenIds, count: int, *, epoch: int = 0) -> Stream:
    """Generate `count` tokens alone, with nothing to begin with. The session stays."""
    stream = Stream(prompt)
    stream.take(prefill(engine, session, prompt, epoch=epoch, room=count))
    while len(stream.tokens) < count:
        stream.take(*decode(engine, session, stream.tokens[-1:], len(prompt) + len(stream.tokens) - 1, epoch=epoch))
    return stream


def alone(engine: Engine, prompt: TokenIds, count: int) -> Stream:
    """`greedy`, and the session is gone."""
    try:
        return greedy(engine, "alone", prompt, count)
    finally:
        engine.release("alone", 0)


@contextmanager
def pressure(engine: Engine) -> Iterator[list[str]]:
    """Sessions that between them have all the room there is; they are gone afterwards."""
    sessions: list[str] = []
    positions = engine.capability().max_positions
    try:
        while positions:
            session = f"pressure-{len(sessions)}"
            if engine.begin(session, 0, ids(5), positions, new_scope()) is None:
                positions //= 2
            else:
                sessions.append(session)
        yield sessions
    finally:
        for session in sessions:
            engine.release(session, 0)


def same_bits(left: Sequence[Logits], right: Sequence[Logits]) -> bool:
    """Whether two lists of rows are equal to the last bit."""
    return len(left) == len(right) and all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


class RandomSchedule:
    """Runs greedy streams together: sessions join when there is room and leave when done, and each step takes a random
    subset of them (`whole`: all) in random order, with prefill chunks cut at random multiples of the grid. `preempted`:
    now and then one is exported, forgotten, and restored later. The engine's books are checked after every step."""

    EPOCH = 7

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[TokenIds],
        count: int,
        *,
        room: int,
        seed: int,
        whole: bool = False,
        preempted: bool = False,
        scope: str | None = None,
    ) -> None:
        self.engine = engine
        self.streams = [Stream(prompt) for prompt in prompts]
        self.count = count
        self.room = room
        self.whole = whole
        self.preempted = preempted
        self.scope = new_scope() if scope is None else scope
        self.rng = np.random.default_rng(seed)
        self.waiting = list(range(len(prompts)))
        self.live: list[int] = []
        self.exported: dict[int, bytes] = {}

    def run(self) -> list[Stream]:
        try:
            while self.waiting or self.live or self.exported:
                self._join()
                self._step()
                if self.preempted and self.live and self.rng.random() < 0.1:
                    self._export(int(self.rng.choice(self.live)))
                self.engine.check_integrity()
        finally:
            for index in self.live:
                self.engine.release(_session(index), self.EPOCH)
        return self.streams

    def _join(self) -> None:
        for index in list(self.exported):
            if len(self.live) < self.room:
                self._restore(index)
        while self.waiting and len(self.live) < self.room:
            stream = self.streams[self.waiting[0]]
            session = _session(self.waiting[0])
            held = self.engine.begin(session, self.EPOCH, stream.prompt, self._positions(stream), self.scope)
            if held is None:
                assert self.live, "a session alone has no room"
                return
            stream.cached = stream.held = held
            self.live.append(self.waiting.pop(0))

    def _positions(self, stream: Stream) -> int:
        return len(stream.prompt) + self.count - 1

    def _export(self, index: int) -> None:
        blob = self.engine.snapshot(_session(index), self.EPOCH)
        if blob is not None:
            self.exported[index] = blob
            self.engine.release(_session(index), self.EPOCH)
            self.live.remove(index)

    def _restore(self, index: int) -> None:
        stream = self.streams[index]
        blob, positions = self.exported[index], self._positions(stream)
        if self.engine.restore(_session(index), self.EPOCH, blob, stream.prompt, positions, self.scope):
            del self.exported[index]
            self.live.append(index)

    def _step(self) -> None:
        size = len(self.live) if self.whole else int(self.rng.integers(1, len(self.live) + 1))
        chosen = [int(index) for index in self.rng.permutation(self.live)[:size]]
        members = [self._member(index) for index in chosen]
        for index, member, result in zip(chosen, members, self.engine.step(members), strict=True):
            stream = self.streams[index]
            stream.held += len(member.tokens)
            assert isinstance(result, StepLogits), result
            assert result.length == stream.held
            if member.wants_logits:
                stream.take(row_of(result))
            if len(stream.tokens) == self.count:
                self.engine.release(member.session, member.epoch)
                self.live.remove(index)

    def _member(self, index: int) -> Member:
        stream, session = self.streams[index], _session(index)
        if stream.held >= len(stream.prompt):
            return Member(session, self.EPOCH, ids(stream.tokens[-1]), stream.held)
        grid = self.engine.prefill_grid
        end = min((stream.held // grid + int(self.rng.integers(1, 6))) * grid, len(stream.prompt))
        return Member(session, self.EPOCH, stream.prompt[stream.held : end], stream.held, end == len(stream.prompt))


def _session(index: int) -> str:
    return f"scheduled-{index}"


def log_softmax(row: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    shifted = row.astype(np.float64) - float(row.max())
    logs: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return logs
