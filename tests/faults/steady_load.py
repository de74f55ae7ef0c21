"""A steady load of generations of every kind, each compared with an undisturbed run of the same request.

A client asks, reads its answer to the end, and then holds everything that can be seen of the job to what the
undisturbed run gave: the answer or the joined pieces of the stream, what is stored, the log's token ids and
log-probabilities.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from pool.store.ids import parse_ref
from pool.store.jobs import JobStore
from pool.store.log import TokenLogprobs
from pool.store.records import Output
from tests.builders import job_store
from tests.system import System
from tests.waiting import wait_until

RESPONSES, CHAT, COMPLETIONS = "/v1/responses", "/v1/chat/completions", "/v1/completions"
SYNC, STREAM, BACKGROUND, BACKGROUND_STREAM = "sync", "stream", "background", "background stream"
#: How a client may ask. `background` belongs to Responses alone.
WAYS = {RESPONSES: (SYNC, STREAM, BACKGROUND, BACKGROUND_STREAM), CHAT: (SYNC, STREAM), COMPLETIONS: (SYNC, STREAM)}
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
#: No answer for so long is a finding: kills and restarts take much less.
PATIENCE_S = 300.0
LEARN_TRIES = 5


@dataclass(frozen=True)
class Ask:
    """A request that is sent again and again."""

    name: str
    route: str
    body: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, route: str, model: str, tokens: int, **body: Any) -> Ask:
        """Of so many tokens a choice."""
        limit = "max_output_tokens" if route == RESPONSES else "max_tokens"
        return cls(name, route, {"model": model, limit: tokens, "ignore_eos": True, **body})


@dataclass
class Choice:
    """One choice as a client sees it. `end`: finish reason, or an item's status; `logprobs`: as JSON, one a token."""

    text: str
    end: str
    logprobs: list[Any]


@dataclass
class Stored:
    """A job as it is stored: how it ended, its outputs, and of each choice the log's token ids, log-probabilities and
    text; whether the log's entries follow each other without gap."""

    state: str
    outputs: tuple[Output, ...]
    prompt_tokens: int | None
    ids: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprobs]]
    texts: dict[int, str]
    gapless: bool


