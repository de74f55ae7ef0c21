"""KV in blocks: which session holds which, what is in them, and what is given up for room. The arrays are an engine's.

A *block* is room for a fixed number of positions, and the unit of all counting here. A session's blocks in order are
its *table*. A block that is full of known tokens has a *digest*, of its tokens and all those before them, so equal
digests mean equal content; whoever begins with the same tokens takes that very block into its table. It is never
written again: a session writes behind what it began with. Digests begin with a *scope* (a tenant): nothing is shared
between scopes, so nobody learns from a hit what others sent.

| a block is | when |
|---|---|
| free | nobody can ask for what is in it |
| held | it is in tables, or pinned by a holder (a Program between two requests); counted by `_references` |
| cached | it is neither, but can be found by its digest: given up when room is needed, the longest unused first |

What follows is useless without what is before it, so of a cached block all those before it can be found too, and are
given up after it.

What a session may come to need is its own from the start, so a running one never lacks room, and none is evicted.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


class IntegrityError(RuntimeError):
    """The books contradict themselves: a bug, never a caller's doing."""


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """How many leading tokens two prompts have in common."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    return int(different.argmax()) if different.any() else length


@dataclass(slots=True)
class _Table:
    """A session's blocks; `digests`: those of its leading full blocks whose tokens are known; the first `findable` of
    its blocks have been offered to others of its `scope`."""

    blocks: list[int]
    scope: str
    digests: list[bytes]
    findable: int


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """In blocks: free + cached + held = total; `pinned`: those of `held` that a holder has."""

    total: int
    free: int
    cached: int
    held: int
    pinned: int


@dataclass
class BlockPool:
    """The books of `total` blocks of `block_tokens` positions each. Sessions go by any hashable key."""

    total: int
    block_tokens: int
    evictions: int = 0
    #: By block, whether it is free; and how many are.
    _free: npt.NDArray[np.bool_] = field(init=False)
    _free_count: int = field(init=False)
    #: Unheld blocks with a digest, the longest unused first.
    _cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _references: Counter[int] = field(default_factory=Counter)
    _tables: dict[Hashable, _Table] = field(default_factory=dict)
    _pins: dict[str, list[int]] = field(default_factory=dict)
    _digest_of: dict[int, bytes] = field(default_factory=dict)
    _block_of: dict[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = np.ones(self.total, np.bool_)
        self._free_count = self.total

    def blocks_for(self, positions: int) -> int:
        """How many blocks so many positions take."""
        return -(-positions // self.block_tokens)

    def resident(self, prompt: TokenIds, scope: str) -> int:
        """How many of the prompt's leading positions would be found now."""
        return len(self._found(self._digests(prompt, scope), len(prompt) - 1)) * self.block_tokens

    def begin(
        self, key: Hashable, prompt: TokenIds, positions: int, scope: str = "", *, share: int | None = None
    ) -> int | None:
        """Give a new session room for `positions`; it begins with whatever of `prompt` (P,) is here, at most with its
        first `share` positions where given.

        Returns how many positions that is: whole blocks, never the whole prompt, whose last token has to be computed.
        None, and nothing happens, when there is no room now. Raises ValueError for a session that has begun.
        """
        if key in self._tables:
            raise ValueError("the session has begun")
        digests = self._digests(prompt, scope)
        found = self._found(digests, min(len(prompt) - 1, positions, len(prompt) if share is None else share))
        wanted = self.blocks_for(positions) - len(found)
        if wanted > self._free_count + len(self._cached) - sum(block in self._cached for block in found):
            return None
        for block in found:
            self._refer(block)
        own = self._take(wanted, after=found[-1] if found else -1)
        self._tables[key] = _Table([*found, *own], scope, digests, len(found))
        return len(found) * self.block_tokens

    def extend(self, key: Hashable, positions: int) -> bool:
        """Give a session more room, up to `positions` in all. False, and nothing happens, when there is none now."""
        table = self._tables[key]
        wanted = self.blocks_for(positions) - len(table.blocks)
        if wanted > self._free_count + len(self._cached):
            return False
        table.blocks += self._take(wanted, after=table.blocks[-1] if table.blocks else -1)
        return True

    def written(self, key: Hashable, positions: int) -> None:
        """The session's first `positions` are computed: others may find its full blocks of known tokens."""
        table = self._tables[key]
        table.findable = max(table.findable, min(positions // self.block_tokens, len(table.digests), len(table.blocks)))
        self._offer(table)

    def learn(self, key: Hashable, tokens: TokenIds) -> None:
        """The session's first positions hold `tokens`, prompt and output, and may all be found by others. Raises
        ValueError where it has offered others before."""
        table = self._tables[key]
        digests = self._digests(tokens, table.scope)
        if digests[: table.findable] != table.digests[: table.findable]:
            raise ValueError("the session holds other tokens")
        table.digests = digests
        self.written(key, len(tokens))

    def table(self, key: Hashable) -> Sequence[int]:
        """The session's blocks in order."""
        return self._tables[key].blocks

    def pin(self, holder: str, key: Hashable) -> None:
        """Keep what can be found of the session for `holder`, in place of what it had pinned before."""
        table = self._tables[key]
        self._offer(table)
        blocks = [self._block_of[digest] for digest in table.digests[: table.findable]]
        for block in blocks:
            self._refer(block)
        self.unpin(holder)
        if blocks:
            self._pins[holder] = blocks

    def unpin(self, holder: str) -> None:
        """The holder needs nothing any more. Idempotent."""
        self._let_go(self._pins.pop(holder, []))

    def release(self, key: Hashable) -> None:
        """The session has ended. Idempotent."""
        table = self._tables.pop(key, None)
        if table is None:
            return
        self._offer(table)
        self._let_go(table.blocks)
        # Where another's block stands for one of its own, that one comes before its later ones as well.
        for digest in reversed(table.digests[: table.findable]):
            if self._block_of[digest] in self._cached:
                self._cached.move_to_end(self._block_of[digest])

    def pinned(self, holder: str) -> Sequence[int]:
        """The blocks that are kept for the holder, in order."""
        return self._pins.get(holder, ())

    def held_by(self, owners: Mapping[str, Sequence[Hashable]]) -> dict[str, int]:
        """How many blocks each owner has: those of the sessions named for it, and those pinned for it as a holder. A
        block that several have counts for the first of them. Owners that have none are left out."""
        found: dict[str, int] = {}
        counted: set[int] = set()
        for owner, keys in owners.items():
            blocks = set(self._pins.get(owner, ())).union(*(self._blocks_of(key) for key in keys))
            if blocks:
                found[owner] = len(blocks - counted)
                counted |= blocks
        return found

    def sole(self, keys: Iterable[Hashable]) -> int:
        """How many blocks nobody has but these sessions."""
        had = Counter(block for key in keys for block in self._blocks_of(key))
        return sum(self._references[block] == count for block, count in had.items())

    def _blocks_of(self, key: Hashable) -> Sequence[int]:
        table = self._tables.get(key)
        return () if table is None else table.blocks

    def usage(self) -> BlockUsage:
        """How much of everything there is."""
        pinned = {block for blocks in self._pins.values() for block in blocks}
        held = self.total - self._free_count - len(self._cached)
        return BlockUsage(self.total, self._free_count, len(self._cached), held, len(pinned))

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every block is exactly one of free, cached and held, references are exact, and
        digests and blocks name each other."""
        tables = self._tables.values()
        held = Counter(block for table in tables for block in table.blocks)
        held.update(block for blocks in self._pins.values() for block in blocks)
        free = np.flatnonzero(self._free).tolist()
        wrong = {
            "references": held != self._references,
            "kinds": sorted([*free, *self._cached, *held]) != list(range(self.total)),
            "free": len(free) != self._free_count or not self._digest_of.keys().isdisjoint(free),
            "digests": self._block_of != {digest: block for block, digest in self._digest_of.items()},
            "cached": not self._cached.keys() <= self._digest_of.keys(),
            "tables": any(len(set(table.blocks)) != len(table.blocks) for table in tables),
            "findable": any(table.findable > min(len(table.digests), len(table.blocks)) for table in tables),
        }
        if any(wrong.values()):
            raise IntegrityError(f"KV blocks: {', '.join(name for name, is_wrong in wrong.items() if is_wrong)}")

    # -- the books ---------------------------------------------------------------------------------------------------

    def _digests(self, tokens: TokenIds, scope: str) -> list[bytes]:
        """One for each full block of `tokens`; each covers all before it."""
        chain = hashlib.blake2b(scope.encode(), digest_size=16, person=b"genpool-kv").digest()
        digests = []
        for end in range(self.block_tokens, len(tokens) + 1, self.block_tokens):
            content = np.asarray(tokens[end - self.block_tokens : end], "<i4").tobytes()
            chain = hashlib.blake2b(chain + content, digest_size=16, person=b"genpool-kv").digest()
            digests.append(chain)
        return digests

    def _found(self, digests: Sequence[bytes], positions: int) -> list[int]:
        """The blocks that hold what the digests stand for, in at most so many positions."""
        found = []
        for digest in digests[: max(positions, 0) // self.block_tokens]:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def _offer(self, table: _Table) -> None:
        """Let others find its findable blocks. One of two that came to the same content at the same time stays unfound,
        and is free after its session, or found when the other has been given up."""
        for digest, block in zip(table.digests[: table.findable], table.blocks, strict=False):
            if digest not in self._block_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest

    def _refer(self, block: int) -> None:
        self._cached.pop(block, None)
        self._references[block] += 1

    def _let_go(self, blocks: Sequence[int]) -> None:
        # From the end: what follows is given up first.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            del self._references[block]
            if block in self._digest_of:
                self._cached[block] = None
            else:
                self._set_free(block)

    def _set_free(self, block: int) -> None:
        self._free[block] = True
        self._free_count += 1

    def _take(self, count: int, *, after: int) -> list[int]:
        """`count` blocks of the free and the cached, in a row if there is a row, best behind `after`."""
        if count <= 0:
            return []
        while self._free_count < count:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
            self._set_free(block)
            self.evictions += 1
        taken = self._row(count, after + 1)
        self._free[taken] = False
        self._free_count -= count
        for block in taken:
            self._references[block] += 1
        return taken

    def _row(self, count: int, start: int) -> list[int]:
        """The free row from `start` on or else the first one that is long enough, else the lowest free blocks."""
        if start + count <= self.total and self._free[start : start + count].all():
            return list(range(start, start + count))
        free = np.flatnonzero(self._free)
        rows = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
        first = rows[0] if len(rows) else 0
        chosen: list[int] = free[first : first + count].tolist()
        return chosen
