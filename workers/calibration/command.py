"""`genpool calibrate`: a catalogue model through the calibration, and its result in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from pool.rules.admission import Budgets
from pool.settings import ModelSettings
from tasks.ports import Engine
from workers.calibration.document import ALPHA_NAMES, DECODE_NAMES, PREFILL_NAMES
from workers.calibration.fit import Fit
from workers.calibration.measuring import Bench, Progress, measure, ordinary_tokens
from workers.calibration.plan import Room
from workers.calibration.results import Calibration, calibrated
from workers.engines import load_engine
from workers.loop import BatchingLoop

Rows = tuple[list[str], list[list[str]]]


@dataclass(frozen=True, slots=True)
class Deployment:
    """What coefficients hold for. `kv_tokens`: positions of KV in all; `sessions`: at once."""

    backend: str
    fingerprint: str
    context_length: int
    kv_tokens: int
    sessions: int
    prefill_tokens_per_step: int

    def as_metadata(self) -> Mapping[str, Any]:
        """As it stands in `calibration.json`."""
        return {
            "deployment": {
                "engine": self.backend,
                "fingerprint": self.fingerprint,
                "max_model_len": self.context_length,
                "kv_tokens": self.kv_tokens,
                "max_sessions": self.sessions,
                "max_prefill_tokens_per_tick": self.prefill_tokens_per_step,
            }
        }


def calibrate_model(
    name: str,
    model: ModelSettings,
    weights: Path | None,
    *,
    concurrency: int | None,
    seconds: float,
    seed: int,
    progress: Progress,
) -> tuple[Calibration, Deployment]:
    """Load the model as its settings say, and calibrate it with up to `concurrency` generations at once (None:
    `target_inflight`). Raises what `load_engine` and `measure` raise."""
    wanted = concurrency or model.target_inflight
    model = model.model_copy(update={"target_inflight": wanted})
    # The engine's products run one after another; BLAS's threads would spin beside its own.
    with threadpool_limits(limits=1, user_api="blas"):
        engine = load_engine(name, model, weights=weights)
        try:
            budgets = replace(Budgets.of(model), kv_overcommit=1.0)
            # What is computed is to be computed: nothing of a prompt is there already.
            loop = BatchingLoop(engine, budgets, min(wanted, model.max_batch_size), reuse="off")
            room = _room(engine, loop)
            words = engine.vocabulary
            ordinary = ordinary_tokens([words.token_bytes(token) for token in range(words.size)])
            found = measure(Bench(loop, ordinary, seed=seed), room, seconds=seconds, seed=seed, progress=progress)
            deployment = Deployment(
                model.backend, engine.fingerprint(), engine.context_length, room.kv_positions, room.sessions,
                room.chunk_tokens,
            )  # fmt: skip
        finally:
            engine.close()
    return calibrated(found), deployment


def _room(engine: Engine, loop: BatchingLoop) -> Room:
    return Room(
        longest_tokens=min(engine.context_length, engine.capability().max_positions),
        kv_positions=engine.kv_usage().total,
        sessions=loop.effective_limit(),
        grid=engine.prefill_grid,
        chunk_tokens=max(loop.budgets.max_prefill_tokens_per_tick, engine.prefill_grid),
    )


def coefficients_table(found: Calibration) -> Rows:
    """Each coefficient with its standard error."""
    fits = [(found.prefill, PREFILL_NAMES), (found.decode, DECODE_NAMES)]
    if found.alpha is not None:
        fits.append((found.alpha, ALPHA_NAMES))
    rows = [row for fit, names in fits for row in _rows(fit, list(names.values()))]
    return ["COEFFICIENT", "VALUE", "STANDARD ERROR"], rows


def _rows(fit: Fit, names: list[str]) -> list[list[str]]:
    return [
        [name, f"{value:.6g}", "-" if error is None else f"{error:.2g}"]
        for name, value, error in zip(names, fit.coefficients, fit.standard_errors, strict=True)
    ]


def held_out_table(found: Calibration) -> Rows:
    """What no fit saw: predicted against measured."""
    return ["HELD OUT", "MEASURED", "PREDICTED", "ERROR"], [
        [check.what, f"{check.measured:.4g}", f"{check.predicted:.4g}", f"{check.error:+.1%}"]
        for check in found.held_out()
    ]


def remarks(found: Calibration) -> list[str]:
    """How good the fits are, and what to know of the measurement."""
    lines = [
        f"{name}: R² {fit.r_squared:.4f}, largest residual {fit.max_relative_residual:.1%}"
        for name, fit in (("prefill", found.prefill), ("decode", found.decode))
    ]
    measured = found.measurement
    lines.append(
        f"{measured.rounds} rounds; samples took {measured.samples.disturbance():.0%} longer on average than the "
        "fastest of their point: on a quiet machine little"
    )
    if measured.cut:
        lines.append(f"prompts of more than {measured.longest_tokens} tokens take too long for this time: --seconds")
    if found.alpha is None:
        lines.append("one generation at a time: nothing decodes beside a prefill, and alpha keeps its default")
    return lines
