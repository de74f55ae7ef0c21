"""The books of KV in blocks against a model that remembers what was written into each block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized
from dataclasses import dataclass, fields

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pool.rules.kv_blocks import BlockPool, BlockUsage, TokenIds

BLOCK = 4
TOTAL = 12
OPERATIONS = 10_000
#: Prompts are the beginnings of one of these, and a tail: much is shared, and in many lengths.
FAMILIES = ("aaaabbbbccccddddeeee", "aaaabbbbxxxxyyyyzzzz", "mmmmnnnnoooopppp")

prompts = st.builds(
    lambda family, length, tail: FAMILIES[family][:length] + tail,
    st.integers(0, 2),
    st.sampled_from((0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20)),
    st.sampled_from(("", "q", "r", "qr")),
)
scopes = st.sampled_from(("one", "two"))
holders = st.sampled_from(("h", "i", "j"))
picks = st.integers(0, 10**6)

Content = tuple[str, str]


def ids(text: str) -> TokenIds:
    return np.array([ord(letter) for letter in text], np.int32)


@dataclass
class Running:
    """A session: `text` is its prompt and all it will ever say; `computed` positions are written."""

    scope: str
    prompt: str
    text: str
    room: int
    computed: int
    blocks: list[int]

    def content(self, place: int, stop: int) -> Content:
        """What its block holds when `stop` positions are written: with all that is before it."""
        return self.scope, self.text[: min((place + 1) * BLOCK, stop)]


class Books(RuleBasedStateMachine):
    """Sessions begin, compute, ask for more room, end in all ways, and holders let go."""

    operations = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL, BLOCK)
        self.running: dict[int, Running] = {}
        self.pinned: dict[str, Content] = {}
        self.memory: dict[int, Content] = {}
        self.begun = 0

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(scope=scopes, prompt=prompts, more=st.integers(0, 20), share=st.none() | st.integers(0, 20))
    def begin(self, scope: str, prompt: str, more: int, share: int | None) -> None:
        """It has room exactly when the unheld blocks suffice, and begins with what it could have computed itself."""
        pool, before, evictions = self.pool, self.pool.usage(), self.pool.evictions
        found = pool.resident(ids(prompt), scope)
        limit = min(len(prompt) - 1, len(prompt) + more, len(prompt) if share is None else share)
        found = min(found, max(limit, 0) // BLOCK * BLOCK)
        self.begun += 1
        room = len(prompt) + more
        held = pool.begin(self.begun, ids(prompt), room, scope, share=share)
        if held is None:
            needed = pool.blocks_for(room) - found // BLOCK
            assert needed > TOTAL - before.held - found // BLOCK
            assert (pool.usage(), pool.evictions) == (before, evictions)
            return
        assert held == found
        session = Running(scope, prompt, prompt, room, held, list(pool.table(self.begun)))
        self.running[self.begun] = session
        assert len(session.blocks) == pool.blocks_for(room)
        for place in range(held // BLOCK):
            assert self.memory[session.blocks[place]] == session.content(place, held)
        taken = len(session.blocks) - held // BLOCK
        assert pool.evictions - evictions == max(taken - before.free, 0)

    @precondition(lambda self: self.running)
    @rule(pick=picks, count=st.integers(1, 9))
    def compute(self, pick: int, count: int) -> None:
        """Write on. No block that somebody else has, or could find, is ever written."""
        key, session = self._picked(pick)
        start, session.computed = session.computed, min(session.computed + count, session.room)
        session.text += "".join(chr(ord("A") + (key + at) % 3) for at in range(len(session.text), session.computed))
        others = {block for other in self.running.values() if other is not session for block in other.blocks}
        for place in range(start // BLOCK, self.pool.blocks_for(session.computed)):
            block = session.blocks[place]
            assert block not in others
            assert block not in self.pool._digest_of
            self.memory[block] = session.content(place, session.computed)
        self.pool.written(key, min(session.computed, len(session.prompt)))

    @precondition(lambda self: self.running)
    @rule(pick=picks, more=st.integers(-3, 20))
    def extend(self, pick: int, more: int) -> None:
        """More room, or none."""
        key, session = self._picked(pick)
        before = self.pool.usage()
        wanted = self.pool.blocks_for(session.room + more) - len(session.blocks)
        assert self.pool.extend(key, session.room + more) == (wanted <= TOTAL - before.held)
        if wanted > TOTAL - before.held:
            assert self.pool.usage() == before
            return
        assert list(self.pool.table(key))[: len(session.blocks)] == session.blocks
        session.blocks = list(self.pool.table(key))
        session.room = max(session.room, session.room + more)

    @precondition(lambda self: self.running)
    @rule(pick=picks, told=st.booleans(), holder=st.none() | holders)
    def end(self, pick: int, told: bool, holder: str | None) -> None:
        """What can be found of it can be found right after it."""
        key, session = self._picked(pick)
        known = session.computed if told else min(session.computed, len(session.prompt))
        if told:
            self.pool.learn(key, ids(session.text[:known]))
        if holder:
            self.pool.pin(holder, key)
            self.pinned[holder] = (session.scope, session.text[: known // BLOCK * BLOCK])
        self.pool.release(key)
        self.pool.release(key)
        del self.running[key]
        assert self.pool.resident(ids(session.text[:known] + "."), session.scope) >= known // BLOCK * BLOCK

    @rule(holder=holders)
    def unpin(self, holder: str) -> None:
        self.pool.unpin(holder)
        self.pinned.pop(holder, None)

    def _picked(self, pick: int) -> tuple[int, Running]:
        return list(self.running.items())[pick % len(self.running)]

    # -- what is always true -----------------------------------------------------------------------------------------

    @invariant()
    def the_books_are_sound(self) -> None:
        Books.operations += 1
        self.pool.check_integrity()

    @invariant()
    def usage_is_what_sessions_and_holders_have(self) -> None:
        """The budget is never exceeded."""
        usage = self.pool.usage()
        pinned = {block for blocks in self.pool._pins.values() for block in blocks}
        held = pinned.union(*(session.blocks for session in self.running.values()))
        assert usage == BlockUsage(TOTAL, usage.free, TOTAL - usage.free - len(held), len(held), len(pinned))
        assert len(pinned) == len(self._pinned_prefixes())

    @invariant()
    def every_held_block_has_an_owner(self) -> None:
        """One: in sum they have what is held. What all sessions have but no holder is theirs alone."""
        pool, keys = self.pool, list(self.running)
        owners = {"h": keys[::2], "i": keys[1::2], "j": []}
        found = pool.held_by(owners)
        assert sum(found.values()) == pool.usage().held
        had = {name for name, sessions in owners.items() if sessions or name in pool._pins}
        assert found.keys() <= had
        assert had - found.keys() == {name for name in had - pool._pins.keys() if not self._blocks(owners[name])}
        pinned = {block for blocks in pool._pins.values() for block in blocks}
        assert pool.sole(keys) == len(self._blocks(keys) - pinned)

    def _blocks(self, keys: list[int]) -> set[int]:
        return {block for key in keys for block in self.running[key].blocks}

    @invariant()
    def blocks_are_shared_by_equal_content_only(self) -> None:
        """No block is in two sessions unless both would have computed the same in its place."""
        owners = Counter(block for session in self.running.values() for block in session.blocks)
        for session in self.running.values():
            for place, block in enumerate(session.blocks):
                if owners[block] > 1:
                    assert self.memory[block] == session.content(place, len(session.text))

    @invariant()
    def pinned_content_can_be_found(self) -> None:
        for scope, text in self.pinned.values():
            assert self.pool.resident(ids(text + "."), scope) == len(text)

    @invariant()
    def whatever_is_cached_can_be_found(self) -> None:
        """With all that is before it: nothing lies there that nobody can reach."""
        for block in self.pool._cached:
            scope, text = self.memory[block]
            assert self.pool.resident(ids(text + "."), scope) >= len(text)

    def _pinned_prefixes(self) -> set[Content]:
        return {
            (scope, text[:stop]) for scope, text in self.pinned.values() for stop in range(BLOCK, len(text) + 1, BLOCK)
        }


def test_the_books_agree_with_the_model() -> None:
    """Ten thousand operations at least, in many short lives."""
    Books.operations = 0
    while Books.operations < OPERATIONS:
        run_state_machine_as_test(Books, settings=settings(max_examples=100, stateful_step_count=100, deadline=None))


@pytest.mark.timeout(300)
def test_the_books_do_not_grow() -> None:
    """After 100,000 sessions of as many prompts, scopes and holders, no book has more entries than there are blocks."""
    pool = BlockPool(32, BLOCK)
    for session in range(100_000):
        prompt = np.array([session % 7, 1, 2, 3, session, 5, 6, 7, 8], np.int32)
        assert pool.begin(session, prompt, 12, f"scope-{session % 1000}") is not None
        pool.written(session, 9)
        if session % 10 == 0:
            pool.learn(session, np.append(prompt, [session, 1, 2]))
        pool.pin(f"holder-{session}", session)
        pool.release(session)
        if session >= 5:
            pool.unpin(f"holder-{session - 5}")
    pool.check_integrity()
    books = {book.name: getattr(pool, book.name) for book in fields(pool)}
    assert {name: len(book) for name, book in books.items() if isinstance(book, Sized) and len(book) > pool.total} == {}
    assert sum(isinstance(book, Sized) for book in books.values()) == 7
