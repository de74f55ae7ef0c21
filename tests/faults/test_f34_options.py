"""F34: an option that is accepted has its effect, the same each time, and one that genpool lacks is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.faults.conftest import StartSystem
from tests.system import TINY, Part, System
from tests.waiting import wait_until

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PROMPT = "Tell me of the sea"
#: The case itself: three choices, a seed, and their log-probabilities.
CASE: dict[str, Any] = {
    "messages": [{"role": "user", "content": PROMPT}],
    "n": 3,
    "seed": 7,
    "temperature": 1,
    "max_tokens": 300,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 2,
}
LEASE_S = 1.5
EOS = 2


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """Two workers of a model that computes."""
    return start_shared_system(serves=TINY, sections={"worker": {"lease_seconds": LEASE_S, "renew_seconds": 0.4}})


@pytest.fixture(scope="module")
def first(system: System) -> list[dict[str, Any]]:
    """The case's choices, undisturbed."""
    return choices(system)


def ask(system: System, route: str, **body: Any) -> dict[str, Any]:
    """A whole answer."""
    answer = system.http.post(system.api_url(system.apis[0]) + route, json={"model": TINY, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def choices(system: System, **fields: Any) -> list[dict[str, Any]]:
    """The case's choices with these fields changed."""
    found: list[dict[str, Any]] = ask(system, CHAT, **CASE | fields)["choices"]
    return found


def chunks(system: System, **fields: Any) -> Iterator[dict[str, Any]]:
    """The case's stream."""
    url = system.api_url(system.apis[0]) + CHAT
    with system.http.stream("POST", url, json={"model": TINY, **CASE, **fields, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def joined(stream: list[dict[str, Any]], n: int = 3) -> list[dict[str, Any]]:
    """A stream's choices, as the whole answer has them."""
    found: list[dict[str, Any]] = [{"text": "", "logprobs": [], "finish_reason": None} for _ in range(n)]
    for chunk in stream:
        for choice in chunk["choices"]:
            told = found[choice["index"]]
            told["text"] += choice["delta"].get("content", "")
            told["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            told["finish_reason"] = choice["finish_reason"] or told["finish_reason"]
    return found


def parts(answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same of a whole answer."""
    return [
        {
            "text": choice["message"]["content"],
            "logprobs": choice["logprobs"]["content"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in answer
    ]


def rank_of(system: System, answer: dict[str, Any]) -> str:
    """Which worker's rank made the answer."""
    return system.record(answer["id"]).rank


def test_f34_the_same_seed_gives_the_same_choices(system: System, first: list[dict[str, Any]]) -> None:
    """Three of them, all different, and again to the last logprob; another seed gives others."""
    assert len({choice["message"]["content"] for choice in first}) == 3
    assert choices(system) == first
    assert joined(list(chunks(system))) == parts(first)
    other = [choice["message"]["content"] for choice in choices(system, seed=8)]
    assert not set(other) & {choice["message"]["content"] for choice in first}


def test_f34_other_jobs_in_the_batch_change_nothing(system: System, first: list[dict[str, Any]]) -> None:
    """Of other seeds, lengths and options, before and behind it."""
    others = [{"seed": seed, "max_tokens": 40 * seed, "n": 1 + seed % 3, "top_p": 0.8} for seed in range(1, 7)]
    with ThreadPoolExecutor(len(others) + 1) as pool:
        before = [pool.submit(choices, system, **other) for other in others[:4]]
        own = pool.submit(choices, system)
        behind = [pool.submit(choices, system, **other) for other in others[4:]]
        assert own.result() == first
    assert all(each.result() for each in (*before, *behind))


def test_f34_the_other_replica_gives_the_same(system: System, first: list[dict[str, Any]]) -> None:
    """Each of the two alone."""
    ranks = set()
    for worker in system.workers:
        worker.terminate()
        answer = ask(system, CHAT, **CASE)
        ranks.add(rank_of(system, answer))
        assert answer["choices"] == first
        worker.start()
        system.await_worker(worker)
    assert len(ranks) == 2


def test_f34_a_takeover_changes_nothing(system: System) -> None:
    """kill -9 in the middle: the stream goes on elsewhere with the same tokens and logprobs, and whoever asks later is
    told the same again."""
    fields = {"max_tokens": 1200}
    undisturbed = parts(choices(system, **fields))
    stream = chunks(system, **fields)
    seen = [next(stream)]
    job = seen[0]["id"]
    wait_until(lambda: system.record(job).logged_tokens > 150, description="some tokens of each choice")
    victim = _holder(system, job)
    victim.kill()
    seen += stream
    assert joined(seen) == undisturbed
    assert system.record(job).attempt == 2
    victim.start()
    system.await_worker(victim)
    polled = system.http.get(f"{system.api_url(system.apis[0])}{RESPONSES}/{job}").json()
    (contents,) = zip(*(item["content"] for item in polled["output"]), strict=True)
    assert [content["logprobs"] for content in contents] == [choice["logprobs"] for choice in undisturbed]
    system.assert_at_rest()


def _holder(system: System, job: str) -> Part:
    return system.holder(system.record(job).rank, TINY)


def test_f34_logprobs_are_sane(system: System, first: list[dict[str, Any]]) -> None:
    """Two alternatives a token, the likelier first, their probabilities no more than 1; at temperature 0 the drawn one
    is the first of them."""
    greedy = choices(system, temperature=0, n=1)
    for choice in (*first, *greedy):
        tokens = choice["logprobs"]["content"]
        assert (
            b"".join(bytes(token["bytes"]) for token in tokens)
            .decode("utf-8", "replace")
            .startswith(choice["message"]["content"].rstrip("\ufffd"))
        )
        for token in tokens:
            best, second = (other["logprob"] for other in token["top_logprobs"])
            assert second <= best <= 0
            assert token["logprob"] <= best
            assert math.exp(best) + math.exp(second) <= 1 + 1e-6
    assert all(token["token"] == token["top_logprobs"][0]["token"] for token in greedy[0]["logprobs"]["content"])


def test_f34_usage_sums_over_choices(system: System) -> None:
    """Each has its own length; whole and streamed."""
    fields = {"max_tokens": 25, "stream_options": {"include_usage": True}}
    *_, last = chunks(system, **fields)
    whole = ask(system, CHAT, **CASE | {"max_tokens": 25})["usage"]
    assert whole["completion_tokens"] == last["usage"]["completion_tokens"] == 3 * 25


BASE: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
LIMITS = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens"}
INPUTS: dict[str, Any] = {
    CHAT: {"messages": CASE["messages"]},
    COMPLETIONS: {"prompt": PROMPT},
    RESPONSES: {"input": PROMPT},
}


def told(system: System, route: str, **fields: Any) -> tuple[str, str, int]:
    """Text, reason and output tokens of the only choice, up to 60."""
    answer = ask(system, route, **INPUTS[route], **{LIMITS[route]: 60, **BASE, **fields})
    if route == RESPONSES:
        reason = {"completed": "stop", "incomplete": "length"}[answer["status"]]
        return answer["output"][0]["content"][0]["text"], reason, answer["usage"]["output_tokens"]
    (choice,) = answer["choices"]
    text = choice["text"] if route == COMPLETIONS else choice["message"]["content"]
    return text, choice["finish_reason"], answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("route", INPUTS)
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0}, {"top_p": 0.2}, {"top_k": 2}, {"min_p": 0.8}, {"seed": 8}, {"repetition_penalty": 3.0},
        {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"frequency_penalty": -2.0}, {"logit_bias": {"100": 99}},
    ],
    ids=str,
)  # fmt: skip
def test_f34_each_option_that_steers_draws_does(system: System, route: str, fields: dict[str, Any]) -> None:
    """The text is another than without it, and the same when it is asked for again."""
    plain, steered = told(system, route), told(system, route, **fields)
    assert steered[0] != plain[0]
    assert steered == told(system, route, **fields)


@pytest.mark.parametrize("route", INPUTS)
def test_f34_each_option_that_ends_a_choice_does(system: System, route: str) -> None:
    """Ends that are certain, because one token is forced: the model's own, unless it is ignored or too early, and those
    that the request names."""
    eos, letter = {"logit_bias": {str(EOS): 100}}, {"logit_bias": {str(3 + ord("a")): 100}}
    assert told(system, route, **eos, ignore_eos=False) == ("", "stop", 1)
    assert told(system, route, **eos) == ("", "length", 60)
    assert told(system, route, **eos, ignore_eos=False, min_tokens=5)[1:] == ("stop", 6)
    assert told(system, route, **letter) == ("a" * 60, "length", 60)
    assert told(system, route, **letter, stop=["aaa"]) == ("", "stop", 3)
    assert told(system, route, **letter, stop_token_ids=[3 + ord("a")]) == ("", "stop", 1)
    assert told(system, route, **letter, stop_token_ids=[3 + ord("a")], min_tokens=4)[1:] == ("stop", 5)
    assert told(system, route, **letter, **{LIMITS[route]: 7}) == ("a" * 7, "length", 7)


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        *((route, {option: value}, option) for route in INPUTS for option, value in (
            ("grammar", "root ::= x"), ("best_of", 2), ("guided_json", {}), ("tools", [{"type": "function"}]),
            ("logits_processors", ["x"]), ("beam_width", 2),
        )),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (COMPLETIONS, {"echo": True, "logprobs": 2}, "echo"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (RESPONSES, {"n": 2}, "n"),
    ],
)  # fmt: skip
def test_f34_what_genpool_lacks_is_refused_by_name(
    system: System, route: str, fields: dict[str, Any], param: str
) -> None:
    """400, and nothing runs."""
    url = system.api_url(system.apis[0]) + route
    refused = system.http.post(url, json={"model": TINY, **INPUTS[route], **fields})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
