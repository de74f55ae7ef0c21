"""The callers of a run: one function a door, each keeping the account of one job until it has seen the job's end.

They do what a careful client does: a key on every request, the same request again (at any node) when no answer came,
and the rest of a stream from the last event seen.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from celery import Celery

from pool.errors import StateUnavailable
from tests.chaos.ledger import SUCCEEDED, Account, Ledger

#: No answer for this long: ask again, elsewhere.
ANSWER_S = 10.0
#: Between two attempts.
PAUSE_S = 0.3
#: A client that has seen no end after this long gives up; its job then counts as lost or unanswered.
PATIENCE_S = 240.0
#: Answers after which the same request is sent again.
RETRIED = (429, 500, 502, 503)


@dataclass(frozen=True)
class Work:
    """One generation to ask for, and its text in an undisturbed run."""

    model: str
    body: Mapping[str, Any]
    texts: tuple[str, ...]
    outcomes: tuple[str, ...] = SUCCEEDED
    error_code: str = ""


class GaveUp(Exception):
    """The client's patience ended."""


class Callers:
    """Everything the doors share: where the nodes are, the ledger, the Celery application."""

    def __init__(self, urls: Sequence[str], ledger: Ledger, celery: Celery) -> None:
        self._urls = list(urls)
        self._ledger = ledger
        self._celery = celery
        #: What went wrong and belongs to no account.
        self.problems: list[str] = []
        limits = httpx.Limits(max_connections=400, max_keepalive_connections=50)
        self._http = httpx.Client(timeout=httpx.Timeout(ANSWER_S, connect=2.0, pool=60.0), limits=limits)
        self.doors: dict[str, Callable[[Account, Work, random.Random], None]] = {
            "sync": self._sync,
            "stream": self._stream,
            "plain stream": self._plain_stream,
            "background": self._background,
            "twice": self._twice,
            "celery": self._celery_task,
            "leaver": self._leaver,
            "canceller": self._canceller,
        }

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def call(self, door: str, work: Work, seed: int) -> None:
        """Send one job through a door and stay until its end."""
        outcomes = (*work.outcomes, "cancelled") if door in ("leaver", "canceller") else work.outcomes
        account = self._ledger.open(door, work.model, work.texts, outcomes=outcomes, error_code=work.error_code)
        try:
            self.doors[door](account, work, random.Random(seed))
        except GaveUp as error:
            account.problems.append(f"gave up: {error}")
        except Exception as error:  # noqa: BLE001 - a client's fault is a finding, not the end of the run
            account.problems.append(f"{type(error).__name__}: {error}")
        finally:
            self._ledger.close(account)

    def finish(self, program: str, seed: int) -> None:
        """Say that a Program is over, until a node has heard it; once more costs nothing."""
        rng, until_s = random.Random(seed), time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            with contextlib.suppress(httpx.HTTPError):
                answer = self._http.post(f"{rng.choice(self._urls)}/v1/programs/{program}/finish")
                # Its retention may be over, or the reply of a finish that was heard was lost.
                if answer.status_code in (200, 404):
                    return
            time.sleep(PAUSE_S)
        self.problems.append(f"{program} could not be finished")

    # --- doors

    def _sync(self, account: Account, work: Work, rng: random.Random) -> None:
        """One request, one answer; sent again with its key until the answer came."""
        key = secrets.token_hex(8)
        answer = self._until_answered(account, rng, "/v1/responses", dict(work.body), key)
        if answer.status_code == 504:
            self._poll(account, rng)
            return
        self._note(account, answer)
        if not account.state and answer.status_code >= 400:
            account.state = "failed"

    def _background(self, account: Account, work: Work, rng: random.Random) -> None:
        """Submitted, then polled."""
        self._submit(account, work, rng)
        self._poll(account, rng)

    def _twice(self, account: Account, work: Work, rng: random.Random) -> None:
        """The same submit at two nodes, as a nervous client library does it."""
        key = secrets.token_hex(8)
        for _ in range(2):
            self._note(account, self._until_answered(account, rng, "/v1/responses", _background(work), key))
        self._poll(account, rng)

    def _canceller(self, account: Account, work: Work, rng: random.Random) -> None:
        """Submitted, then cancelled in some phase; what the answer says is final."""
        self._submit(account, work, rng)
        time.sleep(rng.uniform(0, 3))
        answer = self._until_answered(account, rng, f"/v1/responses/{_only(account)}/cancel", None, "")
        if answer.status_code not in (200, 400):
            account.problems.append(f"cancel was answered {answer.status_code}")
        cancelled = answer.status_code == 200
        self._poll(account, rng)
        if cancelled and account.state != "cancelled":
            account.problems.append(f"cancelled, then {account.state}")

    def _leaver(self, account: Account, work: Work, rng: random.Random) -> None:
        """Opens a plain stream without a key and goes away in the middle."""
        leave_s = time.monotonic() + rng.uniform(0.1, 3)
        while not account.ids:
            account.lost_answers += 1
            try:
                for event in self._events(rng.choice(self._urls), dict(work.body) | {"stream": True}, ""):
                    if "response" in event and not account.ids:
                        account.ids.add(event["response"]["id"])
                        account.lost_answers -= 1
                    if time.monotonic() > leave_s:
                        break
            except httpx.HTTPError:
                self._pause(account, "no stream to leave")
            except _Refused as error:
                self._pause(account, str(error))

    def _stream(self, account: Account, work: Work, rng: random.Random) -> None:
        """A background stream, continued at any node from the last event seen."""
        self._follow(account, _background(work) | {"stream": True}, rng)

    def _plain_stream(self, account: Account, work: Work, rng: random.Random) -> None:
        """A plain stream with a key, continued likewise before its reader's grace has passed."""
        self._follow(account, dict(work.body) | {"stream": True}, rng)

    def _celery_task(self, account: Account, work: Work, rng: random.Random) -> None:  # noqa: ARG002 - a door's signature
        """Sent through Celery's task class; its result read from Celery's backend. A submit whose answer is lost is not
        sent again: its client has no name for it."""
        task = self._celery.tasks["genpool.generate"]
        prompt = {"prompt": f"{work.body['input']}\n"} if work.model == "scripted" else _messages(work)
        try:
            sent = task.apply_async(
                kwargs={"model": work.model, "max_tokens": work.body["max_output_tokens"], **_sampling(work), **prompt}
            )
        except StateUnavailable:
            account.refused = True
            account.lost_answers = 1
            return
        account.ids.add(sent.id)
        result = self._result_of(account, sent)
        account.state = result["status"]
        account.seen = tuple(output["text"] for output in result["outputs"])

    # --- steps

    def _submit(self, account: Account, work: Work, rng: random.Random) -> None:
        key = secrets.token_hex(8)
        self._note(account, self._until_answered(account, rng, "/v1/responses", _background(work), key))

    def _until_answered(
        self, account: Account, rng: random.Random, path: str, body: Mapping[str, Any] | None, key: str
    ) -> httpx.Response:
        """Send until something other than a passing failure is answered."""
        headers = {"Idempotency-Key": key} if key else {}
        while True:
            try:
                answer = self._http.post(rng.choice(self._urls) + path, json=body, headers=headers)
            except httpx.HTTPError as error:
                self._pause(account, type(error).__name__)
                continue
            account.ids.update(_named(answer))
            if answer.status_code in RETRIED and not _is_end(answer):
                self._pause(account, f"{answer.status_code} {_error(answer).get('code')}")
                continue
            return answer

    def _poll(self, account: Account, rng: random.Random) -> None:
        """Read until it has ended; a state never goes back from an end."""
        while True:
            try:
                answer = self._http.get(f"{rng.choice(self._urls)}/v1/responses/{_only(account)}")
            except httpx.HTTPError as error:
                self._pause(account, type(error).__name__)
                continue
            if answer.status_code in RETRIED:
                self._pause(account, f"{answer.status_code} {_error(answer).get('code')}")
                continue
            self._note(account, answer)
            if answer.status_code != 200 or account.state:
                return
            time.sleep(0.4)

    def _note(self, account: Account, answer: httpx.Response) -> None:
        """What an answer says of the job."""
        if answer.status_code != 200:
            if not _is_end(answer):
                account.problems.append(f"answered {answer.status_code} {_error(answer).get('code')}")
            return
        shown = answer.json()
        account.ids.add(shown["id"])
        if shown["status"] in ("completed", "incomplete", "failed", "cancelled"):
            account.state = shown["status"]
            if shown["status"] in SUCCEEDED:
                account.seen = (_text(shown),)

    def _follow(self, account: Account, body: Mapping[str, Any], rng: random.Random) -> None:
        """One gapless stream over as many connections as it takes."""
        key, last, pieces = secrets.token_hex(8), -1, []
        while not account.state:
            url = rng.choice(self._urls)
            try:
                events = self._events(url, body, key) if not account.ids else self._resumed(url, _only(account), last)
                for event in events:
                    number = event["sequence_number"]
                    if number != last + 1:
                        account.problems.append(f"event {number} came after {last}")
                    last = number
                    if event["type"] == "response.output_text.delta":
                        pieces.append(event["delta"])
                    self._note_event(account, event, "".join(pieces))
            except httpx.HTTPError as error:
                self._pause(account, type(error).__name__)
            except _Refused as error:
                self._pause(account, str(error))

    def _note_event(self, account: Account, event: Mapping[str, Any], text: str) -> None:
        shown = event.get("response")
        if shown is None:
            return
        account.ids.add(shown["id"])
        if event["type"] in ("response.completed", "response.incomplete", "response.failed"):
            if account.state:
                account.problems.append("two terminal events")
            account.state = shown["status"]
            if account.state in SUCCEEDED:
                account.seen = (text,)
                if _text(shown) != text:
                    account.problems.append("the deltas and the final text differ")

    def _events(self, url: str, body: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
        headers = {"Idempotency-Key": key} if key else {}
        with self._http.stream("POST", f"{url}/v1/responses", json=body, headers=headers) as answer:
            yield from _parsed(answer)

    def _resumed(self, url: str, job: str, last: int) -> Iterator[dict[str, Any]]:
        query = {"stream": "true"} | ({"starting_after": str(last)} if last >= 0 else {})
        with self._http.stream("GET", f"{url}/v1/responses/{job}", params=query) as answer:
            yield from _parsed(answer)

    def _result_of(self, account: Account, sent: Any) -> dict[str, Any]:
        while True:
            try:
                if sent.ready():
                    result: dict[str, Any] = sent.result
                    if not isinstance(result, dict):
                        return {"status": "failed", "outputs": []}
                    return result
            except Exception as error:  # noqa: BLE001 - whatever the client library raises while the server is away
                self._pause(account, type(error).__name__)
            self._check_patience(account, "no Celery result")
            time.sleep(0.4)

    def _pause(self, account: Account, why: str) -> None:
        account.resends += 1
        self._check_patience(account, why)
        time.sleep(PAUSE_S)

    @staticmethod
    def _check_patience(account: Account, why: str) -> None:
        if time.monotonic() - account.began_s > PATIENCE_S:
            raise GaveUp(why)


class _Refused(Exception):
    """A stream was answered with something else."""


def _parsed(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    if answer.status_code != 200:
        answer.read()
        raise _Refused(f"{answer.status_code} {_error(answer).get('code')}")
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            event: dict[str, Any] = json.loads(line[6:])
            if event["type"] == "error":
                raise _Refused(f"error in band: {event.get('code')}")
            yield event


def _error(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json().get("error") or {}
    except (ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def _named(answer: httpx.Response) -> set[str]:
    """The job that an error answer says goes on."""
    if answer.status_code < 400:
        return set()
    try:
        return {answer.json()["id"]}
    except (ValueError, KeyError, TypeError):
        return set()


def _is_end(answer: httpx.Response) -> bool:
    """Whether an error answer tells how a synchronous job ended (failed by name), not that it could not be asked."""
    return _error(answer).get("code") in ("poison", "cancelled")


def _background(work: Work) -> dict[str, Any]:
    return dict(work.body) | {"background": True}


def _only(account: Account) -> str:
    return min(account.ids)


def _text(shown: Mapping[str, Any]) -> str:
    return "".join(part["text"] for item in shown["output"] for part in item["content"])


def _messages(work: Work) -> dict[str, Any]:
    roles = {"instructions": "system", "input": "user"}
    return {"messages": [{"role": roles[name], "content": work.body[name]} for name in roles if name in work.body]}


def _sampling(work: Work) -> dict[str, Any]:
    return {name: work.body[name] for name in ("temperature", "seed") if name in work.body}
