"""llama.cpp's server, asked by `/completion`: prompt and output are token ids.

A stream of it leaves out the ids of tokens that end within a character; it tells how many tokens it has made, so that
shows. Whoever needs them all asks for a few tokens at a time, `whole`: the server keeps the KV in between. Of
log-probabilities it never has those of such tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.payloads import Sampling
from tasks.ports import Generation
from workers.backends.dialect import Ask, News, upstream_seed
from workers.backends.failures import Rejected, invalid_answer
from workers.backends.reading import count_of, document_of, ids_of, is_id, logprobs_of, object_of, objects_of

#: Tokens of a `whole` answer.
WHOLE_TOKENS = 16
#: Our order of steps; what it does not name is off.
_SAMPLERS = ["penalties", "temperature", "top_k", "top_p", "min_p"]
_FINISH = {"eos": "stop", "word": "stop", "limit": "length", "none": ""}


class LlamaCppDialect:
    """`/completion` with token ids."""

    lacks = ("min_tokens",)
    logprobs = True

    def ask(self, generation: Generation, choice: int, known: Sequence[int], *, whole: bool) -> Ask:
        """As `Dialect.ask`."""
        sampling = generation.sampling
        left = generation.max_tokens - len(known)
        body: dict[str, Any] = {
            "prompt": [*generation.prompt.tolist(), *known],
            "n_predict": min(left, WHOLE_TOKENS) if whole else left,
            "stream": not whole,
            "return_tokens": True,
            "return_progress": not whole,
            "cache_prompt": True,
            "seed": upstream_seed(generation.seed, choice, len(known)),
            "n_probs": max(sampling.top_logprobs, 1) if sampling.logprobs else 0,
            **_options(sampling, len(generation.prompt) + generation.max_tokens),
        }
        return Ask("/completion", body, whole)

    def read(self, data: str) -> News:
        """As `Dialect.read`."""
        found = document_of(data)
        progress = object_of(found, "prompt_progress")
        if progress:
            return News(cached_tokens=count_of(progress, "cache"))
        news = News(
            token_ids=ids_of(found, "tokens"),
            made=count_of(found, "tokens_predicted"),
        )
        probabilities = objects_of(found, "completion_probabilities")
        news.logprobs = tuple(
            logprobs_of(each.get("logprob"), _top(each), len(each.get("top_logprobs") or ())) for each in probabilities
        )
        if probabilities and [each.get("id") for each in probabilities] != list(news.token_ids):
            raise Rejected(
                "llama.cpp's server gives no log-probabilities of tokens that end within a character.",
                code="logprobs_unavailable",
            )
        if found.get("stop") is True:
            news.over = True
            stop_type = found.get("stop_type")
            news.finish = _FINISH.get(stop_type, "stop") if isinstance(stop_type, str) else "stop"
            news.cached_tokens = count_of(object_of(found, "timings"), "cache_n")
        return news


def _options(sampling: Sampling, most_tokens: int) -> dict[str, Any]:
    """Every one, also at its neutral value: the server's own defaults are others. Penalties look at all tokens."""
    penalises = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    return {
        "samplers": _SAMPLERS,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_last_n": most_tokens if penalises else 0,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": [[token, bias] for token, bias in sampling.logit_bias.items()],
    }


def _top(entry: Mapping[str, Any]) -> dict[int, Any]:
    found = {}
    for each in objects_of(entry, "top_logprobs"):
        token = each.get("id")
        if not is_id(token):
            raise invalid_answer("a likely token has no id")
        found[token] = each.get("logprob")
    return found
