"""The shared sampler."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pool.store.log import LogEntry, pack, unpack
from tasks.payloads import Sampling
from tasks.ports import Logits
from tests.unit import reference_sampling
from workers.sampling import MIN_LOGPROB, draw, logprobs_of, uniform


def row_of(*logits: float) -> Logits:
    return np.array(logits, np.float32)


def drawn(row: Logits, sampling: Sampling, count: int, *, seed: int = 1) -> list[int]:
    """The tokens of `count` positions that all see the same row."""
    return [draw(row, sampling, seed=seed, choice=0, position=position) for position in range(count)]


def probabilities(row: Logits, temperature: float) -> npt.NDArray[np.float64]:
    scaled = row.astype(np.float64) / temperature
    shares = np.exp(scaled - scaled.max())
    normalised: npt.NDArray[np.float64] = shares / shares.sum()
    return normalised


def allowed(row: Logits, sampling: Sampling) -> set[int]:
    """The definition: sort by logit, then id; cut at top_k, then where top_p is reached."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    shares = probabilities(row, sampling.temperature)[order]
    shares /= shares.sum()
    before = np.concatenate(([0.0], np.cumsum(shares)[:-1]))
    # The slack admits either answer where float32 and float64 sums straddle the border.
    return {token for token, mass in zip(order, before, strict=True) if mass < sampling.top_p + 1e-5}


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    """Temperature 0 is the maximum; ties go to the lowest id."""
    assert draw(row_of(1, 3, 3, 2), Sampling(temperature=0), seed=9, choice=0, position=0) == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e-9])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_vanishing_temperature_is_greedy(temperature: float, top_p: float) -> None:
    """A temperature that would overflow the logits is greedy, never NaN."""
    sampling = Sampling(temperature=temperature, top_p=top_p)
    assert set(drawn(row_of(-1e30, 2, 2, -3e38), sampling, 20)) == {1}


def test_logits_far_apart_do_not_overflow() -> None:
    """The smallest real temperature with the largest float32 differences still draws the maximum."""
    assert set(drawn(row_of(-3e38, 1, 3e38), Sampling(temperature=2e-5), 20)) == {2}


def test_the_same_counter_draws_the_same_token() -> None:
    """Seed, choice and position decide; each of them matters."""
    row = np.zeros(1000, np.float32)
    sampling = Sampling()

    def token(seed: int, choice: int, position: int) -> int:
        return draw(row, sampling, seed=seed, choice=choice, position=position)

    assert token(1, 2, 3) == token(1, 2, 3)
    assert len({token(1, 2, 3), token(2, 2, 3), token(1, 3, 3), token(1, 2, 4)}) == 4


def test_draws_are_portable() -> None:
    """The random numbers are part of the format: a log written elsewhere is continued with the same draws."""
    assert [uniform(0, 0, 0), uniform(2**63 - 1, 15, 2**20)] == [
        0.5416306236214551,
        0.8055070324197141,
    ]


def test_frequencies_follow_the_probabilities() -> None:
    """Over many positions each token comes as often as its probability says (within five standard deviations)."""
    row = row_of(0, 1, 2, -1, -np.inf, 0.5)
    count = 20_000
    frequencies = np.bincount(drawn(row, Sampling(temperature=0.8), count), minlength=len(row))
    expected = probabilities(row, 0.8)
    deviation = np.sqrt(count * expected * (1 - expected))
    assert (np.abs(frequencies - count * expected) <= 5 * deviation).all()
    assert frequencies[4] == 0


def test_frequencies_over_a_large_vocabulary() -> None:
    """The two-level search gives every part of a large vocabulary its share."""
    row = np.random.default_rng(3).standard_normal(49_152).astype(np.float32)
    count = 4_000
    quarters = np.bincount(np.array(drawn(row, Sampling(), count)) // 12_288, minlength=4)
    expected = probabilities(row, 1.0).reshape(4, -1).sum(axis=1)
    assert (np.abs(quarters - count * expected) <= 5 * np.sqrt(count * expected * (1 - expected))).all()


@settings(deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=1, max_size=400),
    temperature=st.floats(0.05, 2.0),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 50),
    position=st.integers(0, 2**20),
)
def test_filters_keep_what_their_definition_keeps(
    logits: list[int], temperature: float, top_p: float, top_k: int, position: int
) -> None:
    """Whatever is drawn is among the tokens that sorting and cutting would leave; ties at the border go to low ids."""
    row = row_of(*(logit / 4 for logit in logits))
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    assert draw(row, sampling, seed=5, choice=1, position=position) in allowed(row, sampling)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        pytest.param(Sampling(top_k=3), {0, 1, 2}, id="top_k, ties to low ids"),
        pytest.param(Sampling(top_p=0.7), {0, 1, 2}, id="top_p, ties to low ids"),
        pytest.param(Sampling(top_k=2, top_p=0.9), {0, 1}, id="top_p of what top_k left"),
        pytest.param(Sampling(top_k=1), {0}, id="one is left"),
        pytest.param(Sampling(top_p=1e-9), {0}, id="the likeliest always stays"),
        pytest.param(Sampling(top_k=100), {0, 1, 2, 3}, id="more than there are"),
    ],
)
def test_everything_kept_is_drawn_and_nothing_else(sampling: Sampling, expected: set[int]) -> None:
    """Four equal tokens: filters choose by id, and each kept one comes."""
    assert set(drawn(np.zeros(4, np.float32), sampling, 400)) == expected


