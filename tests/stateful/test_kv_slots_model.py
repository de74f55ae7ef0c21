"""The books of KV in slots against slots that really hold tokens, moved and copied as the books say.

Contents are compared, so a session that would begin with somebody else's tokens, or a promise broken by a move, is seen
at once.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pool.rules.kv_slots import SlotPool
from pool.rules.slot_contents import WORTH_TOKENS, Key, Placement, Swap

SLOT_TOKENS = 96
SCOPES = ("", "other")
HOLDERS = ("h", "i", "j")


class Slots(RuleBasedStateMachine):
    """`held`: the tokens in each slot; `prompts`, `scopes`, `prefilled` of the live sessions."""

    @initialize(total=st.integers(1, 6), grid=st.sampled_from((1, 16)))
    def make(self, total: int, grid: int) -> None:
        self.pool = SlotPool(total, SLOT_TOKENS, lambda common, tokens: min(common, tokens - 1) // grid * grid)
        self.grid = grid
        self.held: list[list[int]] = [[] for _ in range(total)]
        self.prompts: dict[Key, list[int]] = {}
        self.scopes: dict[Key, str] = {}
        self.prefilled: dict[Key, int] = {}
        self.promised: dict[str, tuple[str, list[int]]] = {}
        self.count = 0

    # -- what an engine does ---------------------------------------------------------------------------------------

    def swap(self, swap: Swap) -> None:
        held = self.held
        held[swap.first], held[swap.second] = held[swap.second], held[swap.first]

    def place(self, placement: Placement) -> None:
        for swap in placement.swaps:
            self.swap(swap)
        if placement.spare is not None:
            assert placement.spare != placement.slot
            self.held[placement.spare] = list(self.held[placement.slot])
        if placement.source is not None:
            assert placement.source != placement.slot
            self.held[placement.slot] = list(self.held[placement.source])
        del self.held[placement.slot][placement.held :]

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(
        family=st.integers(0, 2),
        common=st.integers(0, 60),
        own=st.integers(1, 30),
        scope=st.sampled_from(SCOPES),
        extra=st.sampled_from((0, 5, SLOT_TOKENS)),
    )
    def begin(self, family: int, common: int, own: int, scope: str, extra: int) -> None:
        """A prompt with a beginning that others of its family have too."""
        self.count += 1
        key = (f"s{self.count}", 0)
        prompt = [1000 * family + place for place in range(common)] + [-self.count] * own
        tokens = np.array(prompt, np.int32)
        expected = self.pool.resident(tokens, scope)
        before = [list(content) for content in self.held]
        placement = self.pool.begin(key, tokens, len(prompt) + extra, scope)
        if placement is None:
            pinned = self.pool.usage().pinned
            assert len(prompt) + extra > SLOT_TOKENS or len(self.prompts) + pinned == len(self.held)
            assert self.held == before
            return
        self.place(placement)
        assert placement.held == expected < len(prompt)
        assert placement.held % self.grid == 0
        assert self.held[placement.slot] == prompt[: placement.held]
        self.prompts[key], self.scopes[key], self.prefilled[key] = prompt, scope, placement.held

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), share=st.floats(0, 1))
    def prefill(self, data: st.DataObject, share: float) -> None:
        """Some more of a prompt is computed."""
        key = data.draw(st.sampled_from(sorted(self.prompts)))
        stop = max(self.prefilled[key], round(share * len(self.prompts[key])))
        slot = self.pool.slot(key)
        if len(self.held[slot]) == self.prefilled[key]:
            self.held[slot] += self.prompts[key][self.prefilled[key] : stop]
            self.prefilled[key] = stop
            self.pool.written(key, stop)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), output=st.integers(0, 20), holder=st.sampled_from(("", *HOLDERS)), said=st.booleans())
    def end(self, data: st.DataObject, output: int, holder: str, said: bool) -> None:
        """A session generates something and ends, for a holder or nobody, with its output known or not."""
        key = data.draw(st.sampled_from(sorted(self.prompts)))
        slot, prompt = self.pool.slot(key), self.prompts.pop(key)
        if self.prefilled[key] == len(prompt):
            self.held[slot] += [-1_000_000 - token for token in range(min(output, SLOT_TOKENS - len(prompt)))]
        known = self.held[slot] if said else prompt[: self.prefilled[key]]
        if said:
            self.pool.learn(key, np.array(known, np.int32), len(known))
        expected = len(known) if len(known) >= WORTH_TOKENS else 0
        room_to_promise = len({h for h in self.promised if h != holder}) < len(self.held) - 1
        assert self.pool.release(key, holder) == (slot, expected)
        del self.held[slot][expected:]
        if holder:
            self.promised.pop(holder, None)
            if expected and room_to_promise:
                self.promised[holder] = (self.scopes[key], list(known))

    @rule(holder=st.sampled_from(HOLDERS))
    def unpin(self, holder: str) -> None:
        """A holder lets go."""
        self.pool.unpin(holder)
        self.promised.pop(holder, None)

    @rule()
    def condense(self) -> None:
        """Gaps are closed."""
        for swap in self.pool.condense():
            self.swap(swap)
        assert sorted(map(self.pool.slot, self.prompts)) == list(range(len(self.prompts)))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """An engine loses what a session holds."""
        key = data.draw(st.sampled_from(sorted(self.prompts)))
        slot = self.pool.slot(key)
        assert self.pool.empty(slot) == key
        del self.prompts[key]
        self.held[slot].clear()

    # -- what is always true -----------------------------------------------------------------------------------------

    @invariant()
    def the_books_are_right(self) -> None:
        """Lengths agree, and each session's slot holds its own tokens."""
        self.pool.check_integrity()
        live = {self.pool.slot(key): key for key in self.prompts}
        kept = self.pool.kept()
        for slot, content in enumerate(self.held):
            if slot in live:
                prefilled = self.prefilled[live[slot]]
                assert content[:prefilled] == self.prompts[live[slot]][:prefilled]
            else:
                assert len(content) == kept.get(slot, 0)
        usage = self.pool.usage()
        assert usage.live == len(self.prompts)
        assert usage.live + usage.pinned + usage.kept <= usage.total
        assert usage.pinned == len(self.promised)

    @invariant()
    def promises_are_kept(self) -> None:
        """What is kept for a holder is in some slot, and a prompt that begins with it finds it."""
        for scope, known in self.promised.values():
            assert known in self.held
            found = self.pool.resident(np.array([*known, 7], np.int32), scope)
            assert found >= len(known) // self.grid * self.grid


Slots.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestSlots = Slots.TestCase
