"""How much work each model holds, from the store's own indexes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pool.store.connection import Client, state_errors
from pool.store.keys import ModelKeys


@dataclass(frozen=True, slots=True)
class Depth:
    """Jobs of one model: waiting for a worker, and begun by one."""

    queued: int
    running: int


def depths(client: Client, models: Sequence[str], shard: int = 0) -> dict[str, Depth]:
    """Depth by model, in one round trip; O(1) a model. Raises StateUnavailable."""
    pipe = client.pipeline(transaction=False)
    for model in models:
        keys = ModelKeys(f"{model}:{shard}")
        pipe.zcard(keys.index)
        pipe.zcard(keys.leases)
    with state_errors():
        counts = pipe.execute()
    # The two counts are not of one instant: a job may begin in between.
    return {
        model: Depth(queued=max(held - begun, 0), running=begun)
        for model, held, begun in zip(models, counts[::2], counts[1::2], strict=True)
    }
