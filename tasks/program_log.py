"""What is told of Programs in logs: stored ids, ranks, reasons and numbers; never a name from outside.

Each transition is told by the process that made it. A change of a rank's source of capacity is told once by all of them
together: what was told last is noted in the store.
"""

from __future__ import annotations

import logging

from pool.program_settings import ProgramSettings
from pool.rules.programs.admission import Decision
from pool.rules.programs.capacity import FRESH_INTERVALS, Edge, edge, usage
from pool.rules.programs.facts import CapacitySource, PauseReason
from pool.rules.programs.ttl import (
    REFERENCE_BATCH,
    REFERENCE_CONTEXT_TOKENS,
    REFERENCE_PREFILL_TOKENS,
    reference_calibration,
)
from pool.store.program_upkeep import Expired
from pool.store.program_views import Snapshot
from pool.store.programs import ProgramStore

log = logging.getLogger("genpool.programs")


def tell_calibration(model: str, settings: ProgramSettings) -> None:
    """Warn of coefficients that nobody measured, with what those in force say of two loads."""
    found = reference_calibration(settings)
    if found is None:
        return
    log.warning(
        "program_scheduling_reference_calibration model=%s defaults=%s: those are of a reference machine, and "
        "scheduling decides by them. A cold prefill of %d tokens counts as %.2f s, and %d requests with %d tokens of "
        "context as %.2f tokens/s",
        model,
        ",".join(found.fields),
        REFERENCE_PREFILL_TOKENS,
        found.prefill_seconds,
        REFERENCE_BATCH,
        REFERENCE_CONTEXT_TOKENS,
        found.decode_tokens_per_s,
    )


class Teller:
    """Tells of one model's Programs."""

    def __init__(self, model: str, store: ProgramStore) -> None:
        self._model = model
        self._store = store

    def admitted(self, decision: Decision) -> None:
        """A Program has become active."""
        gain = decision.gain
        log.info(
            "program_admit model=%s program=%s rank=%s reason=%s used_tokens=%d required_tokens=%d reserve_tokens=%.0f "
            "limit_tokens=%s active=%d gain_s=%s",
            self._model,
            decision.program,
            decision.rank,
            decision.reason,
            decision.used_tokens,
            decision.required_tokens,
            decision.reserve_tokens,
            "none" if decision.limit_tokens is None else f"{decision.limit_tokens:.0f}",
            decision.active,
            "none" if gain is None else f"{gain.gain_s:.3f}",
        )

    def bound(self, program: str, rank: str) -> None:
        """A Program has become active where they are only bound."""
        log.info("program_admit model=%s program=%s rank=%s reason=bound", self._model, program, rank)

    def paused(self, program: str, rank: str, reason: str, *, tokens: int | None = None) -> None:
        """A Program has lost its place; `tokens`: the private ones that this frees, where they are known."""
        log.info(
            "program_pause model=%s program=%s rank=%s reason=%s tokens=%s",
            self._model,
            program,
            rank,
            reason,
            "unknown" if tokens is None else tokens,
        )

    def expired(self, expired: Expired) -> None:
        """A Program's hold has ended."""
        if expired.code == "paused":
            self.paused(expired.program, expired.rank, PauseReason.TTL_EXPIRED)

    def observed(self, seen: Snapshot) -> None:
        """Tell where the used tokens of a rank come from, when that changes. Not before an active Program has been
        there for so long that its engine should have been looked at."""
        rank, settings = seen.rank, self._store.settings
        longest_ms = max((seen.now_ms - each.activated_ms for each in rank.programs), default=0)
        if longest_ms > FRESH_INTERVALS * settings.metrics_interval_seconds * 1000:
            self._tell_source(seen, usage(rank, settings, seen.now_ms).source)

    def _tell_source(self, seen: Snapshot, source: CapacitySource) -> None:
        changed = edge(CapacitySource(seen.told) if seen.told else None, source)
        if changed is None:
            return
        self._store.tell(seen.rank.id, source)
        level = logging.WARNING if changed is Edge.FALLBACK else logging.INFO
        log.log(level, "%s model=%s rank=%s source=%s", changed, self._model, seen.rank.id, source)

    def lost(self, rank: str) -> None:
        """The process of a rank is gone, and others go on with its Programs."""
        log.warning("program_rank_lost model=%s rank=%s", self._model, rank)

    def moved(self, rank: str, other: str, count: int) -> None:
        """Programs that waited for a rank that is away wait for another one."""
        log.info("program_rebind model=%s rank=%s to=%s programs=%d", self._model, rank, other, count)

    def gone(self, rank: str) -> None:
        """A rank has left the ring."""
        log.info("program_rank_gone model=%s rank=%s", self._model, rank)
