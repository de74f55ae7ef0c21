"""The sweep: the same requests at one concurrency after another, each on a fresh engine. What batching gains, and that
it changes no token.

Without a budget of its own, a level has room for all requests at once, so that nothing is given up and only the
concurrency differs. Figures are exact, and of no time: they are the same on every machine.

Levels may be disturbed: by sessions that give way to each other or are cancelled, by prompts cut in pieces. Then the
lowest level also runs undisturbed, and its tokens are what all are compared with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

import numpy as np

from pool.errors import GenerationFailed, InvalidRequest
from pool.rules.admission import Budgets
from tasks.payloads import Sampling
from tasks.ports import Engine, Event, Failed, Generation, Tokens
from tasks.vocabulary import Vocabulary
from workers.loop import BatchingLoop

SCHEMA_VERSION = 1
#: A session's KV is counted in whole pages of so many positions, more than any engine's.
PAGE_POSITIONS = 64
#: An average that rises by less than this has not risen.
TOLERANCE = 1e-9
_MIB = 2**20

#: Loads the engine anew, with room for so many positions of KV.
Load = Callable[[int], Engine]
#: Token ids by request and choice.
Outputs = list[list[list[int]]]
_NO_CANCELS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Level:
    """What one concurrency did. Averages and maxima of occupancy are over ticks that decoded; `tokens_per_tick` is
    (prefill + decode) / max(1, ticks)."""

    concurrency: int
    ticks: int
    decode_batches: int
    decode_tokens: int
    prefill_tokens: int
    avg_batch_occupancy: float
    max_batch_occupancy: int
    tokens_per_tick: float
    peak_kv_bytes: int
    rejected_admissions: int
    cache_misses: int
    preemptions: int
    cancelled: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """`reference_outputs`: token ids by request and choice at the lowest level, undisturbed; `corruption_free`: every
    level gave those, of a request that was cancelled the first ones; `saturation_concurrency`: the last level at which
    batches still became fuller."""

    results: tuple[Level, ...]
    saturation_concurrency: int
    corruption_free: bool
    reference_outputs: Outputs

    def as_json(self) -> str:
        """Schema version 1."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=2) + "\n"


def sweep(
    load: Load,
    requests: Sequence[Generation],
    levels: Sequence[int],
    *,
    kv_positions: int | None = None,
    kv_overcommit: float = 1.0,
    max_prefill_tokens_per_tick: int | None = None,
    cancels: Mapping[str, int] = _NO_CANCELS,
) -> Sweep:
    """Run `requests` at each of `levels`. By default the KV has room for all, a tick for the longest prompt. `cancels`:
    after how many tokens which jobs are cancelled, at every level.

    Raises InvalidRequest for bad levels, no requests, cancels that are none, and a request that is refused;
    GenerationFailed when one fails.
    """
    _check(levels, requests, cancels)
    longest = max(len(request.prompt) for request in requests)
    choices = sum(request.n for request in requests)
    budgets = Budgets(max_queue_depth=choices, max_prefill_tokens_per_tick=longest)
    room = sum(map(_final_positions, requests))
    chosen = replace(
        budgets,
        max_prefill_tokens_per_tick=max_prefill_tokens_per_tick or longest,
        kv_overcommit=kv_overcommit,
    )
    runs = [_run(load(kv_positions or room), _at(chosen, level), requests, cancels) for level in levels]
    results = tuple(result for result, _ in runs)
    disturbed = bool(cancels or kv_positions or max_prefill_tokens_per_tick)
    reference = _run(load(room), _at(budgets, levels[0]), requests, _NO_CANCELS)[1] if disturbed else runs[0][1]
    expected = _cut(reference, requests, cancels)
    return Sweep(
        results,
        saturation([(result.concurrency, result.avg_batch_occupancy) for result in results]),
        all(outputs == expected for _, outputs in runs),
        reference,
    )


def saturation(averages: Sequence[tuple[int, float]]) -> int:
    """The last of (concurrency, average occupancy) at which the average was higher than at any level before."""
    saturated, highest = averages[0]
    for concurrency, average in averages[1:]:
        if average > highest + TOLERANCE:
            saturated, highest = concurrency, average
    return saturated


def mixed_requests(
    vocabulary: Vocabulary,
    *,
    count: int,
    shortest: int,
    longest: int,
    max_tokens: int,
    seed: int,
) -> list[Generation]:
    """Prompts of random ordinary tokens, each about as many times longer than the next shorter one, over the range;
    every other one is greedy, the rest draw with seeds. All end at `max_tokens`."""
    draw = np.random.default_rng(seed)
    ordinary = np.array([token for token in range(vocabulary.size) if vocabulary.token_bytes(token)], np.int32)
    lengths = np.geomspace(shortest, longest, count).round().astype(int)
    draw.shuffle(lengths)
    return [
        Generation(
            job=f"request-{number}",
            attempt=1,
            prompt=draw.choice(ordinary, length),
            sampling=Sampling(temperature=0.8 * (number % 2), ignore_eos=True),
            max_tokens=max_tokens,
            seed=seed + number,
        )
        for number, length in enumerate(lengths)
    ]


