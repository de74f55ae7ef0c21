"""The shared sampler."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.payloads import Sampling
from tasks.ports import Logits
from workers.sampling import draw, uniform


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
