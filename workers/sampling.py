"""The one sampler: from a row of logits to a token.

A draw is a pure function of the row, the settings and (seed, choice, position), so the k-th token of a choice is the
same in any batch, on any rank, after any restart. The random number comes from hashing the counter, not from a
generator's state. Filters apply in the usual order: temperature, then top_k, then top_p over what top_k left.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from tasks.payloads import Sampling
from tasks.ports import Logits

#: Below this a temperature is greedy: divided logits would only overflow.
MIN_TEMPERATURE = 1e-5

_COUNTER = struct.Struct("<QQQ")
_FIRST_NUCLEUS = 64
#: Beyond so many tokens sorting all is quicker than another attempt.
_LAST_PARTIAL_NUCLEUS = 1024
_STRIDE = 256

Ids = npt.NDArray[np.intp]
Weights = npt.NDArray[np.float32]


def draw(
    row: Logits, sampling: Sampling, *, seed: int, choice: int, position: int, banned: Collection[int] = ()
) -> int:
    """The token that follows, drawn from `row` (V,) float32, which is left as it is.

    `seed`: the job's (sampling.seed is not read); `choice`: which of the n outputs; `position`: output tokens of this
    choice so far. Banned ids are never drawn. Greedy ties go to the lowest id. Raises ValueError when no token is left
    or the logits are not numbers.
    """
    if banned:
        row = row.copy()
        row[list(banned)] = -np.inf
    best = int(np.argmax(row))
    if not np.isfinite(row[best]):
        raise ValueError("the logits hold no finite maximum")
    if sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1:
        return best
    ids, weights = _top_k(row, sampling.temperature, sampling.top_k, row[best])
    if sampling.top_p < 1.0:
        kept = _nucleus(weights, sampling.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    picked = _pick(weights, uniform(seed, choice, position))
    return picked if ids is None else int(ids[picked])


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of the three counters (each in 0 .. 2^64 - 1)."""
    digest = hashlib.blake2b(_COUNTER.pack(seed, choice, position), digest_size=8, person=b"genpool-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _top_k(row: Logits, temperature: float, top_k: int, best: np.float32) -> tuple[Ids | None, Weights]:
    """The `top_k` likeliest ids, ascending (None: all), and their unnormalised probabilities."""
    ids = None
    if 0 < top_k < len(row):
        threshold = np.partition(row, len(row) - top_k)[len(row) - top_k]
        ids = _largest(row, top_k, threshold)
    kept = row if ids is None else row[ids]
    with np.errstate(over="ignore"):
        scaled = (kept - best) * np.float32(1.0 / temperature)
    return ids, np.exp(scaled, out=scaled)


def _nucleus(weights: Weights, top_p: float) -> Ids:
    """Indices, ascending, of the fewest largest weights that hold `top_p` of the sum (Holtzman et al. 2020)."""
    wanted = top_p * float(weights.sum(dtype=np.float64))
    count = min(_FIRST_NUCLEUS, len(weights))
    while True:
        # Mostly a few tokens hold the mass: look at ever more of the largest instead of sorting all.
        largest = np.sort(np.partition(weights, len(weights) - count)[len(weights) - count :])[::-1]
        mass = np.cumsum(largest.astype(np.float64))
        if mass[-1] >= wanted or count == len(weights):
            break
        count = count * 16 if count < _LAST_PARTIAL_NUCLEUS else len(weights)
        count = min(count, len(weights))
    size = min(int(np.searchsorted(mass, wanted)) + 1, count)
    return _largest(weights, size, largest[size - 1])


def _largest(values: Weights, count: int, threshold: np.float32) -> Ids:
    """Indices, ascending, of the `count` largest values, of which `threshold` is the least; ties go to low indices."""
    chosen = values > threshold
    level = np.flatnonzero(values == threshold)
    chosen[level[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def _pick(weights: Weights, point: float) -> int:
    """The index whose share of the sum covers `point` in [0, 1); never one of weight 0."""
    starts = np.arange(0, len(weights), _STRIDE)
    # In two levels, because a running sum over the whole vocabulary costs more than all the rest.
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = point * sums[-1]
    stretch = min(int(np.searchsorted(sums, target, side="right")), len(sums) - 1)
    before = sums[stretch - 1] if stretch else 0.0
    inside = weights[starts[stretch] : starts[stretch] + _STRIDE]
    index = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), target - before, side="right"))
    if index == len(inside) or inside[index] == 0.0:  # rounding: the stretch's sum and its running sum differ
        index = int(np.flatnonzero(inside)[-1])
    return int(starts[stretch]) + index
