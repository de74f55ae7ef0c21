"""What is in a slot of KV, and what becomes of it: the words of `kv_slots`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
#: A session, by its id and epoch.
Key = tuple[str, int]

#: Copying a position costs at most a sixteenth of computing it (measured: 0.03 to 0.09 ms against 1.4 ms), and all of a
#: source is copied, whatever the part that is in common. So a copy pays when at least this share is in common.
WORTH_SHARE = 16
#: Less is neither copied, which has a fixed cost about that of a decode row, nor kept.
WORTH_TOKENS = 16


def all_but_last(common: int, prompt_tokens: int) -> int:
    """A session may begin with any part of a prompt, but its last token is computed."""
    return min(common, prompt_tokens - 1)


@dataclass(frozen=True, slots=True)
class Swap:
    """The contents of two slots change places; either may be free."""

    first: int
    second: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a new session runs. What the engine does, in this order: `swaps`; copy all of `slot` to `spare`, to be kept
    there; copy all of `source` to `slot` (None: no copy); cut `slot` to the `held` positions that it begins with."""

    slot: int
    held: int
    swaps: tuple[Swap, ...] = ()
    source: int | None = None
    spare: int | None = None


@dataclass(frozen=True, slots=True)
class SlotUsage:
    """In slots; `cached_tokens`: positions that are kept and not pinned."""

    total: int
    live: int
    pinned: int
    kept: int
    cached_tokens: int


@dataclass(slots=True)
class Content:
    """What a slot holds. `tokens` (T,): those known of it, positions 0 .. T - 1; the first `findable` are computed, so
    that others may begin with them. `session`: the live one; `used`: when it was last asked for, a running number."""

    scope: str
    tokens: TokenIds
    findable: int = 0
    session: Key | None = None
    used: int = 0

    def is_worth_copying(self, needed: int) -> bool:
        return needed >= WORTH_TOKENS and needed * WORTH_SHARE >= len(self.tokens)