def test_a_wide_nucleus_is_complete() -> None:
    """A flat row over a large vocabulary keeps its share of tokens, far beyond the first ones looked at."""
    row = np.zeros(8_000, np.float32)
    tokens = drawn(row, Sampling(top_p=0.5), 2_000)
    assert max(tokens) < 4_000
    assert max(tokens) > 3_900


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_never_come(temperature: float) -> None:
    """A banned id is not drawn, however likely, and the caller's row stays as it was."""
    row = row_of(9, 9, 0, 0)
    before = row.copy()
    sampling = Sampling(temperature=temperature)
    tokens = {draw(row, sampling, seed=1, choice=0, position=k, banned=frozenset({0, 1})) for k in range(100)}
    assert tokens <= {2, 3}
    assert np.array_equal(row, before)


@pytest.mark.parametrize("row", [row_of(np.nan, 1), row_of(-np.inf, -np.inf), row_of(1, np.inf)])
def test_rows_without_a_finite_maximum_are_errors(row: Logits) -> None:
    """A broken engine's row is an error, not a token."""
    with pytest.raises(ValueError, match="finite"):
        draw(row, Sampling(), seed=1, choice=0, position=0)


@settings(deadline=None)
@given(seed=st.integers(0, 2**63 - 1), choice=st.integers(0, 15), position=st.integers(0, 2**20))
def test_random_numbers_lie_in_the_unit_interval(seed: int, choice: int, position: int) -> None:
    """0 <= u < 1 for every counter that can occur."""
    assert 0.0 <= uniform(seed, choice, position) < 1.0


# --- penalties, bias, min_p


def tokens_of(size: int) -> st.SearchStrategy[list[int]]:
    """Tokens said before, over a vocabulary of `size`."""
    return st.lists(st.integers(0, size - 1), max_size=12)


@st.composite
def draw_cases(draw_from: st.DrawFn) -> tuple[Logits, Sampling, dict[str, Any]]:
    """A row, settings of every kind, and what came before. Numbers are dyadic, so ties are common, and exact."""
    row = row_of(*(logit / 8 for logit in draw_from(st.lists(st.integers(-80, 80), min_size=2, max_size=60))))
    size = len(row)
    sampling = Sampling(
        temperature=draw_from(st.one_of(st.just(0.0), st.floats(0.1, 2.0))),
        top_p=draw_from(st.one_of(st.just(1.0), st.floats(0.05, 1.0))),
        top_k=draw_from(st.one_of(st.just(0), st.integers(1, 70))),
        min_p=draw_from(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
        repetition_penalty=draw_from(st.sampled_from((1.0, 0.5, 2.0, 4.0))),
        presence_penalty=draw_from(st.integers(-8, 8)) / 4,
        frequency_penalty=draw_from(st.integers(-8, 8)) / 4,
        logit_bias=draw_from(st.dictionaries(st.integers(0, size - 1), st.integers(-100, 100).map(float), max_size=4)),
    )
    seen: dict[str, Any] = {
        "banned": draw_from(st.frozensets(st.integers(0, size - 1), max_size=size - 1)),
        "prompt": draw_from(tokens_of(size)),
        "output": draw_from(tokens_of(size)),
    }
    return row, sampling, seen


@settings(deadline=None, max_examples=200)
@given(case=draw_cases(), seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**20))
def test_a_draw_is_the_slow_references(case: tuple[Logits, Sampling, dict[str, Any]], seed: int, position: int) -> None:
    """All options together: the fast sampler draws what the one that reads like their definitions draws."""
    row, sampling, seen = case
    before = row.copy()
    counters = {"seed": seed, "choice": 1, "position": position}
    fast = draw(row, sampling, **counters, **seen | {"prompt": np.array(seen["prompt"], np.int32)})
    expected = reference_sampling.draws(row.tolist(), sampling, **counters, **seen)
    assert fast == min(expected) if sampling.temperature == 0 else fast in expected
    assert np.array_equal(row, before)


