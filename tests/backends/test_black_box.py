"""The same requests to models that different backends run, through the official client: one behaviour.

What a backend lacks is refused by name; nothing else differs but the text itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai as sdk
import pytest
from openai import OpenAI

from tests.backends.conftest import Backend
from tests.waiting import wait_until

PROMPT = "the other people of this world "
HELLO: Any = [{"role": "user", "content": "Say hello"}]
GREEDY: dict[str, Any] = {"temperature": 0.0}
#: Values that ask for something.
ASKED: dict[str, Any] = {
    "top_k": 5,
    "min_p": 0.2,
    "repetition_penalty": 1.3,
    "stop_token_ids": [400, 401],
    "ignore_eos": True,
    "min_tokens": 3,
}


def complete(client: OpenAI, backend: Backend, tokens: int = 24, prompt: Any = PROMPT, **options: Any) -> Any:
    """A whole completion."""
    return client.completions.create(model=backend.model, prompt=prompt, max_tokens=tokens, **{**GREEDY, **options})


def test_a_chat_has_its_text_and_usage(client: OpenAI, backend: Backend) -> None:
    """Choices in order, usage that adds up, and a limit that shows."""
    answer = client.chat.completions.create(
        model=backend.model, messages=HELLO, n=2, max_completion_tokens=9, seed=3, temperature=0.9
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.finish_reason in ("length", "stop") for choice in answer.choices)
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens > 0
    assert 2 <= usage.completion_tokens <= 18
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None and (usage.prompt_tokens_details.cached_tokens or 0) >= 0


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI, backend: Backend) -> None:
    """Piece by piece the same text, the reason, and usage in the last chunk."""
    whole = complete(client, backend)
    chunks = list(
        client.completions.create(
            model=backend.model,
            prompt=PROMPT,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) <= {None}
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 3


def test_events_of_a_response_have_no_gap(client: OpenAI, backend: Backend) -> None:
    """Numbered from 0, one end, and deltas that make up the text; the same when it is read again."""
    with client.responses.create(model=backend.model, input="Go on", stream=True, max_output_tokens=16) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == last.response.output_text
    with client.responses.retrieve(last.response.id, stream=True) as again:
        assert [event.type for event in again] == [event.type for event in events]


def test_a_seed_repeats_a_generation(client: OpenAI, backend: Backend) -> None:
    """The same choices for the same seed, others for another."""

    def texts(seed: int) -> list[str]:
        answer = complete(client, backend, n=2, seed=seed, temperature=1.0)
        return [choice.text for choice in answer.choices]

    first = texts(7)
    assert first[0] != first[1]
    assert texts(7) == first
    assert texts(8) != first


def test_company_changes_nothing(client: OpenAI, backend: Backend) -> None:
    """Twelve at once give what each gives alone, where that is promised."""
    if backend.model == "vllm":
        pytest.skip("vLLM promises nothing of the kind on CPUs, and differs once in ten")
    prompts = [f"{PROMPT}{word} " for word in ("and", "but", "or", "if", "then", "they")]

    def text_of(prompt: str) -> str:
        return str(complete(client, backend, 16, prompt).choices[0].text)

    alone = list(map(text_of, prompts))
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(text_of, prompts * 2))
    assert together == alone * 2


def test_a_stop_string_ends_the_text_before_it(client: OpenAI, backend: Backend) -> None:
    """In a stream too; what was withheld for it is shown when it does not come."""
    text: str = complete(client, backend).choices[0].text
    # Plain text from the middle, as its bytes are the same to everybody.
    stop = next(text[at : at + 3] for at in range(4, len(text) - 2) if text[at : at + 3].isascii())
    cut = text[: text.index(stop)]
    answer = complete(client, backend, stop=[stop, "never said"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
    chunks = client.completions.create(
        model=backend.model, prompt=PROMPT, max_tokens=24, stream=True, stop=[stop], **GREEDY
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut
    if backend.model != "llama-text":
        # llama.cpp's server itself drops what it withheld, where the output ends by its length.
        assert complete(client, backend, stop=[f"{text[-2:]}!"]).choices[0].text == text


def test_a_cancel_ends_it_and_frees_its_place(client: OpenAI, backend: Backend) -> None:
    """In the middle of its output; others take its place at once."""
    jobs = [
        client.responses.create(model=backend.model, input="Go on", background=True, max_output_tokens=400).id
        for _ in range(12)
    ]
    ended = [backend.system.jobs.get(job).state for job in jobs if _cancelled(client, job) is None]
    assert set(ended) <= {"completed", "incomplete"} and len(ended) < len(jobs)
    assert complete(client, backend, 4).usage.completion_tokens >= 1
    for model in dict.fromkeys((backend.model, "tiny")):
        wait_until(
            lambda model=model: all(rank.facts["runtime_inflight"] == 0 for rank in backend.system.ranks(model)),
            description=f"nothing of {model} in flight",
        )


def _cancelled(client: OpenAI, job: str) -> str | None:
    """None where it had ended before."""
    try:
        assert client.responses.cancel(job).status == "cancelled"
    except sdk.BadRequestError:
        return None
    return client.responses.cancel(job).status


def test_leaving_a_stream_cancels_its_job(client: OpenAI, backend: Backend) -> None:
    """A client that goes away ends what it has asked for."""
    stream = client.chat.completions.create(
        model=backend.model, messages=HELLO, stream=True, max_completion_tokens=400, temperature=0.9
    )
    first = next(iter(stream))
    stream.close()
    jobs = backend.system.jobs
    wait_until(lambda: jobs.get(first.id).terminal, description="the job to end")


def test_log_probabilities_are_given_or_refused(client: OpenAI, backend: Backend) -> None:
    """One for each shown token, none above 0, the greedy one the likeliest; or 400 with model and option."""
    if "logprobs" in backend.lacks:
        with pytest.raises(sdk.BadRequestError) as refused:
            complete(client, backend, 4, logprobs=3)
        assert refused.value.param == "logprobs" and f"model {backend.model}" in refused.value.message
        return
    prompts = (f"{PROMPT}{word} " for word in ("and", "but", "or", "if", "then", "they", "we", "people"))
    told = next(filter(None, map(partial(_logprobs, client, backend), prompts)))
    assert all(value <= 0 for value in told.token_logprobs)
    for token, value, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert max(top.values()) == value == top[token]


def _logprobs(client: OpenAI, backend: Backend, prompt: str) -> Any:
    """None where the server has none for these tokens, and says so."""
    try:
        return complete(client, backend, 3, prompt, logprobs=3).choices[0].logprobs
    except sdk.BadRequestError as error:
        assert error.code == "logprobs_unavailable"
        return None


@pytest.mark.parametrize("option", ASKED)
def test_further_options_are_taken_or_refused_by_name(client: OpenAI, backend: Backend, option: str) -> None:
    """400 names the option and the model."""
    ask: Callable[[], Any] = partial(complete, client, backend, 4, extra_body={option: ASKED[option]})
    if option not in backend.lacks:
        assert ask().usage.completion_tokens >= 1
        return
    with pytest.raises(sdk.BadRequestError) as refused:
        ask()
    assert (refused.value.param, refused.value.code) == (option, "unsupported_parameter")
    assert f"model {backend.model}" in refused.value.message


def test_what_does_not_fit_is_a_400(client: OpenAI, backend: Backend) -> None:
    """Whoever counts the tokens."""
    with pytest.raises(sdk.BadRequestError) as refused:
        complete(client, backend, 8, "word " * 9000)
    assert refused.value.code == "context_length_exceeded"


def test_token_ids_are_a_prompt(client: OpenAI, backend: Backend) -> None:
    """Counted as they are."""
    answer = complete(client, backend, 4, [300, 301, 302])
    assert answer.usage.prompt_tokens == 3
    assert 1 <= answer.usage.completion_tokens <= 4
