"""The work of the loop benchmark, the same for the whole stack and for the bare engine."""

from __future__ import annotations

from pool.settings import ModelSettings
from tasks.payloads import Sampling

MODEL = "bench"
STREAMS = 8
#: Greedy, never ended by the model: all streams are equally long, and their tokens are the same wherever they run.
SAMPLING = Sampling(temperature=0.0, ignore_eos=True)
SEED = 0
#: Between two requests of the first-token phase: the system is idle when the next one comes.
PAUSE_S = 0.02
#: Output tokens of such a request: the first is timed, the others show that it was not the end.
FOLLOWING_TOKENS = 4
KV_BUDGET_BYTES = 2**30


def prompts(length: int, vocabulary_size: int) -> list[list[int]]:
    """One prompt of `length` token ids a stream, all different, of ordinary tokens."""
    low, high = 10, min(vocabulary_size, 500)
    return [[low + (7 * at + 31 * stream) % (high - low) for at in range(length)] for stream in range(STREAMS)]


def model_settings(source: str, threads: int) -> ModelSettings:
    """The model as both sides load it."""
    return ModelSettings(
        source=source,
        threads=threads,
        target_inflight=STREAMS,
        max_batch_size=STREAMS,
        kv_budget_bytes=KV_BUDGET_BYTES,
    )