@pytest.mark.parametrize(
    ("options", "prompt", "output", "expected"),
    [
        pytest.param({}, (0,), (0,), 0, id="none: the likeliest, however often it came"),
        pytest.param({"repetition_penalty": 2.0}, (0,), (), 1, id="repetition counts the prompt"),
        pytest.param({"repetition_penalty": 2.0}, (), (0,), 1, id="repetition counts the output"),
        pytest.param({"repetition_penalty": 1.2}, (0, 0, 0), (0, 0), 0, id="repetition counts once"),
        pytest.param({"presence_penalty": 2.0}, (0,), (), 0, id="presence leaves the prompt alone"),
        pytest.param({"presence_penalty": 2.0}, (), (0,), 1, id="presence counts the output"),
        pytest.param({"presence_penalty": 0.9}, (), (0, 0, 0), 0, id="presence counts once"),
        pytest.param({"frequency_penalty": 2.0}, (0, 0), (), 0, id="frequency leaves the prompt alone"),
        pytest.param({"frequency_penalty": 0.4}, (), (0, 0), 0, id="frequency: twice is not enough"),
        pytest.param({"frequency_penalty": 0.4}, (), (0, 0, 0), 1, id="frequency counts each time"),
        pytest.param({"presence_penalty": -2.0}, (), (1,), 1, id="a negative penalty invites"),
        pytest.param({"logit_bias": {2: 100.0}}, (), (), 2, id="bias selects"),
        pytest.param({"logit_bias": {0: -100.0}}, (), (), 1, id="bias bans"),
        pytest.param({"logit_bias": {2: 100.0}, "repetition_penalty": 100.0}, (2,), (), 2, id="bias after penalties"),
    ],
)
def test_each_penalty_counts_what_it_is_defined_to(
    options: dict[str, Any], prompt: tuple[int, ...], output: tuple[int, ...], expected: int
) -> None:
    """Greedy, so that each shows alone: 0 leads 1 by one logit, and 1 leads 2 by one."""
    sampling = Sampling(temperature=0.0, **options)
    said = {"prompt": np.array(prompt, np.int32), "output": output}
    assert draw(row_of(3, 2, 1), sampling, seed=1, choice=0, position=0, **said) == expected


def test_a_negative_logit_is_pushed_down_too() -> None:
    """Dividing it by the repetition penalty would make it likelier."""
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0)
    said = np.array([0], np.int32)
    assert draw(row_of(-1.0, -1.5), sampling, seed=1, choice=0, position=0, prompt=said) == 1


@pytest.mark.parametrize(
    ("min_p", "expected"), [(0.0, {0, 1, 2}), (0.3, {0, 1}), (0.5, {0, 1}), (0.51, {0}), (1.0, {0})]
)
def test_min_p_is_a_share_of_the_likeliest(min_p: float, expected: set[int]) -> None:
    """Probabilities 4/7, 2/7, 1/7 of which the second is half of the first."""
    row = np.log(row_of(4, 2, 1))
    assert set(drawn(row, Sampling(min_p=min_p), 400)) == expected


# --- log-probabilities


@settings(deadline=None)
@given(
    logits=st.lists(st.one_of(st.integers(-400, 400), st.just(-math.inf)), min_size=1, max_size=80),
    top=st.integers(0, 20),
    data=st.data(),
)
def test_logprobs_are_the_models_own(logits: list[float], top: int, data: st.DataObject) -> None:
    """Log-softmax of the row as it came; the likeliest first, ties to low ids; never above 0, never infinite."""
    row = row_of(*(logit / 8 for logit in [*logits, 0]))
    token = data.draw(st.integers(0, len(row) - 1))
    found = logprobs_of(row, token, top)
    expected = [max(value, MIN_LOGPROB) for value in reference_sampling.logprobs(row.tolist())]
    assert found.logprob == pytest.approx(expected[token], abs=1e-4, rel=1e-6)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:top]
    assert [token for token, _ in found.top] == order
    assert [value for _, value in found.top] == pytest.approx([expected[i] for i in order], abs=1e-4, rel=1e-6)
    assert all(MIN_LOGPROB <= value <= 0 for value in (found.logprob, *(value for _, value in found.top)))
    assert sum(math.exp(value) for _, value in found.top) <= 1 + 1e-5


def test_logprobs_of_a_large_row() -> None:
    """A whole vocabulary's sum is right to float32's precision, and what is told survives packing."""
    row = (np.random.default_rng(1).standard_normal(49_152) * 4).astype(np.float32)
    found = logprobs_of(row, 7, 20)
    assert found.logprob == pytest.approx(reference_sampling.logprobs(row.tolist())[7], abs=2e-6)
    entry = LogEntry(3, 1, (7,), "é", (found,))
    assert unpack(pack(entry)) == entry
