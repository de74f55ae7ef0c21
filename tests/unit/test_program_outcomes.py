"""What a completed request tells of its Program."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Means
from pool.rules.programs.ttl import acting_ttl_seconds, cache_miss_impact_seconds, place_share
from pool.rules.programs.windows import RequestSample
from pool.store.handouts import Handout, Lease
from pool.store.placements import Outcome, Placement
from tasks.ports import ChoiceOutput, Finished
from tests.program_lines import told
from workers.program_outcomes import Background, Completed, outcome_of, tell_dispatch, tell_end

P = "0123456789abcdef0123456789abcdef"
SETTINGS = ProgramSettings(enabled=True)
#: A place that the Program got at 10 s, and in which it has completed a request of 1,000 tokens at 12 s.
GOING_ON = Placement(
    P, "r", 0, 4, previous_prompt_tokens=1000, rounds=2, segment_rounds=5, activated_ms=10_000, last_finish_ms=12_000,
    dispatched_ms=15_500,
)  # fmt: skip
#: The same, before it has completed one there.
RESUMED = replace(GOING_ON, activated_ms=15_400, rounds=0)
FULL = Background(Means(continuity_full=True, intervals_s=(1.0, 2.0, 3.0)), reasoning=2)


def request(
    placement: Placement = GOING_ON,
    *,
    cached: int | None = 990,
    prompt: int = 1200,
    outputs: tuple[int, ...] = (50,),
    attempt: int = 1,
) -> Completed:
    """One that came at 15 s and ended at 20 s."""
    choices = tuple(ChoiceOutput("x", "stop", tokens) for tokens in outputs)
    finished = Finished("job", attempt, choices, prompt, cached, decode_s=1.5)
    return Completed(placement, finished, created_ms=15_000, finish_ms=20_000, attempt=attempt)


def test_a_request_is_a_sample() -> None:
    """With all that is known of it; its round counts."""
    outcome = outcome_of(request(), SETTINGS, Background())
    assert (outcome.prompt_tokens, outcome.context_tokens, outcome.is_round) == (1200, 1250, True)
    assert outcome.sample == RequestSample(1200, 50, 990, 200, 5.0, 1.5, 0.5, 6, 20_000)


def test_a_program_goes_on_from_one_of_its_choices() -> None:
    """So its context grows by the longest, while all of them were computed."""
    outcome = outcome_of(request(outputs=(50, 80, 10)), SETTINGS, Background())
    assert outcome.context_tokens == 1280
    assert outcome.sample is not None and outcome.sample.completion_tokens == 140


@pytest.mark.parametrize(
    ("cached", "attempt", "is_round", "known"),
    [(900, 1, True, 900), (899, 1, False, 899), (None, 1, True, None), (0, 2, True, None)],
)
def test_a_cached_count_that_is_missing_is_unknown(
    cached: int | None, attempt: int, *, is_round: bool, known: int | None
) -> None:
    """Never 0: neither where the engine gives none, nor where a later attempt may have found its own earlier one."""
    outcome = outcome_of(request(cached=cached, attempt=attempt), SETTINGS, Background())
    assert outcome.is_round is is_round
    assert outcome.sample is not None
    assert (outcome.sample.cached_tokens, outcome.sample.rounds) == (known, 5 + is_round)


@pytest.mark.parametrize(
    ("placement", "cached", "shared"),
    [
        (RESUMED, 300, 300),
        # Its own KV again, an unknown count, not the first of its segment, and still fresh.
        (RESUMED, 900, None),
        (RESUMED, None, None),
        (GOING_ON, 300, None),
        (replace(RESUMED, shared_tokens=700, fresh_until_ms=20_001), 300, None),
        (replace(RESUMED, shared_tokens=700, fresh_until_ms=20_000), 300, 300),
    ],
)
def test_evidence_of_a_shared_prefix(placement: Placement, cached: int | None, shared: int | None) -> None:
    """What the first request of a segment found cached is what others have too. It makes a miss cheaper, and holds for
    the time of the settings while the windows say nothing."""
    outcome = outcome_of(request(placement, cached=cached), SETTINGS, Background())
    assert outcome.shared_tokens == shared
    assert outcome.fresh_until_ms == (None if shared is None else 120_000)
    private = 1250 - (placement.shared_tokens if shared is None else shared)
    assert outcome.impact_s == cache_miss_impact_seconds(SETTINGS.prefill_cost_model, private)


def test_the_ttl_is_that_of_the_ranks_window() -> None:
    """None before it is full."""
    assert outcome_of(request(), SETTINGS, Background()).ttl_ms == 0
    outcome = outcome_of(request(), SETTINGS, FULL)
    share = place_share(SETTINGS, 1250 + SETTINGS.decode_buffer_tokens)
    assert 0 < share < 1
    expected_ms = round(1000 * acting_ttl_seconds(SETTINGS, FULL.means, outcome.impact_s / share))
    assert outcome.ttl_ms == outcome.automatic_ms == expected_ms


def test_a_place_whose_kv_comes_back_is_not_kept_for_longer_than_that_costs() -> None:
    """Of a context of 1,250 tokens, where that is less than to compute it again; what a miss costs is told as ever."""
    quick = replace(FULL.means, intervals_s=(0.01, 0.02, 0.03))
    ttls, impacts = [], set()
    for per_token in (0.0, 1e-6, 1e-5, 1.0):
        outcome = outcome_of(request(), SETTINGS, Background(quick, 2, per_token))
        share = place_share(SETTINGS, 1250 + SETTINGS.decode_buffer_tokens)
        worth_s = min(outcome.impact_s, 1250 * per_token) / share
        assert outcome.ttl_ms == round(1000 * acting_ttl_seconds(SETTINGS, quick, worth_s))
        ttls.append(outcome.ttl_ms)
        impacts.add(outcome.impact_s)
    assert len(impacts) == 1
    assert ttls == sorted(ttls) and ttls[0] == 0 < ttls[-1] == outcome_of(request(), SETTINGS, Background(quick)).ttl_ms


def test_a_hint_replaces_the_ttl() -> None:
    """Longer or shorter, up to the bound; the part of it that the statistics would give is told."""
    settings = ProgramSettings(enabled=True, max_kv_retention_ttl_seconds=60)
    # Cheap to lose would not be worth a hold: a long prompt is.
    long = {"prompt": 150_000, "cached": 149_000}
    automatic_ms = outcome_of(request(**long), settings, FULL).ttl_ms
    assert automatic_ms > 0
    for hint_ms, ttl_ms in ((0, 0), (500, 500), (30_000, 30_000), (90_000, 60_000)):
        outcome = outcome_of(request(replace(GOING_ON, retention_ms=hint_ms), **long), settings, FULL)
        assert (outcome.ttl_ms, outcome.automatic_ms) == (ttl_ms, min(automatic_ms, ttl_ms))


def test_what_is_told_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    """By the events' names and the stored id. A break of the cache within one place is told at INFO: not of a first
    request there, of an unknown count, or of a prompt that became shorter."""
    caplog.set_level(logging.DEBUG, "genpool.programs")
    lease = Lease("job", 1, "nonce", placement=GOING_ON)
    tell_dispatch(Handout(lease, b"", b"", b"", 1, 0, 0, (), "", "job", 15_000), GOING_ON)
    tell_end(request(cached=899), Outcome(1200, 1250, ttl_ms=700))
    lines = told(caplog)
    assert [(line.level, line.event) for line in lines] == [
        ("DEBUG", "request_dispatch"),
        ("INFO", "unexpected_cache_discontinuity"),
        ("DEBUG", "cache_observation"),
        ("DEBUG", "continuity_sample"),
        ("DEBUG", "ttl_armed"),
    ]
    where = {"program": P, "rank": "r", "epoch": "4"}
    cache = {"cached_tokens": "899", "prompt_tokens": "1200", "previous_prompt_tokens": "1000"}
    assert [line.values for line in lines] == [
        where | {"generation": "0", "attempt": "1", "queue_s": "0.500"},
        where | cache,
        where | cache | {"shared_tokens": "0"},
        where | {"interval_s": "3.000"},
        where | {"ttl_ms": "700", "automatic_ms": "0", "impact_s": "0.000"},
    ]


@pytest.mark.parametrize(
    "told",
    [
        request(),
        request(RESUMED, cached=0),
        request(cached=None),
        request(cached=0, attempt=2),
        request(cached=640, prompt=700),
        request(replace(GOING_ON, previous_prompt_tokens=0), cached=0),
    ],
)
def test_what_is_no_broken_cache(told: Completed, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing at INFO."""
    caplog.set_level(logging.INFO, "genpool.programs")
    tell_end(told, Outcome(1200, 1250))
    assert caplog.records == []
