"""What an engine holds for holders (Programs): who has how much, what stays between two requests, what leaves the
engine and comes back.

A holder *has* what its live sessions hold and what is kept (pinned) for it after their end. All of it counts, room that
sessions were given and have not filled included: nobody else can have it. What sessions of nobody hold, and what is
merely cached, counts for no holder; what several holders have counts for the one that was here first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pool.rules.kv_blocks import IntegrityError, common_prefix
from pool.rules.offloading import Pace, is_cheaper
from tasks.ports import Engine, KVRefused, KVUsage, SessionKey
from workers.hints import Hint, HintResult
from workers.offload import Offloaded, OffloadStore
from workers.sessions import Session
from workers.telemetry import Telemetry

log = logging.getLogger("genpool.loop")

_TOO_LARGE = "it is larger than the budget"

#: Seconds that prefilling so many uncached tokens takes.
PrefillSeconds = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Holdings:
    """As of one moment: positions by holder, of all who have anything; `offloaded`: those of whom there is something
    outside the engine."""

    tokens: dict[str, int] = field(default_factory=dict)
    offloaded: frozenset[str] = frozenset()


class Holders:
    """Called in the engine's thread. `keeps`: whether what is kept can be found by anybody; `store`: None where nothing
    leaves the engine."""

    def __init__(
        self,
        engine: Engine,
        telemetry: Telemetry,
        *,
        keeps: bool,
        store: OffloadStore | None,
        prefill_seconds: PrefillSeconds,
    ) -> None:
        self._engine = engine
        self._telemetry = telemetry
        self._keeps = keeps
        self._store = store
        self._prefill_seconds = prefill_seconds
        self._restore_pace = Pace()
        #: For whom something is kept after its sessions' end, the longest unused first.
        self._kept: dict[str, None] = {}
        #: Live sessions of each, in the order in which they were first here.
        self._owners: dict[str, dict[SessionKey, None]] = {}
        #: Offloads whose bytes are being written.
        self._leaving: dict[str, Offloaded] = {}
        self._pinned = 0
        self._changed = False

    # -- sessions ----------------------------------------------------------------------------------------------------

    def begin(self, session: Session, room: int, scope: str) -> int | None:
        """`Engine.begin`, with what was offloaded for the session's holder where that is worth it."""
        entry = self._worth_restoring(session, scope)
        if entry is not None and entry.blob is not None:
            try:
                return self._restore(entry, session, room, scope)
            except KVRefused as refused:
                self._refused(session.generation.holder, str(refused))
        return self._engine.begin(session.id, session.attempt, session.feed, room, scope)

    def is_loading(self, session: Session, scope: str) -> bool:
        """Whether what it is worth waiting for is still being read from disk."""
        entry = self._worth_restoring(session, scope)
        if entry is None or entry.blob is not None:
            return False
        assert self._store is not None
        return self._store.fetch(session.generation.holder) is None

    def _restore(self, entry: Offloaded, session: Session, room: int, scope: str) -> int | None:
        assert self._store is not None
        kept = self._store.fetch(session.generation.holder)
        assert kept is not None
        before = self._engine.resident(session.feed, scope)
        began_s = self._telemetry.clock()
        held = self._engine.begin_from(kept, session.id, session.attempt, session.feed, room, scope)
        if held is not None:
            self._restore_pace.learn(entry.size, self._telemetry.clock() - began_s)
            self._telemetry.restores += 1
            self._telemetry.restored_tokens += max(held - before, 0)
            self._forget_offloaded(session.generation.holder)
        return held

    def _worth_restoring(self, session: Session, scope: str) -> Offloaded | None:
        """What was offloaded for its holder, where putting it back is cheaper than computing the prompt."""
        entry = None if self._store is None else self._store.get(session.generation.holder)
        if entry is None or self._store is None or entry.kept.scope != scope:
            return None
        prompt = session.feed
        restored = min(common_prefix(entry.kept.tokens, prompt), len(prompt) - 1)
        seconds = self._restore_pace.seconds(entry.size)
        if entry.blob is None:
            seconds += self._store.disk_pace.seconds(entry.size)
        cheaper = is_cheaper(
            len(prompt),
            resident=self._engine.resident(prompt, scope),
            restored=restored // self._engine.prefill_grid * self._engine.prefill_grid,
            restore_seconds=seconds,
            prefill_seconds=self._prefill_seconds,
        )
        return entry if cheaper else None

    def _refused(self, holder: str, reason: str) -> None:
        log.warning("offloaded KV of %s is refused: %s; its prompt is computed again", holder, reason)
        self._telemetry.restore_failures += 1
        self._forget_offloaded(holder)

    def entered(self, session: Session) -> None:
        """It holds KV now."""
        if session.generation.holder:
            self._owners.setdefault(session.generation.holder, {})[session.id, session.attempt] = None
            self._changed = True

    def grew(self, session: Session) -> None:
        """It has more room now."""
        self._changed = self._changed or bool(session.generation.holder)

    def left(self, session: Session) -> None:
        """It holds no KV any more."""
        self._owners.get(session.generation.holder, {}).pop((session.id, session.attempt), None)
        self._changed = True

    # -- what is kept ------------------------------------------------------------------------------------------------

    def keep(self, session: Session) -> str:
        """The holder for whom its KV is kept after its end; "" for nobody. What was offloaded is out of date then."""
        holder = session.generation.holder if self._keeps else ""
        if holder:
            self._use(holder)
            self._forget_offloaded(holder)
        return holder

    def _use(self, holder: str) -> None:
        self._kept.pop(holder, None)
        self._kept[holder] = None

    def make_way(self) -> bool:
        """Give up what is kept for the holder that has not used it for longest. False: nothing is kept."""
        holder = next(iter(self._kept), None)
        if holder is None:
            return False
        self.unpin(holder)
        return True

    def unpin(self, holder: str) -> None:
        """Nothing is kept in the engine for the holder any more."""
        self._kept.pop(holder, None)
        self._engine.unpin(holder)
        self._changed = True

    def drop(self, holder: str) -> None:
        """Nothing is kept for the holder anywhere."""
        self.unpin(holder)
        self._forget_offloaded(holder)

    def _forget_offloaded(self, holder: str) -> None:
        self._leaving.pop(holder, None)
        if self._store is not None:
            self._store.drop(holder)
            self._changed = True

    def return_seconds_per_token(self) -> float:
        """What it takes per position to move KV out and to put it back, memory to memory; infinity before any was, and
        where none is moved. For other threads, too."""
        return 2 * self._restore_pace.seconds(self._engine.bytes_per_token)

    # -- hints -------------------------------------------------------------------------------------------------------

    def apply(self, hint: Hint) -> HintResult | None:
        """Do as a hint says, or say why not. None: not yet."""
        if hint.action == "offload":
            return self._offload(hint)
        if hint.action == "retain":
            return self._retain(hint)
        before = self._engine.kv_usage().held
        self.drop(hint.holder)
        return hint.applied(before - self._engine.kv_usage().held)

    def abandon(self, hint: Hint) -> None:
        """It is not to be done any more; what was begun is undone."""
        if hint.holder in self._leaving:
            self._forget_offloaded(hint.holder)

    def _retain(self, hint: Hint) -> HintResult:
        """What is kept is given up after all else."""
        if hint.holder in self._kept:
            self._use(hint.holder)
        if self._store is not None:
            self._store.touch(hint.holder)
        return hint.applied()

    def _offload(self, hint: Hint) -> HintResult | None:
        assert self._store is not None
        entry = self._leaving.get(hint.holder)
        if entry is None:
            made = self._export(hint)
            if not isinstance(made, Offloaded):
                return made
            entry = self._leaving[hint.holder] = made
        if not entry.failed and not self._store.is_safe(entry):
            return None
        del self._leaving[hint.holder]
        if entry.failed or self._store.get(hint.holder) is not entry:
            return self._not_offloaded(hint, "it could not be written")
        before = self._engine.kv_usage().held
        self.unpin(hint.holder)
        self._telemetry.offloads += 1
        return hint.applied(before - self._engine.kv_usage().held)

    def _export(self, hint: Hint) -> Offloaded | HintResult | None:
        """Its bytes, which may have to be written yet. None: there is no room for them yet."""
        assert self._store is not None
        tokens = self._engine.kept_for(hint.holder)
        if not tokens:
            return self._not_offloaded(hint, "nothing is kept for it")
        # It will not be less; how much more its headers take shows afterwards.
        room = self._store.room_for(tokens * self._engine.bytes_per_token)
        if not room:
            return None if room is None else self._not_offloaded(hint, _TOO_LARGE)
        began_s = self._telemetry.clock()
        kept = self._engine.export(hint.holder)
        if kept is None:
            return self._not_offloaded(hint, "the engine cannot export it")
        room = self._store.room_for(len(kept.blob))
        if not room:
            return None if room is None else self._not_offloaded(hint, _TOO_LARGE)
        if self._restore_pace.seconds_per_byte is None:
            # Until something was restored: the same bytes, the other way.
            self._restore_pace.learn(len(kept.blob), self._telemetry.clock() - began_s)
        return self._store.put(hint.holder, kept)

    def _not_offloaded(self, hint: Hint, reason: str) -> HintResult:
        self._telemetry.offload_failures += 1
        return hint.failed(reason)

    # -- what others see ---------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Take note of what the disk has done; whether there was anything."""
        moved = self._store is not None and self._store.poll()
        self._changed = self._changed or moved
        return moved

    def news(self, usage: KVUsage) -> Holdings | None:
        """Who has what now. None: nothing has changed since the last call. An engine that loses KV says so in its usage
        alone."""
        if not self._changed and usage.pinned == self._pinned:
            return None
        self._changed, self._pinned = False, usage.pinned
        tokens = self._engine.held_by(self._all())
        self._owners = {holder: keys for holder, keys in self._owners.items() if keys or holder in tokens}
        # Of a short prompt nothing was kept, and an engine may lose what was.
        self._kept = {holder: None for holder in self._kept if holder in tokens}
        if self._store is None:
            return Holdings(tokens)
        self._telemetry.see_offloaded(self._store)
        return Holdings(tokens, self._store.holders())

    def _all(self) -> dict[str, Sequence[SessionKey]]:
        """The live sessions of everybody, those first that were here first."""
        return {holder: tuple(self._owners.get(holder, ())) for holder in (*self._owners, *self._kept)}

    def check_integrity(self, usage: KVUsage, live: Iterable[Session]) -> None:
        """Raises IntegrityError when the books of holders contradict the engine's, or those of what was offloaded."""
        sessions = {(each.id, each.attempt): each.generation.holder for each in live if each.generation.holder}
        known = {key: holder for holder, keys in self._owners.items() for key in keys}
        pinned = sum(self._engine.held_by(dict.fromkeys(self._kept, ())).values())
        wrong = {
            "sessions": sessions != known,
            "pins": pinned != usage.pinned,
            "sum": sum(self._engine.held_by(self._all()).values()) > usage.held,
        }
        if any(wrong.values()):
            raise IntegrityError(f"holders: {', '.join(name for name, is_wrong in wrong.items() if is_wrong)}")
        if self._store is not None:
            self._store.check_integrity()

    def close(self) -> None:
        """Forget all that was kept or offloaded."""
        while self.make_way():
            pass
        if self._store is not None:
            self._store.close()
            self._changed = True
