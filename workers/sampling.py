"""The one sampler: from a row of logits to a token, and to what is told of it.

A draw is a pure function of the row, the settings, the tokens so far and (seed, choice, position), so the k-th token of
a choice is the same in any batch, on any rank, after any restart. The random number comes from hashing the counter, not
from a generator's state. In this order, each step on what the one before left:

| option | what it does to logit l (or probability p) of token t | as defined by |
|---|---|---|
| repetition_penalty r | l / r if l > 0 else l * r, where t is in prompt or output | Keskar et al. 2019; vLLM |
| frequency_penalty f | l - f * (how often t is in the output) | OpenAI reference; output alone, as in vLLM |
| presence_penalty q | l - q where t is in the output | OpenAI reference; output alone, as in vLLM |
| logit_bias b | l + b[t] | OpenAI reference |
| min_tokens | l = -inf for tokens that end a choice, before so many | vLLM |
| temperature T | l / T; 0: the largest, of equal ones the lowest id | |
| top_k k | the k likeliest stay | Fan et al. 2018 |
| top_p | the fewest likeliest that hold this much of the rest stay | Holtzman et al. 2020 |
| min_p m | those with p >= m * (the largest p) stay | Nguyen et al. 2024 |

vLLM adds the bias before the penalties. Here it comes after them, so that it is what the caller said, whatever else is
set: +100 selects and -100 bans a token that repeats, too. Temperature comes before the cuts and min_p after them, as in
Hugging Face's transformers.

Log-probabilities are the model's own: of the row as the engine gave it, before all of the above. So does vLLM by
default (`raw_logprobs`), and a caller who sets a penalty does not want the model's confidence hidden by it. With all
options neutral, this is the distribution that is drawn from.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from pool.store.log import TokenLogprobs
from tasks.payloads import Sampling
from tasks.ports import Logits, TokenIds

#: Below this a temperature is greedy: divided logits would only overflow.
MIN_TEMPERATURE = 1e-5
#: Stands for anything smaller, as in the OpenAI reference: JSON has no infinity.
MIN_LOGPROB = -9999.0

_COUNTER = struct.Struct("<QQQ")
_FIRST_NUCLEUS = 64
#: Beyond so many tokens sorting all is quicker than another attempt.
_LAST_PARTIAL_NUCLEUS = 1024
_STRIDE = 256
_NO_TOKENS: TokenIds = np.empty(0, np.int32)

Ids = npt.NDArray[np.intp]
Weights = npt.NDArray[np.float32]


def draw(
    row: Logits,
    sampling: Sampling,
    *,
    seed: int,
    choice: int,
    position: int,
    banned: Collection[int] = (),
    prompt: TokenIds = _NO_TOKENS,
    output: Sequence[int] = (),
) -> int:
    """The token that follows, drawn from `row` (V,) float32, which is left as it is.

    `seed`: the job's (sampling.seed is not read); `choice`: which of the n outputs; `position`: output tokens of this
    choice so far. Banned ids are never drawn. `prompt` (P,) and `output` are the tokens so far, which only penalties
    look at. Greedy ties go to the lowest id. Raises ValueError when no token is left or the logits are not numbers.
    """
    row = _adjusted(row, sampling, banned, prompt, output)
    best = int(row.argmax())
    if not math.isfinite(row[best]):
        raise ValueError("the logits hold no finite maximum")
    if sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1:
        return best
    ids, weights = _top_k(row, sampling.temperature, sampling.top_k, row[best])
    if sampling.top_p < 1.0:
        ids, weights = _kept(ids, weights, _nucleus(weights, sampling.top_p))
    if sampling.min_p > 0.0:
        # The likeliest has weight 1, so weights are shares of its probability.
        ids, weights = _kept(ids, weights, np.flatnonzero(weights >= np.float32(sampling.min_p)))
    picked = _pick(weights, uniform(seed, choice, position))
    return picked if ids is None else int(ids[picked])


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of the three counters (each in 0 .. 2^64 - 1)."""
    digest = hashlib.blake2b(_COUNTER.pack(seed, choice, position), digest_size=8, person=b"genpool-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def logprobs_of(row: Logits, token: int, top: int) -> TokenLogprobs:
    """Log-softmax of `row` (V,) float32 at `token`, and at the `top` largest: best first, ties to low ids.

    The row must hold a finite maximum and no NaN, as any row that was drawn from does.
    """
    with np.errstate(over="ignore"):
        shifted = row - row.max()
    # The largest is 0 and adds 1 to the sum, so nothing comes out above 0.
    log_sum = np.log(np.exp(shifted).sum(dtype=np.float64))
    count = min(top, len(row))
    likeliest = np.empty(0, np.intp)
    if count:
        likeliest = _largest(row, count, np.partition(row, len(row) - count)[len(row) - count])
        likeliest = likeliest[np.argsort(-row[likeliest], kind="stable")]
    ids = np.concatenate(([token], likeliest))
    found = np.maximum(shifted[ids] - log_sum, MIN_LOGPROB).astype(np.float32).tolist()
    return TokenLogprobs(found[0], tuple(zip(likeliest.tolist(), found[1:], strict=True)))


def _adjusted(
    row: Logits, sampling: Sampling, banned: Collection[int], prompt: TokenIds, output: Sequence[int]
) -> Logits:
    """The row with penalties, bias and bans; the row itself where there are none."""
    repetition, bias = sampling.repetition_penalty, sampling.logit_bias
    counted = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    if not (banned or bias or counted or repetition != 1.0):
        return row
    row = row.copy()
    said = np.array(output, dtype=np.intp)
    if repetition != 1.0:
        _discourage(row, np.concatenate((prompt, said)), np.float32(repetition))
    if counted:
        ids, counts = np.unique(said, return_counts=True)
        row[ids] -= (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(np.float32)
    if bias:
        row[list(bias)] += np.array(list(bias.values()), np.float32)
    if banned:
        row[list(banned)] = -np.inf
    return row


def _discourage(row: Logits, ids: Ids, penalty: np.float32) -> None:
    """Make these less likely, in place; an id that is there twice counts once."""
    logits = row[ids]
    with np.errstate(over="ignore"):
        row[ids] = np.where(logits > 0, logits / penalty, logits * penalty)


def _kept(ids: Ids | None, weights: Weights, kept: Ids) -> tuple[Ids, Weights]:
    """What is left of ids (None: all) and weights at the indices `kept`."""
    return kept if ids is None else ids[kept], weights[kept]


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