def some_cancels(requests: Sequence[Generation], count: int, *, seed: int) -> dict[str, int]:
    """`count` of the requests, each to be cancelled after some of its tokens, not all.

    Raises InvalidRequest when there are fewer.
    """
    able = [request for request in requests if request.max_tokens > 1]
    if count > len(able):
        raise InvalidRequest(
            f"{count} of {len(requests)} requests are to be cancelled between two of their tokens; {len(able)} can be.",
            param="cancels",
        )
    draw = np.random.default_rng(seed)
    chosen = draw.choice(len(able), count, replace=False)
    return {able[index].job: int(draw.integers(1, able[index].max_tokens)) for index in chosen}


def _check(levels: Sequence[int], requests: Sequence[Generation], cancels: Mapping[str, int]) -> None:
    whole = all(isinstance(level, int) and not isinstance(level, bool) and level >= 1 for level in levels)
    if not levels or not whole or list(levels) != sorted(set(levels)):
        raise InvalidRequest("Levels are whole numbers >= 1, each once, in ascending order.", param="levels")
    if not requests:
        raise InvalidRequest("A sweep needs requests.", param="requests")
    single = {request.job for request in requests if request.n == 1}
    if not cancels.keys() <= single or any(tokens < 1 for tokens in cancels.values()):
        raise InvalidRequest("Cancels are of requests with one choice, after one token or more.", param="cancels")


def _final_positions(request: Generation) -> int:
    length = len(request.prompt) + request.max_tokens
    return request.n * -(-length // PAGE_POSITIONS) * PAGE_POSITIONS


def _at(budgets: Budgets, level: int) -> Budgets:
    return replace(
        budgets,
        max_active_sessions=level,
        max_batch_size=level,
        scratch_budget_bytes=level * _MIB,
        scratch_bytes_per_session=_MIB,
    )


def _cut(outputs: Outputs, requests: Sequence[Generation], cancels: Mapping[str, int]) -> Outputs:
    """What there would be of these outputs with the cancels."""
    return [
        [tokens[: cancels.get(request.job)] for tokens in choices]
        for request, choices in zip(requests, outputs, strict=True)
    ]


def _run(
    engine: Engine, budgets: Budgets, requests: Sequence[Generation], cancels: Mapping[str, int]
) -> tuple[Level, Outputs]:
    """One level; the engine is closed then."""
    level = budgets.max_active_sessions
    try:
        loop = BatchingLoop(engine, budgets, level)
        if loop.effective_limit() < level:
            raise InvalidRequest(
                f"The engine runs {loop.effective_limit()} sessions at once, not {level}.", param="levels"
            )
        outputs = _generate(loop, requests, cancels)
        return _level(loop, level), outputs
    finally:
        engine.close()


def _generate(loop: BatchingLoop, requests: Sequence[Generation], cancels: Mapping[str, int]) -> Outputs:
    for request in requests:
        decision = loop.admit(request)
        if not decision.accepted:
            raise InvalidRequest(f"{request.job} was refused ({decision.reason}): {decision.detail}.", param="requests")
    outputs: dict[tuple[str, int], list[int]] = {}

    def after_tick(events: Sequence[Event]) -> None:
        for event in events:
            _collect(event, outputs)
            if event.job in cancels and len(outputs[event.job, 0]) == cancels[event.job]:
                loop.cancel(event.job, event.attempt)

    loop.run_to_completion(after_tick)
    return [[outputs.get((request.job, choice), []) for choice in range(request.n)] for request in requests]


def _collect(event: Event, outputs: dict[tuple[str, int], list[int]]) -> None:
    if isinstance(event, Failed):
        raise GenerationFailed(f"{event.job} failed: {event.message}", code=event.code)
    if isinstance(event, Tokens):
        outputs.setdefault((event.job, event.choice), []).extend(event.token_ids)


def _level(loop: BatchingLoop, concurrency: int) -> Level:
    figures = loop.figures
    computed = figures.prefill_tokens + figures.decode_tokens
    return Level(
        concurrency=concurrency,
        ticks=figures.ticks,
        decode_batches=figures.decode_batches,
        decode_tokens=figures.decode_tokens,
        prefill_tokens=figures.prefill_tokens,
        avg_batch_occupancy=round(figures.occupancy_sum / max(1, figures.decode_batches), 4),
        max_batch_occupancy=figures.occupancy_max,
        tokens_per_tick=round(computed / max(1, figures.ticks), 4),
        peak_kv_bytes=figures.held_positions_max * figures.bytes_per_token,
        rejected_admissions=figures.rejected.total(),
        cache_misses=figures.cache_misses,
        preemptions=figures.preempted,
        cancelled=figures.cancelled_sessions,
    )
