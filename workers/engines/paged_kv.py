"""The keys and values of all sessions of an engine, in pages of one pool; and one session's as bytes.

A page holds KV_PAGE positions in all layers. The pool is one pair of arrays for everything, which the system backs with
memory where it is first written, so an unused budget costs nothing. Which page is whose is `pool.rules.kv_blocks`'s
business.

What others may begin with is exact: pages full of prompt tokens that were prefilled on the grid. Whatever else is in a
page (a generated token's KV differs in the last bits) stays its session's own, unless its release says all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pool.errors import ConfigurationError
from pool.rules.kv_blocks import BlockPool, IntegrityError, common_prefix
from tasks.ports import Kept, KVRefused, KVUsage, TokenIds
from workers.engines.llama_weights import Floats, LlamaConfig
from workers.engines.members import Key
from workers.engines.paged_attention import KV_PAGE, Run, rows_of
from workers.engines.snapshots import Snapshot


@dataclass(slots=True, eq=False)
class PagedSession:
    """A session's `room` and `length` in positions; it `began` with so many. The first `prefilled` were computed as
    blocks of its prompt. `table`: its pages, of which `runs` are the stretches that lie in a row."""

    key: Key
    scope: str
    prompt: TokenIds
    room: int
    began: int
    length: int
    prefilled: int
    table: Sequence[int] = ()
    runs: Sequence[Run] = ()

    def places(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Page and place in it (n,) of each of the positions [start, stop)."""
        positions = np.arange(start, stop)
        return np.array(self.table)[positions // KV_PAGE], positions % KV_PAGE


class PagedKV:
    """`keys` (layers, pages, kv_heads, head_dim, 64) and `values` (layers, pages, kv_heads, 64, head_dim + 1) float32.

    The extra column of `values` is one at every position that was written: products of attention weights and values
    then hold the weights' sum, the softmax's denominator, added up in the same order as the numerator. All numbers are
    finite, also those that nobody wrote or whose session has ended.
    """

    def __init__(self, config: LlamaConfig, kv_bytes: int) -> None:
        """Raises ConfigurationError where `kv_bytes` is less than a page or more than this machine gives."""
        self._config = config
        page_bytes = position_bytes(config) * KV_PAGE
        pages = kv_bytes // page_bytes
        if pages < 1:
            raise ConfigurationError(
                f"kv_budget_bytes is {kv_bytes}, but a page of {KV_PAGE} positions takes {page_bytes} bytes.",
                param="kv_budget_bytes",
            )
        layers, kv_heads, head_dim = config.layers, config.kv_heads, config.head_dim
        try:
            self.keys: Floats = np.zeros((layers, pages, kv_heads, head_dim, KV_PAGE), np.float32)
            self.values: Floats = np.zeros((layers, pages, kv_heads, KV_PAGE, head_dim + 1), np.float32)
        except MemoryError:
            raise ConfigurationError(
                f"kv_budget_bytes is {kv_bytes}, which is more than this machine gives.", param="kv_budget_bytes"
            ) from None
        self._books = BlockPool(pages, KV_PAGE)
        self._sessions: dict[Key, PagedSession] = {}
        #: Scope and tokens (T,) of what is kept for each holder.
        self._kept: dict[str, tuple[str, TokenIds]] = {}

    @property
    def positions(self) -> int:
        """Positions in all."""
        return self._books.total * KV_PAGE

    def get(self, key: Key) -> PagedSession | None:
        return self._sessions.get(key)

    def resident(self, prompt: TokenIds, scope: str) -> int:
        """See `tasks.ports.Engine.resident`."""
        return self._books.resident(prompt, scope)

    def begin(
        self, key: Key, prompt: TokenIds, positions: int, scope: str, *, share: int | None = None
    ) -> PagedSession | None:
        """See `tasks.ports.Engine.begin`. `share`: how many positions of the prompt may be others', if not all."""
        found = self._books.begin(key, prompt, positions, scope, share=share)
        if found is None:
            return None
        session = PagedSession(key, scope, np.array(prompt, np.int32), positions, found, found, found)
        self._map(session)
        self._sessions[key] = session
        return session

    def extend(self, key: Key, positions: int) -> bool:
        """See `tasks.ports.Engine.extend`."""
        session = self._sessions.get(key)
        if session is None or not self._books.extend(key, positions):
            return False
        session.room = max(session.room, positions)
        self._map(session)
        return True

    def advance(self, session: PagedSession, stop: int, *, prefilled: int) -> None:
        """Positions up to `stop` are written, those up to `prefilled` as blocks of tokens in a row."""
        session.length = stop
        if prefilled > session.prefilled:
            session.prefilled = prefilled
            self._books.written(session.key, prefilled)

    def wipe(self, session: PagedSession, stop: int) -> None:
        """Make [length, stop) finite again: whoever has these pages later multiplies what is there by zero."""
        pages, places = session.places(session.length, stop)
        self.keys[:, pages, :, :, places] = 0
        self.values[:, pages, :, places] = 0

    def release(self, key: Key, tokens: TokenIds | None = None, holder: str = "") -> None:
        """See `tasks.ports.Engine.release`."""
        session = self._sessions.pop(key, None)
        if session is None:
            return
        known = session.prompt
        if tokens is not None and len(tokens) >= session.length:
            known = tokens[: session.length]
            self._books.learn(key, known)
        if holder:
            self._pin(holder, session, known)
        self._books.release(key)

    def _pin(self, holder: str, session: PagedSession, known: TokenIds) -> None:
        """Keep for the holder what can be found of the session, which holds the tokens `known` (T,), or the first of
        them."""
        self._books.pin(holder, session.key)
        kept = len(self._books.pinned(holder)) * KV_PAGE
        self._kept.pop(holder, None)
        if kept:
            self._kept[holder] = session.scope, np.array(known[:kept], np.int32)

    def unpin(self, holder: str) -> None:
        """See `tasks.ports.Engine.unpin`."""
        self._books.unpin(holder)
        self._kept.pop(holder, None)

    def kept_for(self, holder: str) -> int:
        """See `tasks.ports.Engine.kept_for`."""
        return len(self._books.pinned(holder)) * KV_PAGE

    def held_by(self, owners: Mapping[str, Sequence[Key]]) -> dict[str, int]:
        """See `tasks.ports.Engine.held_by`."""
        return {owner: pages * KV_PAGE for owner, pages in self._books.held_by(owners).items()}

    def sole(self, keys: Sequence[Key]) -> int:
        """See `tasks.ports.Engine.sole`."""
        return self._books.sole(keys) * KV_PAGE

    def usage(self) -> KVUsage:
        """See `tasks.ports.KVUsage`."""
        usage = self._books.usage()
        return KVUsage(
            total=usage.total * KV_PAGE,
            held=usage.held * KV_PAGE,
            pinned=usage.pinned * KV_PAGE,
            cached=usage.cached * KV_PAGE,
            evictions=self._books.evictions,
        )

    def check_integrity(self) -> None:
        """See `tasks.ports.Engine.check_integrity`."""
        self._books.check_integrity()
        for holder, (_, tokens) in self._kept.items():
            if len(tokens) != len(self._books.pinned(holder)) * KV_PAGE:
                raise IntegrityError("KV pages: a holder's tokens are not those of its pages")

    def clear(self) -> None:
        """Forget all sessions, and all KV."""
        for key in list(self._sessions):
            self.release(key)
        for holder in list(self._kept):
            self.unpin(holder)
        self.keys, self.values = self.keys[:, :0], self.values[:, :0]

    # -- bytes -------------------------------------------------------------------------------------------------------

    def to_bytes(self, key: Key, fingerprint: str) -> bytes | None:
        """All positions of the session, with a header that names the engine's fingerprint. None: it holds nothing."""
        session = self._sessions.get(key)
        if session is None or not session.length:
            return None
        pages, places = session.places(0, session.length)
        # (length, layers, kv_heads, head_dim) both
        payload = self.keys[:, pages, :, :, places].tobytes() + self.values[:, pages, :, places, :-1].tobytes()
        return Snapshot(session.length, session.prefilled, payload).to_bytes(fingerprint, session.prompt)

    def from_bytes(
        self, key: Key, fingerprint: str, blob: bytes, prompt: TokenIds, positions: int, scope: str
    ) -> bool | None:
        """Begin a session as `to_bytes` saw it. False, and nothing happens, for bytes that are damaged, of another
        fingerprint or another prompt; None when there is no room."""
        snapshot = Snapshot.from_bytes(blob, fingerprint, prompt)
        if snapshot is None:
            return False
        config, length = self._config, snapshot.length
        shape = (2, length, config.layers, config.kv_heads, config.head_dim)
        if len(snapshot.payload) != 4 * np.prod(shape) or length > positions:
            return False
        session = self.begin(key, prompt, positions, scope, share=length)
        if session is None:
            return None
        start = session.length
        pages, places = session.places(start, length)
        keys, values = np.frombuffer(snapshot.payload, np.float32).reshape(shape)
        self.keys[:, pages, :, :, places] = keys[start:]
        self.values[:, pages, :, places, :-1] = values[start:]
        self.values[:, pages, :, places, -1] = 1
        self.advance(session, length, prefilled=snapshot.prefilled)
        return True

    def export(self, holder: str, fingerprint: str) -> Kept | None:
        """See `tasks.ports.Engine.export`: whole pages, as they are."""
        if holder not in self._kept:
            return None
        scope, tokens = self._kept[holder]
        pages = list(self._books.pinned(holder))
        payload = self.keys[:, pages].tobytes() + self.values[:, pages].tobytes()
        return Kept(scope, tokens, Snapshot(len(tokens), len(tokens), payload).to_bytes(fingerprint, tokens, scope))

    def begin_from(
        self, kept: Kept, key: Key, fingerprint: str, prompt: TokenIds, positions: int, scope: str
    ) -> PagedSession | None:
        """See `tasks.ports.Engine.begin_from`."""
        session = self.begin(key, prompt, positions, scope)
        if session is None:
            return None
        try:
            # Only now: it looks at every byte, and a session may ask for room again and again.
            keys, values = self._pages_of(Snapshot.of_kept(kept, fingerprint, scope))
        except KVRefused:
            self.release(key)
            raise
        first = session.length // KV_PAGE
        stop = min(common_prefix(kept.tokens, prompt), len(prompt) - 1, positions) // KV_PAGE
        if stop > first:
            pages = list(session.table[first:stop])
            self.keys[:, pages] = keys[:, first:stop]
            self.values[:, pages] = values[:, first:stop]
            self.advance(session, stop * KV_PAGE, prefilled=stop * KV_PAGE)
        return session

    def _pages_of(self, snapshot: Snapshot) -> tuple[Floats, Floats]:
        """Keys and values, in the pool's shapes. Raises KVRefused for another size."""
        pages, pool = snapshot.length // KV_PAGE, (self.keys, self.values)
        shapes = [(array.shape[0], pages, *array.shape[2:]) for array in pool]
        sizes = [int(np.prod(shape)) for shape in shapes]
        if len(snapshot.payload) != 4 * sum(sizes):
            raise KVRefused("it is of another size")
        numbers = np.frombuffer(snapshot.payload, np.float32)
        return numbers[: sizes[0]].reshape(shapes[0]), numbers[sizes[0] :].reshape(shapes[1])

    def _map(self, session: PagedSession) -> None:
        session.table = self._books.table(session.key)
        session.runs = rows_of(session.table)


def position_bytes(config: LlamaConfig) -> int:
    """Bytes of KV one position takes."""
    return config.layers * config.kv_heads * (2 * config.head_dim + 1) * 4
