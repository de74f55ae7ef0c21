"""Any server that speaks OpenAI's API: messages or text as they were given, and text back.

It tells no token ids. So a piece of text counts as one in the log, whatever it is made of, and a generation that was
lost after it has shown text cannot go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pool.backend_settings import FURTHER_OPTIONS
from tasks.payloads import ChatPrompt, Sampling, TextPrompt
from tasks.ports import Generation
from workers.backends.dialect import Ask, News, upstream_seed
from workers.backends.failures import invalid_answer
from workers.backends.reading import count_of, document_of, object_of, objects_of, text_of

DONE = "[DONE]"
_NEUTRAL = Sampling()


class OpenAiDialect:
    """`model`: the server's name of it; `options`: which it takes beyond OpenAI's own."""

    logprobs = False

    def __init__(self, model: str, options: Sequence[str]) -> None:
        self._model = model
        self._options = tuple(options)
        self.lacks = tuple(option for option in FURTHER_OPTIONS if option not in options)

    def ask(self, generation: Generation, choice: int, known: Sequence[int], *, whole: bool) -> Ask:  # noqa: ARG002
        """As `Dialect.ask`, from the beginning: nothing can be known."""
        assert generation.given is not None, "somebody tokenized for a server that takes text"
        body: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling(generation, choice),
        }
        if generation.max_tokens:
            body["max_tokens"] = generation.max_tokens
        prompt = generation.given
        if isinstance(prompt, ChatPrompt):
            messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
            return Ask("chat/completions", body | {"messages": messages})
        plain = prompt.text if isinstance(prompt, TextPrompt) else list(prompt.token_ids)
        return Ask("completions", body | {"prompt": plain})

    def _sampling(self, generation: Generation, choice: int) -> dict[str, Any]:
        """What is not neutral; temperature and top_p in any case, as servers have other defaults."""
        sampling = generation.sampling
        found: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        for name in ("presence_penalty", "frequency_penalty", *self._options):
            value = getattr(sampling, name)
            if value != getattr(_NEUTRAL, name):
                found[name] = list(value) if isinstance(value, tuple) else value
        if sampling.stop:
            found["stop"] = list(sampling.stop)
        if sampling.logit_bias:
            found["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if sampling.seed is not None:
            found["seed"] = upstream_seed(generation.seed, choice, 0)
        return found

    def read(self, data: str) -> News:
        """As `Dialect.read`."""
        if data == DONE:
            return News(over=True)
        found = document_of(data)
        news = News()
        for choice in objects_of(found, "choices"):
            # Chat tells deltas, completions tell texts.
            news.text += text_of(object_of(choice, "delta"), "content") + text_of(choice, "text")
            news.finish = finish_of(choice) or news.finish
        return usage_in(found, news)


def finish_of(choice: Mapping[str, Any]) -> str:
    """Why a choice ended, "" while it goes on."""
    return text_of(choice, "finish_reason")


def usage_in(found: Mapping[str, Any], news: News) -> News:
    """The news with the counts of tokens that came with it."""
    usage = found.get("usage")
    if usage is None:
        return news
    if not isinstance(usage, dict):
        raise invalid_answer("usage is no object")
    news.prompt_tokens = count_of(usage, "prompt_tokens")
    news.output_tokens = count_of(usage, "completion_tokens")
    news.cached_tokens = count_of(usage.get("prompt_tokens_details"), "cached_tokens")
    return news
