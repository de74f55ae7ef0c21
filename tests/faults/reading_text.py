"""The text of one request, read in every way that the API offers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tests.system import SCRIPTED, System


@dataclass(frozen=True)
class Told:
    """`text` and why it ended, `stop` or `length`; `deltas`: how a stream cut it, empty for an answer in one piece."""

    text: str
    ended: str
    deltas: tuple[str, ...] = ()


def script(*pieces: bytes) -> str:
    """What makes the scripted engine emit these tokens."""
    return f"pieces {' '.join(piece.hex() for piece in pieces)}"


def read_in_all_ways(system: System, prompt: str, **options: Any) -> dict[str, Told]:
    """Responses and chat, whole and streamed, and the stream of the first read again afterwards."""
    chat = {**options, "messages": [{"role": "user", "content": prompt}]}
    if "max_output_tokens" in chat:
        chat["max_tokens"] = chat.pop("max_output_tokens")
    response = {**options, "input": prompt}
    streamed, job = _streamed_response(system, response)
    return {
        "response": _response(_post(system, "/v1/responses", response)),
        "response stream": streamed,
        "replay": _events(_get(system, f"/v1/responses/{job}?stream=true")),
        "poll": _response(json.loads(_get(system, f"/v1/responses/{job}"))),
        "chat": _chat(_post(system, "/v1/chat/completions", chat)),
        "chat stream": _chat_stream(system, chat),
    }


def _url(system: System, path: str) -> str:
    return f"{system.api_url(system.apis[0])}{path}"


def _get(system: System, path: str) -> bytes:
    answer = system.http.get(_url(system, path))
    assert answer.status_code == 200, answer.text
    return answer.content


def _post(system: System, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = system.http.post(_url(system, path), json={"model": SCRIPTED, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = json.loads(answer.content.decode("utf-8", "strict"))
    return found


def _response(answer: dict[str, Any]) -> Told:
    ended = {"completed": "stop", "incomplete": "length"}[answer["status"]]
    return Told("".join(part["text"] for item in answer["output"] for part in item["content"]), ended)


def _chat(answer: dict[str, Any]) -> Told:
    (choice,) = answer["choices"]
    return Told(choice["message"]["content"], choice["finish_reason"])


def _frames(content: bytes) -> list[dict[str, Any]]:
    """Each event on its own is valid UTF-8 and valid JSON."""
    events = [event for event in content.split(b"\n\n") if b"data: {" in event]
    return [json.loads(event.decode("utf-8", "strict").partition("data: ")[2]) for event in events]


def _streamed_response(system: System, body: dict[str, Any]) -> tuple[Told, str]:
    answer = system.http.post(_url(system, "/v1/responses"), json={"model": SCRIPTED, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    return _events(answer.content), _frames(answer.content)[0]["response"]["id"]


def _events(content: bytes) -> Told:
    frames = _frames(content)
    deltas = tuple(frame["delta"] for frame in frames if frame["type"] == "response.output_text.delta")
    (done,) = (frame["text"] for frame in frames if frame["type"] == "response.output_text.done")
    final = _response(frames[-1]["response"])
    assert done == final.text
    assert "".join(deltas) == final.text
    return Told(final.text, final.ended, deltas)


def _chat_stream(system: System, body: dict[str, Any]) -> Told:
    answer = system.http.post(_url(system, "/v1/chat/completions"), json={"model": SCRIPTED, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    choices = [frame["choices"][0] for frame in _frames(answer.content)]
    deltas = tuple(text for choice in choices if (text := choice["delta"].get("content")))
    return Told("".join(deltas), choices[-1]["finish_reason"], deltas)


def are_joins(deltas: Iterable[str], pieces: Iterable[str]) -> bool:
    """Whether `deltas` are `pieces` in order, neighbours perhaps joined: a busy machine shows two steps at once."""
    ends = list(accumulate(map(len, pieces)))
    shown = list(accumulate(map(len, deltas)))
    return "".join(deltas) == "".join(pieces) and set(shown) <= set(ends)
