"""Windows: samples packed and back, and what they say of a rank, against a plain recount."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.rules.programs.facts import Means
from pool.rules.programs.windows import (
    ContinuitySample,
    PauseSample,
    RequestSample,
    Windows,
    counts_as_round,
    growth_tokens,
    is_continuous,
    means_of,
    pooled,
    target_rounds,
)

SAMPLE = RequestSample(
    prompt_tokens=1000,
    completion_tokens=50,
    cached_tokens=900,
    growth_tokens=40,
    end_to_end_s=3.0,
    decode_s=1.5,
    queue_s=1.0,
    rounds=3,
    finish_ms=10_000,
)
UNKNOWN = replace(SAMPLE, cached_tokens=None, growth_tokens=None, decode_s=None)

# --- one request


@pytest.mark.parametrize(("cached", "previous", "expected"), [(900, 1000, True), (899, 1000, False), (0, 0, True)])
def test_a_round_is_continuous_from_nine_tenths_on(cached: int, previous: int, expected: bool) -> None:
    """Of the previous prompt, not of this one."""
    assert is_continuous(cached, previous) is expected
    assert counts_as_round(cached, previous) is expected


def test_what_is_unknown_does_not_end_a_segment() -> None:
    """Neither the first request of a Program nor an engine that does not count."""
    assert counts_as_round(None, 1000)
    assert counts_as_round(0, None)


@pytest.mark.parametrize(
    ("prompt", "previous", "growth"),
    [
        (1001, 1000, 1),
        (1999, 1000, 999),
        (2000, 1000, None),
        (1000, 1000, None),
        (900, 1000, None),
        (500, None, None),
        (500, 0, None),
    ],
)
def test_growth_counts_only_within_its_bounds(prompt: int, previous: int | None, growth: int | None) -> None:
    """More than nothing, and less than there was."""
    assert growth_tokens(prompt, previous) == growth


# --- packed samples


def test_samples_are_a_few_bytes() -> None:
    """A full window of a rank is a few kilobytes."""
    packed = [SAMPLE.packed(), ContinuitySample(1.0, 2.0).packed(), PauseSample(3).packed()]
    assert [len(sample) for sample in packed] == [38, 8, 2]


@pytest.mark.parametrize("sample", [SAMPLE, UNKNOWN, replace(SAMPLE, cached_tokens=0, growth_tokens=0, decode_s=0.0)])
def test_requests_come_back_as_they_were(sample: RequestSample) -> None:
    """What is not known is not 0."""
    assert RequestSample.unpacked(sample.packed()) == sample


def test_the_other_samples_come_back_too() -> None:
    """Also an interval that is negative: the next request came before the last one ended."""
    for continuity in (ContinuitySample(0.25, 2.5), ContinuitySample(-1.5, 0.0)):
        assert ContinuitySample.unpacked(continuity.packed()) == continuity
    assert PauseSample.unpacked(PauseSample(14).packed()) == PauseSample(14)


def test_huge_counts_are_the_most_that_fits() -> None:
    """They never become "unknown", nor an error in the middle of a completion."""
    huge = replace(SAMPLE, prompt_tokens=2**40, cached_tokens=2**32 - 1, rounds=10**6)
    back = RequestSample.unpacked(huge.packed())
    assert (back.prompt_tokens, back.cached_tokens, back.rounds) == (2**32 - 2, 2**32 - 2, 65_535)
    assert PauseSample.unpacked(PauseSample(10**6).packed()) == PauseSample(65_535)


# --- means


def test_an_empty_window_says_nothing() -> None:
    """Unknown, never 0."""
    assert means_of(Windows(), 1) == Means()


def test_means_are_of_what_is_known() -> None:
    """A sample that lacks a figure does not count for that figure."""
    other = replace(UNKNOWN, prompt_tokens=2000, completion_tokens=150, end_to_end_s=5.0, rounds=4, finish_ms=20_000)
    windows = Windows(
        requests=[SAMPLE, other],
        continuity=[ContinuitySample(2.0, 4.0), ContinuitySample(0.0, 6.0), ContinuitySample(-1.0, 8.0)],
        pauses=[PauseSample(5), PauseSample(6)],
    )
    assert means_of(windows, 3) == Means(
        full=False,
        continuity_full=True,
        growth_tokens=40.0,
        prompt_tokens=1500.0,
        output_tokens=100.0,
        uncached_tokens=100.0,
        end_to_end_s=4.0,
        decode_s=1.5,
        miss_impact_s=6.0,
        segment_rounds=3.5,
        throughput_per_s=2 / 6.0,
        intervals_s=(2.0,),
        pause_rounds=5.5,
    )


def test_more_cached_than_asked_for_is_nothing_uncached() -> None:
    """A template's tokens may be counted by the engine and not by us."""
    assert replace(SAMPLE, cached_tokens=1100).uncached_tokens == 0


