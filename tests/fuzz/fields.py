"""Hostile values in every JSON field of every route that takes a body.

A case is a valid body with one or two fields replaced, at any depth, or a body broken as a whole. Most are refused;
some are valid and run. What counts is that each is answered, with a status that a client can act on, in valid JSON.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import httpx

from webapp.schemas import chat, completions, responses

THREADS = 12
#: An answer is a generation, a refusal that names the field, "not now", or an end by a time limit that was sent along.
#: Never "something broke".
ALLOWED = frozenset({200, 400, 404, 409, 413, 415, 429, 504})
TIMEOUT_S = 60.0
TOKENS = 2
BODY_BYTES = 300_000

TEXTS = (
    "", " ", "x", "\u0000", "a\u0000b", "\ud800", "\udfff\ud800", "\u202e\u200b", "\U0001f600", "e\u0301" * 50, "null",
    "true", "0", "../../etc/passwd", "resp_x", "gp:{tiny:0}:*", "*", "\r\nX: y", "${jndi:x}", "'; FLUSHALL",
    "x" * 70_000, "x" * 65, "x" * 257, "x" * 513, "resp_tiny.0_" + "0" * 32, "\u2028\u2029", "\x7f\x1b[31m", "NaN",
)  # fmt: skip
NUMBERS = (
    0, -0.0, 1, -1, 0.5, 1.5, 2, 3, 16, 17, 100, 255, 256, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**30, 1e-9, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None, True, False, [], {}, [None], [[]], [{}], [""], ["x"], ["x"] * 100, [1], [-1], [True], [1.0], [2**31],
    [[1, 2]], {"": ""}, {"x": "y"}, {"type": "text"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}},
    {"a" * 200: "b"},
    {"__proto__": {}}, {"include_usage": True}, {"k": "v" * 600}, {str(number): "v" for number in range(40)},
)  # fmt: skip
RAW = (
    b"", b" ", b"{", b"null", b"3", b'"x"', b"[]", b"[" * 20_000, b'{"a":' * 20_000, b"\xff\xfe",
    b'{"model": "tiny", "model": "tiny"}',
    b'{"model": 1e999}', b"{" + b'"a":1,' * 1000 + b'"b":2}', b'{"seed": ' + b"9" * 6000 + b"}",
    b"\xef\xbb\xbf{}", b"{}" * 2,
    b"x" * (BODY_BYTES + 1),
)  # fmt: skip


@dataclass(frozen=True)
class Route:
    """A valid body, and all fields that it could have."""

    path: str
    body: dict[str, Any]
    fields: tuple[str, ...]


def routes(model: str) -> list[Route]:
    """The routes that take a body."""
    turn = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
    shared = {"model": model, "stop": ["zz"], "metadata": {"k": "v"}, "temperature": 1.0, "stream": False}
    return [
        Route(
            "/v1/responses",
            {**shared, "input": [item], "max_output_tokens": TOKENS},
            (*responses.ResponsesRequest.model_fields, *responses.UNSUPPORTED_HERE),
        ),
        Route(
            "/v1/chat/completions",
            {**shared, "messages": [turn], "max_tokens": TOKENS, "n": 2},
            (*chat.ChatRequest.model_fields, *chat.UNSUPPORTED_HERE),
        ),
        Route(
            "/v1/completions",
            {**shared, "prompt": "x", "max_tokens": TOKENS},
            (*completions.CompletionRequest.model_fields, *completions.UNSUPPORTED_HERE),
        ),
    ]


@dataclass
class Case:
    """One request."""

    path: str
    content: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})


def cases(model: str, count: int, seed: int) -> Iterator[Case]:
    """`count` cases; the same for the same seed. The first go through every field of every route."""
    rng = random.Random(seed)
    known = routes(model)
    systematic = [(route, name) for route in known for name in route.fields]
    for number in range(count):
        if number % 40 == 39:
            yield Case(rng.choice(known).path, rng.choice(RAW))
            continue
        route, name = systematic[number] if number < len(systematic) else (rng.choice(known), "")
        body = deepcopy(route.body)
        if name:
            body[name] = _value(rng)
        for _ in range(0 if name else rng.choice((1, 1, 1, 2))):
            _replace(rng, body, route.fields)
        yield Case(route.path, json.dumps(body).encode(), _headers(rng))


def _headers(rng: random.Random) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if rng.random() < 0.02:
        headers["Content-Type"] = rng.choice(
            ("text/plain", "application/json; charset=gbk", "", "application/x-www-form")
        )
    if rng.random() < 0.02:
        headers["Idempotency-Key"] = rng.choice(("k", "x" * 300, "\x01", "a b", "*"))
    if rng.random() < 0.02:
        headers["Content-Encoding"] = rng.choice(("gzip", "identity", "br", "x"))
    return headers


def _value(rng: random.Random) -> Any:
    return deepcopy(rng.choice(rng.choice((TEXTS, NUMBERS, OTHERS))))


def _replace(rng: random.Random, body: dict[str, Any], fields: tuple[str, ...]) -> None:
    """Put a hostile value at a random place: an existing one at any depth, or a field that is not there yet."""
    if rng.random() < 0.4:
        body[rng.choice(fields)] = _value(rng)
        return
    places: list[Callable[[Any], None]] = []

    def walk(node: Any) -> None:
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in pairs:
            places.append(lambda value, node=node, key=key: node.__setitem__(key, value))
            walk(child)

    walk(body)
    rng.choice(places)(_value(rng))


@dataclass
class Outcome:
    """How many answers of each status, and what must not be."""

    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def run(url: str, model: str, count: int, seed: int) -> Outcome:
    """Send all cases to the node at `url`, some at once."""
    outcome = Outcome()
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client, ThreadPoolExecutor(THREADS) as pool:
        for status, problem in pool.map(lambda case: _send(client, case), cases(model, count, seed)):
            outcome.statuses[status] += 1
            if problem:
                outcome.problems.append(problem)
    return outcome


def _send(client: httpx.Client, case: Case) -> tuple[int, str]:
    try:
        answer = client.post(case.path, content=case.content, headers=case.headers)
        text = answer.content.decode()
        if answer.headers.get("content-type", "").startswith("application/json"):
            json.loads(text)
        wrong = "" if answer.status_code in ALLOWED else text[:500]
        status = answer.status_code
    except (httpx.HTTPError, ValueError) as error:
        status, wrong = 0, repr(error)
    return status, wrong and f"{status} {case.path} {case.headers} {case.content[:300]!r}: {wrong}"
