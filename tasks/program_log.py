"""What is told of Programs in logs, by the logger `genpool.programs`: stored ids, ranks, reasons and numbers; never a
name from outside.

A line is the name of its event and then `name=value`: fractions with three places, texts that are more than a word as
JSON strings, `none` for what there is none of. Each transition is told by the process that made it. A change of a
rank's source of capacity is told once by all of them together: what was told last is noted in the store.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping

from pool.program_settings import ProgramSettings
from pool.rules.programs.admission import Decision
from pool.rules.programs.capacity import FRESH_INTERVALS, Edge, edge, usage
from pool.rules.programs.facts import CapacitySource, PauseReason
from pool.rules.programs.ttl import (
    REFERENCE_BATCH,
    REFERENCE_CONTEXT_TOKENS,
    REFERENCE_PREFILL_TOKENS,
    ReferenceCalibration,
    reference_calibration,
)
from pool.store.program_upkeep import Expired, Look
from pool.store.program_views import Snapshot
from pool.store.programs import ProgramStore

log = logging.getLogger("genpool.programs")

_WORD = re.compile(r"[\w.:,@/+-]+")


def tell(level: int, event: str, **values: object) -> None:
    """One line of the log. Call it with names of events as literals: a test looks for them."""
    if log.isEnabledFor(level):
        log.log(level, "%s", " ".join([event, *(f"{name}={_shown(value)}" for name, value in values.items())]))


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text)


def set_log_level(settings: ProgramSettings) -> None:
    """Of this process: as the settings say, whatever else it logs."""
    log.setLevel(settings.log_level.upper())


def tell_calibrations(models: Mapping[str, ProgramSettings]) -> None:
    """Warn of coefficients that nobody measured, with what those in force say of two loads: once for all models of
    which the same is to be said."""
    alike: dict[ReferenceCalibration, list[str]] = {}
    for model, settings in models.items():
        found = reference_calibration(settings)
        if found is not None:
            alike.setdefault(found, []).append(model)
    for found, names in alike.items():
        tell(
            logging.WARNING,
            "program_scheduling_reference_calibration",
            model=",".join(names),
            defaults=",".join(found.fields),
            prefill_tokens=REFERENCE_PREFILL_TOKENS,
            prefill_s=found.prefill_seconds,
            batch=REFERENCE_BATCH,
            context_tokens=REFERENCE_CONTEXT_TOKENS,
            decode_tokens_per_s=found.decode_tokens_per_s,
            advice="those are of a reference machine, and a wrong guess makes decisions worse: genpool calibrate",
        )


class Teller:
    """Tells of one model's Programs."""

    def __init__(self, model: str, store: ProgramStore) -> None:
        self._model = model
        self._store = store

    def admitted(self, decision: Decision) -> None:
        """A Program has become active."""
        limit, gain = decision.limit_tokens, decision.gain
        tell(
            logging.INFO,
            "program_admit",
            model=self._model,
            program=decision.program,
            rank=decision.rank,
            reason=decision.reason,
            used_tokens=decision.used_tokens,
            required_tokens=decision.required_tokens,
            reserve_tokens=round(decision.reserve_tokens),
            limit_tokens=None if limit is None else round(limit),
            active=decision.active,
            gain_s=None if gain is None else gain.gain_s,
        )

    def bound(self, program: str, rank: str) -> None:
        """A Program has become active where they are only bound."""
        tell(logging.INFO, "program_admit", model=self._model, program=program, rank=rank, reason="bound")

    def paused(self, program: str, rank: str, reason: str, *, tokens: int | None = None) -> None:
        """A Program has lost its place; `tokens`: the private ones that this frees, where they are known."""
        freed = "unknown" if tokens is None else tokens
        tell(logging.INFO, "program_pause", model=self._model, program=program, rank=rank, reason=reason, tokens=freed)

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
        if changed is Edge.FALLBACK:
            tell(logging.WARNING, "capacity_observation_fallback", model=self._model, rank=seen.rank.id, source=source)
        else:
            tell(logging.INFO, "capacity_observation_recovered", model=self._model, rank=seen.rank.id, source=source)

    def looked(self, rank: str, look: Look, *, installed: bool) -> None:
        """A rank's engine was looked at; `installed`: the store took what was seen."""
        tell(
            logging.DEBUG,
            "capacity_observation",
            model=self._model,
            rank=rank,
            tokens=look.tokens,
            waiting=look.waiting,
            running=look.running,
            gone=len(look.gone),
            installed=installed,
        )

    def lost(self, rank: str) -> None:
        """The process of a rank is gone, and others go on with its Programs."""
        tell(logging.WARNING, "program_rank_lost", model=self._model, rank=rank)

    def moved(self, rank: str, other: str, count: int) -> None:
        """Programs that waited for a rank that is away wait for another one."""
        tell(logging.INFO, "program_rebind", model=self._model, rank=rank, to=other, programs=count)

    def gone(self, rank: str) -> None:
        """A rank has left the ring."""
        tell(logging.INFO, "program_rank_gone", model=self._model, rank=rank)