@pytest.mark.parametrize(("requests", "continuity"), [(3, 2), (2, 3)])
def test_windows_are_full_one_by_one(requests: int, continuity: int) -> None:
    """The request window and the continuity window each have their own count."""
    windows = Windows([SAMPLE] * requests, [ContinuitySample(1.0, 1.0)] * continuity)
    found = means_of(windows, 3)
    assert (found.full, found.continuity_full) == (requests >= 3, continuity >= 3)


def test_only_the_newest_samples_count() -> None:
    """A window that was longer before the setting changed is cut."""
    windows = Windows(
        [replace(SAMPLE, prompt_tokens=9999), SAMPLE, SAMPLE],
        [ContinuitySample(9.0, 9.0), ContinuitySample(1.0, 2.0), ContinuitySample(1.0, 2.0)],
        [PauseSample(99), PauseSample(1), PauseSample(1)],
    )
    found = means_of(windows, 2)
    assert (found.prompt_tokens, found.miss_impact_s, found.pause_rounds) == (1000.0, 2.0, 1.0)
    assert found.intervals_s == (1.0, 1.0)


def test_throughput_is_per_busy_time() -> None:
    """From dispatch to end; what overlaps counts once, what is idle or waits in the queue not at all."""
    spans = [(0, 4000, 0.0), (1000, 3000, 0.0), (2000, 6000, 1.0), (20_000, 22_000, 0.0)]
    requests = [
        replace(SAMPLE, finish_ms=end, end_to_end_s=(end - begin) / 1000, queue_s=queue) for begin, end, queue in spans
    ]
    assert means_of(Windows(requests), 20).throughput_per_s == pytest.approx(4 / 8)
    assert means_of(Windows(requests[::-1]), 20).throughput_per_s == pytest.approx(4 / 8)


def test_no_busy_time_is_no_throughput() -> None:
    """Nothing can be divided by it."""
    assert means_of(Windows([replace(SAMPLE, end_to_end_s=0.5, queue_s=0.5)]), 1).throughput_per_s is None


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 60), st.integers(0, 30)).map(
            lambda span: replace(
                SAMPLE, finish_ms=span[0] + span[1], end_to_end_s=(span[1] + span[2]) / 1000, queue_s=span[2] / 1000
            )
        ),
        min_size=1,
        max_size=12,
    )
)
def test_busy_time_is_the_union_of_all_spans(requests: list[RequestSample]) -> None:
    """Against a count of every millisecond in which something was in the engine."""
    busy = {
        ms
        for sample in requests
        for ms in range(sample.finish_ms - round(1000 * (sample.end_to_end_s - sample.queue_s)), sample.finish_ms)
    }
    found = means_of(Windows(requests), 20).throughput_per_s
    if busy:
        assert found == pytest.approx(1000 * len(requests) / len(busy), rel=1e-6)
    else:
        assert found is None or found > 1e9


def test_ranks_are_pooled() -> None:
    """Together they fill a window that none of them fills; throughput is that of one rank, not of all."""
    quick = replace(SAMPLE, end_to_end_s=1.0, queue_s=0.0, rounds=1)
    slow = replace(SAMPLE, end_to_end_s=4.0, queue_s=0.0, rounds=5)
    ranks = [Windows([quick]), Windows([slow], [ContinuitySample(3.0, 1.0)], [PauseSample(4)]), Windows()]
    found = pooled(ranks, 2)
    assert (found.full, found.continuity_full) == (True, False)
    assert (found.segment_rounds, found.end_to_end_s, found.pause_rounds) == (3.0, 2.5, 4.0)
    assert found.throughput_per_s == pytest.approx((1.0 + 0.25) / 2)
    assert found.intervals_s == (3.0,)


# --- target rounds


def test_growth_windows_with_three_rounds_target_six() -> None:
    """The reference figure."""
    requests = [replace(SAMPLE, rounds=rounds) for rounds in (1, 3, 5)]
    assert target_rounds(means_of(Windows(requests), 3), 14) == 6


@pytest.mark.parametrize(
    ("means", "target"),
    [
        (Means(full=False, segment_rounds=3.0), 0),
        (Means(full=True), 0),
        (Means(full=True, segment_rounds=0.0), 1),
        (Means(full=True, segment_rounds=3.01), 7),
        (Means(full=True, segment_rounds=7.0), 14),
        (Means(full=True, segment_rounds=50.0), 14),
    ],
)
def test_target_rounds_within_their_bounds(means: Means, target: int) -> None:
    """0 while cold, else twice the mean rounded up, from 1 to the longest segment."""
    assert target_rounds(means, 14) == target
