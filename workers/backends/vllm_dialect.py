"""vLLM, asked by `/v1/completions` with token ids; it tells those of its output (`return_token_ids`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pool.store.log import TokenLogprobs
from tasks.ports import Generation
from workers.backends.dialect import Ask, News, upstream_seed
from workers.backends.failures import invalid_answer
from workers.backends.openai_dialect import DONE, finish_of, usage_in
from workers.backends.reading import document_of, ids_of, logprobs_of, object_of, objects_of

_PREFIX = "token_id:"


class VllmDialect:
    """`model`: the server's name of it."""

    lacks: tuple[str, ...] = ()
    logprobs = True

    def __init__(self, model: str) -> None:
        self._model = model

    def ask(self, generation: Generation, choice: int, known: Sequence[int], *, whole: bool) -> Ask:  # noqa: ARG002
        """As `Dialect.ask`; all ids are told in any case."""
        sampling = generation.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": [*generation.prompt.tolist(), *known],
            "max_tokens": generation.max_tokens - len(known),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "add_special_tokens": False,
            "seed": upstream_seed(generation.seed, choice, len(known)),
            # Each one, also at its neutral value: a model may bring other defaults.
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "ignore_eos": sampling.ignore_eos,
            "min_tokens": max(sampling.min_tokens - len(known), 0),
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if sampling.logprobs:
            body |= {"logprobs": sampling.top_logprobs, "return_tokens_as_token_ids": True}
        if generation.tenant:
            # Nobody finds out by the clock what another tenant has asked.
            body["cache_salt"] = hashlib.sha256(generation.tenant.encode()).hexdigest()
        return Ask("completions", body)

    def read(self, data: str) -> News:
        """As `Dialect.read`."""
        if data == DONE:
            return News(over=True)
        found = document_of(data)
        news = News()
        for choice in objects_of(found, "choices"):
            news.token_ids += ids_of(choice, "token_ids")
            news.finish = finish_of(choice) or news.finish
            news.logprobs += _logprobs(choice)
        if news.logprobs and len(news.logprobs) != len(news.token_ids):
            raise invalid_answer("not every token has its log-probability")
        return usage_in(found, news)


def _logprobs(choice: Any) -> tuple[TokenLogprobs, ...]:
    told = object_of(choice, "logprobs")
    drawn = told.get("token_logprobs") or []
    likeliest = told.get("top_logprobs") or [{}] * len(drawn)
    if not isinstance(drawn, list) or not isinstance(likeliest, list) or len(drawn) != len(likeliest):
        raise invalid_answer("its log-probabilities are no lists of one length")
    return tuple(logprobs_of(each, top, len(top)) for each, top in zip(drawn, map(_by_id, likeliest), strict=True))


def _by_id(likeliest: Any) -> dict[int, Any]:
    if not isinstance(likeliest, dict | None):
        raise invalid_answer("the likeliest tokens are no object")
    found = {}
    for name, logprob in (likeliest or {}).items():
        number = name.removeprefix(_PREFIX)
        if not (number.isascii() and number.isdigit()):
            raise invalid_answer("a likely token has no id")
        found[int(number)] = logprob
    return found
