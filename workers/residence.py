"""The KV of a loop's sessions in its engine: beginning, growing, saving and leaving, as the settings allow. What is
kept for holders is `workers/holders.py`'s.

What others may find of a session after its end: under `exact` only what gives the same bits as computing it, which is
what was prefilled, or everything where the engine recomputes exactly.
"""

from __future__ import annotations

import logging
from typing import Literal

from pool.errors import ConfigurationError
from pool.rules.batching import first_room, is_resident
from tasks.ports import Engine
from workers.holders import Holders, PrefillSeconds
from workers.offload import OffloadStore
from workers.sessions import Session
from workers.telemetry import Telemetry

log = logging.getLogger("genpool.loop")

PrefixReuse = Literal["exact", "all", "off"]


class Residence:
    """Called in the engine's thread. `overcommit`: see `pool.rules.batching.first_room`; `store`: for what leaves the
    engine, if anything may; `prefill_seconds`: what it costs to compute so many tokens again."""

    def __init__(
        self,
        engine: Engine,
        telemetry: Telemetry,
        *,
        overcommit: float,
        reuse: PrefixReuse,
        store: OffloadStore | None = None,
        prefill_seconds: PrefillSeconds,
    ) -> None:
        can = engine.capability()
        if overcommit > 1 and not (can.snapshot or can.recompute_exact):
            raise ConfigurationError(
                "kv_overcommit: must be 1 with this engine, which can neither save nor exactly recompute KV.",
                param="kv_overcommit",
            )
        self._engine = engine
        self._telemetry = telemetry
        self._overcommit = overcommit
        self._reuse = reuse
        self._can = can
        self._keeps_output = reuse == "all" or (reuse == "exact" and can.recompute_exact)
        #: Whether sessions that begin with the same prompt share it.
        self.shares = can.prefix_share and reuse != "off"
        self.holders = Holders(engine, telemetry, keeps=reuse != "off", store=store, prefill_seconds=prefill_seconds)

    @property
    def can_preempt(self) -> bool:
        """Whether a live session can leave and come back with the same tokens."""
        return self._can.snapshot or self._can.recompute_exact

    def wanted(self, session: Session) -> int:
        """Positions it asks for when it begins or comes back."""
        known = len(session.feed) if session.saved is None else max(session.held + 1, len(session.feed))
        return first_room(known, session.peak_positions, self._overcommit)

    def enter(self, session: Session) -> bool:
        """Begin a session, or restore one that was saved. False: there is no room now, and nothing has happened."""
        if session.saved is not None:
            restored = self._restore(session, session.saved)
            if restored is not False:
                return bool(restored)
            log.warning("a saved session cannot be restored; its tokens are fed again")
            self._telemetry.cache_misses += 1
            self.forget(session)
        room = self.wanted(session)
        held = self.holders.begin(session, room, self._scope(session))
        if held is None:
            return False
        session.held, session.room = held, room
        self.holders.entered(session)
        return True

    def _restore(self, session: Session, saved: bytes) -> bool | None:
        """See `Engine.restore`."""
        room = self.wanted(session)
        feed, scope = session.feed, self._scope(session)
        restored = self._engine.restore(session.id, session.attempt, saved, feed, room, scope)
        if restored:
            session.saved, session.room = None, room
            self.holders.entered(session)
        return restored

    def is_loading(self, session: Session) -> bool:
        """Whether it waits for what is being read from disk."""
        return session.saved is None and self.holders.is_loading(session, self._scope(session))

    def grow(self, session: Session) -> bool:
        """Room for one more position. False: there is none now."""
        if session.held < session.room:
            return True
        if not self._engine.extend(session.id, session.attempt, session.held + 1):
            return False
        session.room = session.held + 1
        self.holders.grew(session)
        return True

    def leave(self, session: Session, *, sound: bool = True) -> None:
        """The session has ended. `sound`: what it holds may be found by others, as far as the settings allow."""
        self._release(session, keep=sound, holder=self.holders.keep(session) if sound else "")

    def save(self, session: Session) -> None:
        """Take a live session out. It comes back by `enter`: with its KV where the engine can save it, else by feeding
        its tokens again, which is the path of a takeover."""
        saved = self._snapshot(session)
        self._release(session, keep=saved is None)
        session.room, session.saved = 0, saved
        if saved is None:
            self.forget(session)

    def _release(self, session: Session, *, keep: bool, holder: str = "") -> None:
        keep = keep and self._keeps_output and session.held > 0
        tokens = session.known(session.held) if keep else None
        try:
            self._engine.release(session.id, session.attempt, tokens=tokens, holder=holder)
        except Exception as error:  # noqa: BLE001 - the session leaves all the same; an idle moment checks the books
            log.error("releasing a session's KV failed: %s", type(error).__name__)
        self.holders.left(session)

    def forget(self, session: Session) -> None:
        """Its KV is gone: it begins anew, and everything is fed again."""
        session.rewind(with_output=self._can.recompute_exact)

    def _snapshot(self, session: Session) -> bytes | None:
        if not self._can.snapshot or session.held == 0:
            return None
        try:
            return self._engine.snapshot(session.id, session.attempt)
        except Exception as error:  # noqa: BLE001 - most likely no memory: recomputing needs none
            log.warning("saving a session's KV failed: %s", type(error).__name__)
            return None

    def is_resident(self, session: Session) -> bool:
        """Whether so much of its prompt is here that it may pass others."""
        if session.saved is not None or not self.shares:
            return False
        return is_resident(self._engine.resident(session.feed, self._scope(session)), len(session.feed))

    def _scope(self, session: Session) -> str:
        """Nothing is shared between scopes."""
        tenant = session.generation.tenant
        return f"{tenant} {session.id} {session.attempt}" if self._reuse == "off" else tenant
