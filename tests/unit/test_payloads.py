"""The request's sampling options: strict, bounded, and readable in records of every age."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pool.errors import InvalidRequest
from tasks.generate import request_of
from tasks.payloads import MAX_BIASED_TOKENS, GenerationOptions, Sampling, invalid_request

WRONG = [
    *(("min_p", value) for value in (-0.1, 1.1, "0", True, float("nan"))),
    *(("repetition_penalty", value) for value in (0, -1, 0.001, 101, "1", True, float("inf"))),
    *((name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, "0", True)),
    *(("logit_bias", value) for value in ([], 1, {"5": 101}, {"5": -100.5}, {"5": "1"}, {"5": True}, {"5": None})),
    *(("logit_bias", {key: 1}) for key in ("x", "-1", "05", "1.0", "", "9" * 5000, "\u0663", str(2**31))),
    ("logit_bias", {str(token): 1 for token in range(MAX_BIASED_TOKENS + 1)}),
    ("logit_bias", {"5": 10**400}),
    *(("stop_token_ids", value) for value in ([-1], [2**31], ["1"], [True], [1.0], 5, list(range(65)))),
    *(("logprobs", value) for value in (1, "true", 0)),
    *(("top_logprobs", value) for value in (-1, 21, "1", True, 1.0)),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value)[:24])
def test_what_is_out_of_range_or_of_another_type_is_refused(name: str, value: Any) -> None:
    """By name; nothing is coerced but JSON's text keys."""
    given = {"logprobs": True} if name == "top_logprobs" else {}
    with pytest.raises(ValidationError) as refusal:
        Sampling.model_validate({**given, name: tuple(value) if name == "stop_token_ids" and value != 5 else value})
    error = invalid_request(refusal.value)
    assert error.message.startswith(name)
    assert str(error.param).partition("[")[0].partition(".")[0] == name


def test_alternatives_are_those_of_logprobs() -> None:
    """One cannot have them alone."""
    with pytest.raises(ValidationError, match="only allowed when logprobs is true"):
        Sampling(top_logprobs=1)
    assert Sampling(top_logprobs=0).top_logprobs == 0


def test_bias_is_keyed_by_number_or_by_its_text() -> None:
    """As Python and as JSON write it."""
    assert Sampling.model_validate({"logit_bias": {"0": 1, 7: -100}}).logit_bias == {0: 1.0, 7: -100.0}


@pytest.mark.parametrize(
    "stored",
    [
        '{"version":1,"sampling":{"temperature":0.5,"top_p":1.0,"top_k":0,"seed":null,"stop":["x"],"ignore_eos":false,'
        '"min_tokens":2},"max_tokens":9}',
        '{"version":1,"sampling":{"temperature":0.5,"stop":["x"],"min_tokens":2},"max_tokens":9}',
    ],
    ids=["as the first release wrote it", "without what is at its default"],
)
def test_records_of_every_age_can_be_read(stored: str) -> None:
    """Options that they do not name are neutral."""
    sampling = Sampling(temperature=0.5, stop=("x",), min_tokens=2)
    assert GenerationOptions.model_validate_json(stored) == GenerationOptions(sampling=sampling, max_tokens=9)


def test_a_record_names_only_what_is_not_at_its_default() -> None:
    """So workers that do not know an option yet can run every job that does not use it; nothing is lost."""
    assert GenerationOptions().stored() == '{"version":1}'
    assert GenerationOptions(max_tokens=3).stored() == '{"version":1,"max_tokens":3}'
    sampling = Sampling(logit_bias={3: 1, 50256: -100}, stop_token_ids=(4, 5), logprobs=True, top_logprobs=2, min_p=0.1)
    options = GenerationOptions(sampling=sampling, max_tokens=3)
    assert "temperature" not in options.stored()
    assert GenerationOptions.model_validate_json(options.stored()) == options


def test_the_celery_door_takes_them_all() -> None:
    """By the same names, and with the same errors."""
    options: dict[str, Any] = {
        "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {5: 1},
        "stop_token_ids": [3], "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    found = request_of({"model": "m", "prompt": "x", **options}).sampling
    assert found == Sampling.model_validate(options | {"stop_token_ids": (3,)})
    with pytest.raises(InvalidRequest, match="top_logprobs"):
        request_of({"model": "m", "prompt": "x", **options, "top_logprobs": 21})


def test_the_celery_door_takes_lanes() -> None:
    """And fairness keys; what is no lane is refused by name."""
    found = request_of({"model": "m", "prompt": "x", "lane": "batch", "fairness_key": "a"})
    assert (found.lane, found.fairness_key) == ("batch", "a")
    assert request_of({"model": "m", "prompt": "x"}).lane == "normal"
    for name, value in (("lane", "first"), ("lane", 1), ("fairness_key", 1), ("fairness_key", "x" * 257)):
        with pytest.raises(InvalidRequest, match=name):
            request_of({"model": "m", "prompt": "x", name: value})