@dataclass
class Answer:
    """What came of one job. `polled`: its output as it is read later, in Responses' form."""

    job: str
    choices: list[Choice]
    polled: list[Choice]
    stored: Stored
    attempt: int
    cached_tokens: int

    def differences(self, undisturbed: Answer) -> list[str]:
        """Where it is not what the undisturbed run gave."""
        pairs = {
            "answer": (self.choices, undisturbed.choices),
            "polled answer": (self.polled, undisturbed.polled),
            "stored job": (self.stored, undisturbed.stored),
        }
        return [f"its {name} differs: {ours} != {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]


class Client:
    """Asks one node, and reads what is stored at the state server."""

    def __init__(self, url: str, store: JobStore) -> None:
        self._http = httpx.Client(base_url=url, timeout=PATIENCE_S)
        self._store = store

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def ask(self, ask: Ask, way: str) -> Answer:
        """Ask, and read the answer to its end."""
        if way in (STREAM, BACKGROUND_STREAM):
            job, choices = self._streamed(ask, way)
        else:
            job, choices = self._whole(ask, way)
        polled = self._get(f"{RESPONSES}/{job}")
        view = self._store.view(parse_ref(job))
        ids: defaultdict[int, list[int]] = defaultdict(list)
        logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        texts: defaultdict[int, str] = defaultdict(str)
        for entry in view.entries:
            ids[entry.choice] += entry.token_ids
            logprobs[entry.choice] += entry.logprobs
            texts[entry.choice] += entry.text
        record = view.record
        total = sum(map(len, ids.values()))
        ends = [0, *(entry.next_seq for entry in view.entries)]
        gapless = [*(entry.seq for entry in view.entries), total] == ends and record.logged_tokens == total
        stored = Stored(
            record.state, record.outputs, record.prompt_tokens, dict(ids), dict(logprobs), dict(texts), gapless
        )
        return Answer(job, choices, _of_response(polled), stored, record.attempt, record.cached_tokens or 0)

    def _whole(self, ask: Ask, way: str) -> tuple[str, list[Choice]]:
        """One answer, at once or polled for."""
        background = {"background": True} if way == BACKGROUND else {}
        answer = self._http.post(ask.route, json={**ask.body, **background})
        shown = _checked(answer)
        if way == BACKGROUND:
            url = f"{RESPONSES}/{shown['id']}"
            shown = wait_until(lambda: self._ended(url), description=url, timeout_s=PATIENCE_S, every_s=0.1)
        return shown["id"], _of_response(shown) if ask.route == RESPONSES else _of_choices(shown["choices"])

    def _ended(self, url: str) -> dict[str, Any] | None:
        shown = self._get(url)
        return None if shown["status"] in ("queued", "in_progress") else shown

    def _get(self, url: str) -> dict[str, Any]:
        return _checked(self._http.get(url))

    def _streamed(self, ask: Ask, way: str) -> tuple[str, list[Choice]]:
        """A stream, joined."""
        body = {**ask.body, "stream": True, **({"background": True} if way == BACKGROUND_STREAM else {})}
        with self._http.stream("POST", ask.route, json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                _checked(answer)
            pieces = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        return self._joined_events(pieces) if ask.route == RESPONSES else self._joined_chunks(ask, pieces)

    def _joined_events(self, pieces: Sequence[str]) -> tuple[str, list[Choice]]:
        """Numbers without gap, one end, and a replay that tells the same events."""
        events = [json.loads(piece) for piece in pieces]
        kinds = [event["type"] for event in events]
        assert [event["sequence_number"] for event in events] == list(range(len(events))), kinds[-1]
        assert sum(kind in TERMINAL for kind in kinds) == 1 and kinds[-1] in TERMINAL, kinds[-3:]
        final = events[-1]["response"]
        choices = [Choice("", item["status"], []) for item in final["output"]]
        for event in events:
            if event["type"] == "response.output_text.delta":
                choices[event["output_index"]].text += event["delta"]
                choices[event["output_index"]].logprobs += event["logprobs"]
        assert choices == _of_response(final), "the pieces are not the final answer"
        replay = self._http.get(f"{RESPONSES}/{final['id']}", params={"stream": "true"})
        replayed = [json.loads(line[6:]) for line in replay.text.splitlines() if line.startswith("data: ")]
        first = len(events) - len(replayed)
        assert replayed == events, f"a replay tells other events ({first} fewer)"
        return final["id"], choices

    @staticmethod
    def _joined_chunks(ask: Ask, pieces: Sequence[str]) -> tuple[str, list[Choice]]:
        """One finish a choice, one end."""
        assert pieces[-1] == "[DONE]" and pieces.count("[DONE]") == 1, pieces[-2:]
        chunks = [json.loads(piece) for piece in pieces[:-1]]
        assert "error" not in chunks[-1], chunks[-1]
        choices = [Choice("", "", []) for _ in range(ask.body.get("n", 1))]
        for chunk in chunks:
            (part,) = chunk["choices"]
            choice = choices[part["index"]]
            assert not choice.end, "something came after the finish"
            choice.text += part["text"] if "text" in part else part["delta"].get("content", "")
            choice.logprobs += _logprobs(part["logprobs"])
            choice.end = part["finish_reason"] or ""
        return chunks[0]["id"], choices


def _checked(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, f"{answer.status_code}: {answer.text}"
    found: dict[str, Any] = answer.json()
    return found


def _of_response(shown: Mapping[str, Any]) -> list[Choice]:
    parts = [(item, item["content"][0]) for item in shown["output"]]
    return [Choice(part["text"], item["status"], part["logprobs"]) for item, part in parts]


def _of_choices(choices: Sequence[Mapping[str, Any]]) -> list[Choice]:
    return [
        Choice(
            each["text"] if "text" in each else each["message"]["content"],
            each["finish_reason"],
            _logprobs(each["logprobs"]),
        )
        for each in choices
    ]


def _logprobs(told: Mapping[str, Any] | None) -> list[Any]:
    """One object a token, in the form of either dialect."""
    if told is None:
        return []
    if "content" in told:
        return list(told["content"])
    columns = (told[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    return [list(row) for row in zip(*columns, strict=True)]


class SteadyLoad:
    """`clients` of them at any time, on the system's first node, each with one request under way."""

    def __init__(self, system: System, asks: Sequence[Ask], *, clients: int, seed: int) -> None:
        self._system = system
        self._asks = asks
        self._chance = random.Random(seed)
        self._url = system.api_url(system.apis[0])
        self._undisturbed: dict[str, Answer] = {}
        self._leaving = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]
        self.problems: list[str] = []
        #: Jobs that ended, by request and way.
        self.done: Counter[str] = Counter()
        #: Those that took more than one attempt.
        self.taken_over = 0
        #: Those that began with KV of another.
        self.reused = 0

    def learn(self) -> None:
        """Run each request once, alone and in one attempt."""
        with self._client() as client:
            for ask in self._asks:
                # A machine that is busy with other work may cost a lease.
                tries = (client.ask(ask, SYNC) for _ in range(LEARN_TRIES))
                found = next(answer for answer in tries if answer.attempt == 1)
                assert found.stored.gapless
                self._undisturbed[ask.name] = found
                self.reused += found.cached_tokens > 0

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No new requests; those under way are read to their ends."""
        self._leaving.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
            if thread.is_alive():
                self.problems.append("a client still waits")

    def _run(self) -> None:
        with self._client() as client:
            while not self._leaving.is_set() and not self.problems:
                with self._lock:
                    ask = self._chance.choice(self._asks)
                    way = self._chance.choice(WAYS[ask.route])
                try:
                    answer = client.ask(ask, way)
                    found = answer.differences(self._undisturbed[ask.name])
                except Exception as error:  # noqa: BLE001 - whatever a client sees is a finding, not the end of the load
                    found = [f"{type(error).__name__}: {error}"]
                    answer = None
                self._note(ask, way, answer, found)

    def _note(self, ask: Ask, way: str, answer: Answer | None, found: Sequence[str]) -> None:
        with self._lock:
            self.done[f"{ask.name}, {way}"] += 1
            if answer is not None:
                self.taken_over += answer.attempt > 1
                self.reused += answer.cached_tokens > 0
            job = answer.job if answer else "?"
            self.problems += [f"{ask.name}, {way}, {job}: {problem}" for problem in found]

    @contextmanager
    def _client(self) -> Iterator[Client]:
        with self._system.client() as connection:
            client = Client(self._url, job_store(connection))
            try:
                yield client
            finally:
                client.close()
