"""The KV of a loop's sessions in its engine: beginning, growing, saving and leaving, as the settings allow.

What others may find of a session after its end: under `exact` only what gives the same bits as computing it, which is
what was prefilled, or everything where the engine recomputes exactly.
"""

from __future__ import annotations

import logging
from typing import Literal

from pool.errors import ConfigurationError
from pool.rules.batching import first_room, is_resident
from tasks.ports import Engine
from workers.sessions import Session

log = logging.getLogger("genpool.loop")

PrefixReuse = Literal["exact", "all", "off"]


class Residence:
    """Called in the engine's thread. `overcommit`: see `pool.rules.batching.first_room`."""

    def __init__(self, engine: Engine, *, overcommit: float, reuse: PrefixReuse) -> None:
        can = engine.capability()
        if overcommit > 1 and not (can.snapshot or can.recompute_exact):
            raise ConfigurationError(
                "kv_overcommit: must be 1 with this engine, which can neither save nor exactly recompute KV.",
                param="kv_overcommit",
            )
        self._engine = engine
        self._overcommit = overcommit
        self._reuse = reuse
        self._can = can
        self._keeps_output = reuse == "all" or (reuse == "exact" and can.recompute_exact)
        #: Whether sessions that begin with the same prompt share it.
        self.shares = can.prefix_share and reuse != "off"
        #: Holders whose KV outlives sessions, the longest unused first, with the tokens that are kept.
        self._holders: dict[str, int] = {}

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
            return self._restore(session, session.saved)
        room = self.wanted(session)
        held = self._engine.begin(session.id, session.attempt, session.feed, room, self._scope(session))
        if held is None:
            return False
        session.held, session.room = held, room
        return True

    def _restore(self, session: Session, saved: bytes) -> bool:
        room = self.wanted(session)
        feed, scope = session.feed, self._scope(session)
        if not self._engine.restore(session.id, session.attempt, saved, feed, room, scope):
            return False
        session.saved, session.room = None, room
        return True

    def grow(self, session: Session) -> bool:
        """Room for one more position. False: there is none now."""
        if session.held < session.room:
            return True
        if not self._engine.extend(session.id, session.attempt, session.held + 1):
            return False
        session.room = session.held + 1
        return True

    def leave(self, session: Session, *, sound: bool = True) -> None:
        """The session has ended. `sound`: what it holds may be found by others, as far as the settings allow."""
        holder = session.generation.holder if sound and self._reuse != "off" else ""
        if holder:
            self._holders.pop(holder, None)
            self._holders[holder] = session.held if self._keeps_output else min(session.held, session.prompt_tokens)
        self._release(session, keep=sound, holder=holder)

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

    def holdings(self) -> dict[str, int]:
        """Tokens that are kept, by holder."""
        return dict(self._holders)

    def make_way(self) -> bool:
        """Give up what is kept for the holder that has not used it for longest. False: nothing is kept."""
        holder = next(iter(self._holders), None)
        if holder is None:
            return False
        self.unpin(holder)
        return True

    def unpin(self, holder: str) -> None:
        """Nothing is kept for the holder any more."""
        self._holders.pop(holder, None)
        self._engine.unpin(holder)

    def _scope(self, session: Session) -> str:
        """Nothing is shared between scopes."""
        tenant = session.generation.tenant
        return f"{tenant} {session.id} {session.attempt}" if self._reuse == "off" else tenant
