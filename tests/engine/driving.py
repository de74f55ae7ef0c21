"""Drives an engine in tests: whole prompts, greedy streams, and many sessions in random schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tasks.ports import Engine, Logits, Member, StepLogits, StepResult, TokenIds


def ids(*token_ids: int) -> TokenIds:
    return np.array(token_ids, np.int32)


def some_tokens(engine: Engine, count: int, *, seed: int = 0) -> TokenIds:
    """`count` random tokens that are no control tokens in the vocabularies of the tests."""
    return np.random.default_rng(seed).integers(17, engine.vocabulary.size, count).astype(np.int32)


def row_of(result: StepResult) -> Logits:
    """The logits of a result that must hold some."""
    assert isinstance(result, StepLogits), result
    assert result.row is not None
    return result.row


def prefill(engine: Engine, session: str, prompt: TokenIds, *, epoch: int = 0, chunk: int | None = None) -> Logits:
    """Feed a prompt, in chunks of `chunk` tokens if given; the logits after its last token."""
    size = chunk or len(prompt)
    for start in range(0, len(prompt), size):
        part = prompt[start : start + size]
        (result,) = engine.step([Member(session, epoch, part, start, start + size >= len(prompt))])
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
    """A greedy generation: `rows[k]` are the logits that `tokens[k]` was taken from."""

    prompt: TokenIds
    tokens: list[int] = field(default_factory=list)
    rows: list[Logits] = field(default_factory=list)
    held: int = 0

    def take(self, row: Logits) -> None:
        self.rows.append(row)
        self.tokens.append(int(np.argmax(row)))


def greedy(engine: Engine, session: str, prompt: TokenIds, count: int, *, epoch: int = 0) -> Stream:
    """Generate `count` tokens alone."""
    stream = Stream(prompt)
    stream.take(prefill(engine, session, prompt, epoch=epoch))
    while len(stream.tokens) < count:
        stream.take(*decode(engine, session, stream.tokens[-1:], len(prompt) + len(stream.tokens) - 1, epoch=epoch))
    return stream


def same_bits(left: Sequence[Logits], right: Sequence[Logits]) -> bool:
    """Whether two lists of rows are equal to the last bit."""
    return len(left) == len(right) and all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


class RandomSchedule:
    """Runs greedy streams together: sessions join when there is room and leave when done, and each step takes a random
    subset of them (`whole`: all) in random order, with prefill chunks cut at random multiples of the grid."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[TokenIds],
        count: int,
        *,
        room: int,
        seed: int,
        whole: bool = False,
    ) -> None:
        self.engine = engine
        self.streams = [Stream(prompt) for prompt in prompts]
        self.count = count
        self.room = room
        self.whole = whole
        self.rng = np.random.default_rng(seed)
        self.waiting = list(range(len(prompts)))
        self.live: list[int] = []

    def run(self) -> list[Stream]:
        while self.waiting or self.live:
            while self.waiting and len(self.live) < self.room:
                self.live.append(self.waiting.pop(0))
            self._step()
        return self.streams

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
        stream, session = self.streams[index], f"scheduled-{index}"
        if stream.held >= len(stream.prompt):
            return Member(session, 7, ids(stream.tokens[-1]), stream.held)
        end = min(stream.held + self.engine.prefill_grid * int(self.rng.integers(1, 6)), len(stream.prompt))
        return Member(session, 7, stream.prompt[stream.held : end], stream.held, end == len(stream.prompt))


def log_softmax(row: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    shifted = row.astype(np.float64) - float(row.max())
    logs: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return logs
