"""KV in slots: which session runs in which, what is kept in others, what is given up for room. The engine copies.

A *slot* is room for a fixed number of positions, in order from 0; an engine that can share nothing but whole sequences
(llama.cpp with a partitioned KV) has one for each. Every slot is one of these:

| a slot is | when |
|---|---|
| live | a session runs in it |
| kept | its session has ended, and a later one may begin with what it holds; given up for room, longest unused first |
| pinned | kept, and a holder (a Program between two requests) was promised that it stays |
| free | there is nothing in it that anybody can ask for |

A session begins with the longest common prefix of its prompt and of what is kept, or prefilled by a session that still
runs: with a copy of it, unless that stands in its own slot. Then all that is there is copied elsewhere first, if what
would be cut off is worth it. Only sessions of the same *scope* (a tenant) begin with each other's KV.

**Live slots come first.** llama.cpp multiplies the rows of several sequences together only when their numbers follow
each other, so a new session takes the lowest slot that is not live, `condense` closes gaps, and what is kept makes way
by changing places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pool.rules.kv_blocks import IntegrityError, common_prefix
from pool.rules.slot_contents import WORTH_TOKENS, Content, Key, Placement, SlotUsage, Swap, TokenIds, all_but_last


@dataclass
class SlotPool:
    """The books of `total` slots of `slot_tokens` positions each. `begins_with`: how many positions a session begins
    with, less than its prompt has, where so many are in common and its prompt has so many."""

    total: int
    slot_tokens: int
    begins_with: Callable[[int, int], int] = all_but_last
    evictions: int = 0
    _contents: dict[int, Content] = field(default_factory=dict)
    _slots: dict[Key, int] = field(default_factory=dict)
    _pins: dict[str, int] = field(default_factory=dict)
    _clock: int = 0

    def resident(self, prompt: TokenIds, scope: str) -> int:
        """How many positions a session of this prompt would begin with."""
        return self._best(prompt, scope)[1]

    def begin(self, key: Key, prompt: TokenIds, positions: int, scope: str = "") -> Placement | None:
        """Give a new session a slot; it begins with whatever of `prompt` (P,) is here, less than P positions.

        None, and nothing happens: every slot is live or pinned, or none is long enough.
        """
        if key in self._slots:
            raise IntegrityError(f"{key} has begun already")
        slot = self._lowest()
        if slot is None or positions > self.slot_tokens:
            return None
        source, held = self._best(prompt, scope)
        room = self._make_room(slot, source)
        if room is None:
            return None
        swaps, source = room
        self._clock += 1
        if source is not None:
            self._contents[source].used = self._clock
        spare = self._spare(slot, held) if source == slot else None
        self._contents[slot] = Content(scope, prompt.copy(), held, key, self._clock)
        self._slots[key] = slot
        return Placement(slot, held, swaps, None if source == slot else source, spare)

    def has_room(self) -> bool:
        """Whether a session could begin: a slot is neither live nor pinned."""
        return len(self._slots) + len(self._pinned()) < self.total

    def slot(self, key: Key) -> int:
        """Where the session runs now."""
        return self._slots[key]

    def written(self, key: Key, positions: int) -> None:
        """The session's first `positions` are computed: others may begin with those of its prompt."""
        content = self._contents[self._slots[key]]
        content.findable = max(content.findable, min(positions, len(content.tokens)))

    def learn(self, key: Key, tokens: TokenIds, findable: int) -> None:
        """The session's positions hold `tokens`, and others may begin with the first `findable` of them."""
        content = self._contents[self._slots[key]]
        content.tokens, content.findable = tokens.copy(), findable

    def release(self, key: Key, holder: str = "") -> tuple[int, int] | None:
        """The session has ended: what can be found of it stays, for `holder` in place of what stayed for it before.

        Returns the slot and how many of its positions stay; the engine cuts the rest off. None: no such session.

        A promise to keep the last slot that is not promised yet is not made: some session must be able to run.
        """
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        content = self._contents.pop(slot)
        stays = content.findable if content.findable >= WORTH_TOKENS else 0
        if stays:
            self._clock += 1
            tokens = content.tokens[:stays].copy()
            self._contents[slot] = replace(content, tokens=tokens, session=None, used=self._clock)
        if holder:
            self.unpin(holder)
            if stays and len(self._pinned()) < self.total - 1:
                self._pins[holder] = slot
        return slot, stays

    def empty(self, slot: int) -> Key | None:
        """What the slot held is gone. Returns the session that ran in it, if one did."""
        content = self._contents.pop(slot, None)
        self._pins = {holder: pinned for holder, pinned in self._pins.items() if pinned != slot}
        if content is None or content.session is None:
            return None
        del self._slots[content.session]
        return content.session

    def unpin(self, holder: str) -> None:
        """The holder needs nothing any more; what was kept for it may be given up. Idempotent."""
        self._pins.pop(holder, None)

    def pinned(self, holder: str) -> tuple[int, str, TokenIds] | None:
        """What is kept for the holder: the slot, its scope and the tokens (T,) of all that is in it. None: nothing."""
        slot = self._pins.get(holder)
        return None if slot is None else (slot, self._contents[slot].scope, self._contents[slot].tokens)

    def held_by(self, owners: Mapping[str, Sequence[Key]]) -> dict[str, int]:
        """How many slots each owner has: those of the sessions named for it, and the one kept for it as a holder. One
        that several have counts for the first of them. Owners that have none are left out."""
        found: dict[str, int] = {}
        counted: set[int] = set()
        for owner, keys in owners.items():
            slots = {self._slots[key] for key in keys if key in self._slots}
            slots |= {self._pins[owner]} if owner in self._pins else set()
            if slots:
                found[owner] = len(slots - counted)
                counted |= slots
        return found

    def sole(self, keys: Iterable[Key]) -> int:
        """How many slots these sessions have."""
        return len({self._slots[key] for key in keys if key in self._slots})

    def condense(self) -> list[Swap]:
        """Close the gaps between live slots: the swaps to make, in order."""
        swaps = []
        while self._slots and max(self._slots.values()) >= len(self._slots):
            gap = self._lowest()
            assert gap is not None  # fewer sessions than the highest of their slots: there is one below it
            swaps.append(self._swap(gap, max(self._slots.values())))
        return swaps

    def usage(self) -> SlotUsage:
        """How much of everything there is."""
        pinned = self._pinned()
        unpinned = [length for slot, length in self.kept().items() if slot not in pinned]
        return SlotUsage(self.total, len(self._slots), len(pinned), len(unpinned), sum(unpinned))

    def kept(self) -> dict[int, int]:
        """How many positions each slot without a session holds; slots that hold none are left out."""
        return {slot: content.findable for slot, content in self._contents.items() if content.session is None}

    def check_integrity(self) -> None:
        """Raises IntegrityError unless sessions, slots and pins name each other and no slot holds more than fits."""
        live = {slot: content.session for slot, content in self._contents.items() if content.session is not None}
        wrong = {
            "slots": not self._contents.keys() <= set(range(self.total)),
            "sessions": live != {slot: key for key, slot in self._slots.items()},
            "pins": any(slot not in self._contents or slot in live for slot in self._pins.values()),
            "promises": len(self._pinned()) >= self.total > 0,
            "lengths": any(
                not 0 <= content.findable <= min(len(content.tokens), self.slot_tokens)
                or (content.session is None and content.findable != len(content.tokens))
                for content in self._contents.values()
            ),
            "empty": any(content.session is None and not content.findable for content in self._contents.values()),
        }
        if any(wrong.values()):
            raise IntegrityError(f"KV slots: {', '.join(name for name, is_wrong in wrong.items() if is_wrong)}")

    # -- the books ---------------------------------------------------------------------------------------------------

    def _best(self, prompt: TokenIds, scope: str) -> tuple[int | None, int]:
        """The slot with the longest usable common prefix, and its length; of equal ones one that needs no copy, then
        the shortest, which is copied soonest."""
        lowest, pinned = self._lowest(), self._pinned()
        best: tuple[int | None, int] = (None, 0)
        best_rank = (0, False, 0)
        for slot, held, content in self._candidates(prompt, scope):
            in_place = slot == lowest and slot not in pinned
            if in_place or content.is_worth_copying(held):
                rank = (held, in_place, -len(content.tokens))
                if rank > best_rank:
                    best, best_rank = (slot, held), rank
        return best

    def _candidates(self, prompt: TokenIds, scope: str) -> Iterator[tuple[int, int, Content]]:
        for slot, content in self._contents.items():
            if content.scope == scope:
                limit = min(content.findable, len(prompt))
                held = self.begins_with(common_prefix(content.tokens[:limit], prompt[:limit]), len(prompt))
                if held:
                    yield slot, held, content

    def _make_room(self, slot: int, source: int | None) -> tuple[tuple[Swap, ...], int | None] | None:
        """Give up or move what is kept in `slot`. Returns the swaps and where the source is after them."""
        pinned = self._pinned()
        if slot not in self._contents or (slot == source and slot not in pinned):
            return (), source
        home = self._home(source)
        if home is None:
            return None
        if home != source:
            self._give_up(home)
        if home == slot:
            return (), source
        swap = self._swap(slot, home)
        moved = {slot: home, home: slot}
        return (swap,), source if source is None else moved.get(source, source)

    def _spare(self, slot: int, held: int) -> int | None:
        """Where all that is kept in `slot` is copied before a session takes over its first `held` positions. None: what
        is beyond them is not worth copying all, or nothing else can make way for it."""
        content, home = self._contents[slot], self._home(slot)
        if home in (None, slot) or not content.is_worth_copying(len(content.tokens) - held):
            return None
        self._give_up(home)
        self._contents[home] = replace(content)
        return home

    def _home(self, source: int | None) -> int | None:
        """Where what stands in the way goes: to a free slot, in place of what was unused longest (which may be itself),
        or else where the source is, which is then taken over."""
        free = next((number for number in reversed(range(self.total)) if number not in self._contents), None)
        if free is not None:
            return free
        kept = self.kept().keys() - self._pinned()
        return min(kept - {source} or kept, key=lambda number: self._contents[number].used, default=None)

    def _give_up(self, slot: int) -> None:
        self.evictions += self._contents.pop(slot, None) is not None

    def _swap(self, first: int, second: int) -> Swap:
        names = {first: second, second: first}
        contents = {names[slot]: self._contents.pop(slot) for slot in names if slot in self._contents}
        self._contents.update(contents)
        for slot, content in contents.items():
            if content.session is not None:
                self._slots[content.session] = slot
        self._pins = {holder: names.get(slot, slot) for holder, slot in self._pins.items()}
        return Swap(first, second)

    def _lowest(self) -> int | None:
        """The first slot that is not live."""
        live = set(self._slots.values())
        return next((slot for slot in range(self.total) if slot not in live), None)

    def _pinned(self) -> set[int]:
        return set(self._pins.values())
