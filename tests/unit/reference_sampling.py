"""The sampler once more, slow and clear: each option is written as its definition reads, token by token, in float64.

It shares with the fast one only the random number of a counter. Where a float32 and a float64 sum fall on two sides of
a border, either answer is right, so the reference gives all that are: those of borders moved by a hair.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import product

from tasks.payloads import Sampling
from workers.sampling import uniform

#: Relative; far above float32's rounding of a short sum, far below any difference that matters.
HAIR = 1e-5


def adjusted(
    row: Sequence[float], sampling: Sampling, banned: Collection[int], prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """The logits with penalties, bias and bans."""
    logits = list(row)
    penalty = sampling.repetition_penalty
    for token in {*prompt, *output}:
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in output:
        logits[token] -= sampling.frequency_penalty
    for token in set(output):
        logits[token] -= sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    for token in banned:
        logits[token] = -math.inf
    return logits


def softmax(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Probabilities."""
    largest = max(logits)
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def survivors(logits: Sequence[float], sampling: Sampling, moved: float) -> dict[int, float]:
    """Probabilities of the tokens that the cuts leave, by id; borders are moved by the factor `moved`."""
    shares = softmax(logits, sampling.temperature)
    left = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.top_k:
        left = left[: sampling.top_k]
    total, held, nucleus = sum(shares[token] for token in left), 0.0, []
    for token in left:
        if sampling.top_p == 1.0 or held < sampling.top_p * total * moved or not nucleus:
            nucleus.append(token)
        held += shares[token]
    floor = sampling.min_p * shares[left[0]] * moved
    return {token: shares[token] for token in nucleus if shares[token] >= floor or token == left[0]}


def draws(
    row: Sequence[float],
    sampling: Sampling,
    *,
    seed: int,
    choice: int,
    position: int,
    banned: Collection[int] = (),
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> set[int]:
    """The token that follows; more than one only where it hangs by a hair."""
    logits = adjusted(row, sampling, banned, prompt, output)
    if sampling.temperature == 0.0:
        return {token for token, logit in enumerate(logits) if logit == max(logits)}
    point = uniform(seed, choice, position)
    found = set()
    for moved, shift in product((1 - HAIR, 1.0, 1 + HAIR), (-HAIR, 0.0, HAIR)):
        left = survivors(logits, sampling, moved)
        found.add(_at(left, min(max(point + shift, 0.0), 1.0)))
    return found


def _at(shares: dict[int, float], point: float) -> int:
    """The token whose share, in the order of ids, covers the point."""
    target, reached = point * sum(shares.values()), 0.0
    tokens = sorted(shares)
    for token in tokens:
        reached += shares[token]
        if target < reached:
            return token
    return max(token for token in tokens if shares[token] > 0)


def logprobs(row: Sequence[float]) -> list[float]:
    """The logarithm of each token's probability."""
    largest = max(row)
    log_sum = largest + math.log(math.fsum(math.exp(logit - largest) for logit in row))
    return [logit - log_sum for logit in row]
