"""What is told of Programs in logs: stored ids, ranks, reasons and numbers; never a name from outside."""

from __future__ import annotations

import logging

from pool.program_settings import ProgramSettings
from pool.rules.programs.ttl import (
    REFERENCE_BATCH,
    REFERENCE_CONTEXT_TOKENS,
    REFERENCE_PREFILL_TOKENS,
    reference_calibration,
)

log = logging.getLogger("genpool.programs")


def tell_calibration(model: str, settings: ProgramSettings) -> None:
    """Warn of coefficients that nobody measured, with what those in force say of two loads."""
    found = reference_calibration(settings)
    if found is None:
        return
    log.warning(
        "program_scheduling_reference_calibration: %s: %s are those of a reference machine; a cold prefill of %d "
        "tokens counts as %.2f s, and %d requests with %d tokens of context as %.2f tokens/s. Measure them: scheduling "
        "decides by them.",
        model,
        ", ".join(found.fields),
        REFERENCE_PREFILL_TOKENS,
        found.prefill_seconds,
        REFERENCE_BATCH,
        REFERENCE_CONTEXT_TOKENS,
        found.decode_tokens_per_s,
    )
