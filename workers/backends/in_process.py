"""Backends that are engines in the worker's process, driven by the batching loop."""

from __future__ import annotations

from functools import partial

from threadpoolctl import threadpool_limits

from pool.rules.admission import Budgets
from pool.rules.programs.ttl import prefill_seconds
from pool.settings import ModelSettings
from pool.store.ranks import Card
from tasks.config import Settings, offload_folder
from tasks.ports import Engine
from workers.backends.served import Served
from workers.engines import load_engine
from workers.loop import BatchingLoop
from workers.offload import OffloadBudget
from workers.program_residence import ProgramResidence
from workers.weights import ensure_weights


def open_in_process(name: str, model: ModelSettings, settings: Settings, limit: int) -> Served:
    """Load the model `name`. Raises ConfigurationError, or whatever its engine raises."""
    # The engine has threads of its own; BLAS's would spin beside them.
    threadpool_limits(limits=1, user_api="blas")
    weights = None if model.source.startswith("random:") else ensure_weights(model.source)
    engine = load_engine(name, model, weights=weights)
    loop = _loop(name, model, settings, engine, limit)
    return Served(
        runner=loop,
        card=_card(model, engine),
        vocabulary=engine.vocabulary,
        same_bytes=engine.capability().batch_invariant,
        residence=lambda held, on_pause: ProgramResidence(loop, held, on_pause=on_pause),
        close=engine.close,
    )


def _card(model: ModelSettings, engine: Engine) -> Card:
    able = engine.capability()
    return Card(
        context_length=engine.context_length,
        max_positions=min(able.max_positions, engine.kv_usage().total),
        fingerprint=engine.fingerprint(),
        vocabulary=engine.vocabulary.to_blob(),
        logprobs=able.logprobs,
        seed=able.seed,
        backend=model.backend,
    )


def _loop(name: str, model: ModelSettings, settings: Settings, engine: Engine, limit: int) -> BatchingLoop:
    offload = OffloadBudget(
        model.offload_memory_bytes,
        model.offload_disk_bytes,
        offload_folder(settings),
        settings.programs.paused_retention_ttl_seconds,
    )
    return BatchingLoop(
        engine,
        Budgets.of(model),
        limit,
        reuse=model.prefix_reuse,
        target_step_s=model.target_step_seconds,
        offload=offload,
        prefill_seconds=partial(prefill_seconds, settings.programs.of_model(name).prefill_cost_model),
    )
