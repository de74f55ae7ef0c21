"""What is kept of a response: deleted, listed, continued."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai as sdk
import pytest
from openai import OpenAI

from pool.store.audit import Audit
from pool.store.connection import Client
from pool.store.ids import parse_ref
from pool.store.jobs import JobStore
from pool.store.stored_jobs import erase
from tests.webapp.api_process import ApiProcess
from tests.webapp.playing_worker import MODEL, PlayingWorker

pytestmark = pytest.mark.usefixtures("worker")

NEVER_WAS = f"resp_{MODEL}.0_{'0' * 32}"


def answered(openai: OpenAI, worker: PlayingWorker, text: str = "x", **fields: Any) -> str:
    """The id of a response that said `text`."""
    with worker.answering(text):
        return openai.responses.create(**{"model": MODEL, "input": "Say", **fields}).id


# --- delete


def test_a_deleted_response_leaves_nothing(
    openai: OpenAI, worker: PlayingWorker, other_node: ApiProcess, client: Client
) -> None:
    """Record, log and input go at once, on all nodes; what is left remembers only that the id is used up."""
    job = answered(openai, worker, input="a secret")
    token = parse_ref(job).token
    openai.responses.delete(job)
    assert list(client.scan_iter(match=f"*{token}*")) == [worker.keys.tombstone(token).encode()]
    assert client.get(worker.keys.tombstone(token)) == b"erased"
    assert client.pttl(worker.keys.tombstone(token)) > 0
    for path in ("", "?stream=true", "/input_items"):
        assert httpx.get(f"{other_node.base_url}/v1/responses/{job}{path}").status_code == 404
    with pytest.raises(sdk.NotFoundError):
        openai.responses.delete(job)
    assert Audit(client, MODEL).run() == []


def test_an_unended_response_is_cancelled_and_deleted(openai: OpenAI, worker: PlayingWorker, client: Client) -> None:
    """Its worker's writes are refused, and a queued one never starts."""
    running = openai.responses.create(model=MODEL, input="Long", background=True).id
    turn = worker.take()
    worker.say(turn, "some")
    queued = openai.responses.create(model=MODEL, input="Waits", background=True).id
    for job in (running, queued):
        openai.responses.delete(job)
        with pytest.raises(sdk.NotFoundError):
            openai.responses.retrieve(job)
    assert worker.held == 0
    assert client.xlen(worker.keys.queue) == 0
    with pytest.raises(AssertionError, match="stale"):
        worker.say(turn, "late")
    assert Audit(client, MODEL).run() == []


def test_who_reads_a_response_that_is_deleted_hears_of_it(
    raw: httpx.Client, worker: PlayingWorker, other_node: ApiProcess
) -> None:
    """A stream ends as that of a cancelled job, and so does the wait for the whole."""
    body = {"model": MODEL, "input": "Long"}
    with ThreadPoolExecutor() as pool, other_node.openai() as elsewhere:
        with raw.stream("POST", "/v1/responses", json={**body, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            elsewhere.responses.delete(json.loads(next(lines).removeprefix("data: "))["response"]["id"])
            *_, last = lines
        waiting = pool.submit(raw.post, "/v1/responses", json=body)
        elsewhere.responses.delete(f"resp_{MODEL}.0_{worker.take().handout.lease.token}")
        whole = waiting.result()
    ending = json.loads(last.removeprefix("data: "))
    assert (ending["type"], ending["response"]["status"]) == ("response.incomplete", "cancelled")
    assert (whole.status_code, whole.json()["status"]) == (200, "cancelled")
    assert worker.held == 0


class Hintless(JobStore):
    """Its hints get lost, so readers look only when the record is gone already."""

    def notify(self, token: str, *, watch: str, rank: str) -> None:
        """Nobody hears of it."""


@pytest.fixture
def vanish(client: Client, worker: PlayingWorker) -> Callable[[str], None]:
    """Delete the one running job, with this prefix of its id, between two looks of its readers."""
    store = Hintless(client, result_ttl_ms=60_000, pending_per_model=5)

    def delete(prefix: str) -> None:
        turn = worker.take()
        worker.say(turn, "some", "more")
        erase(client, store, parse_ref(f"{prefix}_{MODEL}.0_{turn.handout.lease.token}"))

    return delete


def test_a_stream_whose_job_vanishes_ends_as_a_cancelled_one(raw: httpx.Client, vanish: Callable[[str], None]) -> None:
    """All numbers once and in order, the text that was shown in the last event, which tells the status."""
    with raw.stream("POST", "/v1/responses", json={"model": MODEL, "input": "Long", "stream": True}) as answer:
        vanish("resp")
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]
    assert (final["type"], final["response"]["status"]) == ("response.incomplete", "cancelled")
    shown = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert [item["content"][0]["text"] for item in final["response"]["output"]] == ([shown] if shown else [])


def test_chunks_whose_job_vanishes_end_as_cancelled_ones(raw: httpx.Client, vanish: Callable[[str], None]) -> None:
    """An error in band, then the end."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    with raw.stream("POST", "/v1/chat/completions", json=body) as answer:
        vanish("chatcmpl")
        *_, error, done = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert (json.loads(error)["error"]["code"], done) == ("cancelled", "[DONE]")


@pytest.mark.parametrize(
    ("route", "prefix", "fields", "status"),
    [
        ("/v1/responses", "resp", {"input": "x"}, 200),
        ("/v1/chat/completions", "chatcmpl", {"messages": [{"role": "user", "content": "x"}]}, 409),
        ("/v1/completions", "cmpl", {"prompt": "x"}, 409),
    ],
)
def test_a_wait_whose_job_vanishes_ends_as_a_cancelled_one(
    raw: httpx.Client, vanish: Callable[[str], None], route: str, prefix: str, fields: dict[str, Any], status: int
) -> None:
    """As if it had been cancelled and not deleted."""
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(raw.post, route, json={"model": MODEL, **fields})
        vanish(prefix)
        answer = waiting.result()
    assert answer.status_code == status
    assert (answer.json()["status"] if status == 200 else answer.json()["error"]["code"]) == "cancelled"


def test_a_resend_does_not_bring_back_what_was_deleted(raw: httpx.Client, worker: PlayingWorker) -> None:
    """Its Idempotency-Key stays bound to it."""
    headers = {"Idempotency-Key": "of-the-deleted"}
    with worker.answering("x"):
        job = raw.post("/v1/responses", json={"model": MODEL, "input": "Say"}, headers=headers).json()["id"]
    assert raw.delete(f"/v1/responses/{job}").json() == {"id": job, "object": "response", "deleted": True}
    again = raw.post("/v1/responses", json={"model": MODEL, "input": "Say"}, headers=headers)
    assert (again.status_code, again.json()["error"]["code"]) == (410, "expired")
    assert worker.held == 0


def test_what_never_was_cannot_be_deleted(raw: httpx.Client) -> None:
    """404, for odd ids too."""
    for job in (NEVER_WAS, "x", "resp_*", "resp_a%00b"):
        assert raw.delete(f"/v1/responses/{job}").status_code == 404


# --- input items


def test_input_items_page_by_page(openai: OpenAI, worker: PlayingWorker) -> None:
    """The newest first unless asked otherwise; each page says whether there is more; instructions are no item."""
    turns = [{"role": "user" if at % 2 == 0 else "assistant", "content": f"turn {at}"} for at in range(5)]
    job = answered(openai, worker, input=turns, instructions="Be brief.")
    page = openai.responses.input_items.list(job, limit=2)
    assert [item.content[0].text for item in page.data] == ["turn 4", "turn 3"]
    assert page.has_more
    texts = [item.content[0].text for item in openai.responses.input_items.list(job, limit=2, order="asc")]
    assert texts == [f"turn {at}" for at in range(5)]
    rest = openai.responses.input_items.list(job, after=page.data[-1].id)
    assert [item.content[0].text for item in rest.data] == ["turn 2", "turn 1", "turn 0"]
    assert {item.content[0].type for item in rest.data} == {"input_text", "output_text"}
    assert not rest.has_more


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=%D9%A3", "limit"),
        ("order=up", "order"),
        ("after=msg_unknown", "after"),
        ("include=all", "include"),
        ("before=msg_x", "before"),
        ("limit=1&limit=2", "limit"),
        ("after=a&after=a", "after"),
        ("page=2", "page"),
    ],
)
def test_a_bad_query_is_refused_by_name(
    openai: OpenAI, raw: httpx.Client, worker: PlayingWorker, query: str, param: str
) -> None:
    """400, naming the field."""
    job = answered(openai, worker)
    refused = raw.get(f"/v1/responses/{job}/input_items?{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_an_input_that_was_not_kept_is_not_listed(openai: OpenAI, raw: httpx.Client, worker: PlayingWorker) -> None:
    """`store: false` says so."""
    job = answered(openai, worker, store=False)
    refused = raw.get(f"/v1/responses/{job}/input_items")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "input_not_stored")


# --- the next turn


def test_a_conversation_goes_on(openai: OpenAI, worker: PlayingWorker) -> None:
    """All earlier turns and answers come before the new input; instructions are each response's own."""
    first = answered(openai, worker, "one", input="Say one", instructions="Be brief.")
    second = answered(openai, worker, "two", input="Say two", previous_response_id=first)
    third = answered(openai, worker, input="Say three", previous_response_id=second, instructions="Be long.")
    listed = openai.responses.input_items.list(third, order="asc")
    assert [(item.role, item.content[0].text) for item in listed] == [
        ("user", "Say one"),
        ("assistant", "one"),
        ("user", "Say two"),
        ("assistant", "two"),
        ("user", "Say three"),
    ]
    response = openai.responses.retrieve(third)
    assert (response.previous_response_id, response.instructions) == (second, "Be long.")


def test_deleting_a_turn_leaves_later_ones_whole(openai: OpenAI, worker: PlayingWorker) -> None:
    """Each response holds the conversation up to it."""
    first = answered(openai, worker, "one", input="Say one")
    second = answered(openai, worker, "two", input="Say two", previous_response_id=first)
    openai.responses.delete(first)
    third = answered(openai, worker, input="Say three", previous_response_id=second)
    listed = openai.responses.input_items.list(third, order="asc")
    assert [item.content[0].text for item in listed] == ["Say one", "one", "Say two", "two", "Say three"]


def test_a_conversation_is_the_prompt(openai: OpenAI, worker: PlayingWorker) -> None:
    """The worker gets the very tokens that it would if the whole history had been sent."""
    first = answered(openai, worker, "one", input="Say one")
    history = [
        {"role": "user", "content": "Say one"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "Say two"},
    ]
    prompts = []
    for fields in ({"input": "Say two", "previous_response_id": first}, {"input": history}):
        openai.post("/responses", body={"model": MODEL, "background": True, **fields}, cast_to=object)
        turn = worker.take()
        prompts.append(turn.handout.prompt)
        worker.finish(turn)
    assert prompts[0] == prompts[1] != b""


def test_what_cannot_be_continued_is_refused_by_name(
    openai: OpenAI, raw: httpx.Client, worker: PlayingWorker, client: Client
) -> None:
    """Unknown, deleted or expired: 404. Not completed, not stored, or of several choices: 400. Nothing is queued."""

    messages: list[str] = []

    def refusal(previous: str) -> tuple[int, str]:
        answer = raw.post("/v1/responses", json={"model": MODEL, "input": "x", "previous_response_id": previous})
        error = answer.json()["error"]
        messages.append(error["message"])
        assert (answer.status_code == 404) == (error["code"] == "previous_response_not_found")
        return answer.status_code, error["param"]

    running = openai.responses.create(model=MODEL, input="Long", background=True).id
    turn = worker.take()
    assert refusal(running) == (400, "previous_response_id")
    assert messages == ["The previous response is running; only a completed or an incomplete one goes on."]
    worker.finish(turn)
    with worker.answering("x"):
        chat = openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], n=2).id
    unstored, deleted, expired = (answered(openai, worker, store=kept) for kept in (False, True, True))
    openai.responses.delete(deleted)
    client.delete(worker.keys.job(parse_ref(expired).token))
    cancelled = openai.responses.create(model=MODEL, input="Long", background=True).id
    openai.responses.cancel(cancelled)
    for previous, status in (
        *((previous, 404) for previous in (NEVER_WAS, "resp_x", deleted, expired)),
        *((previous, 400) for previous in (unstored, chat, cancelled, "resp_a\0b", "")),
    ):
        assert refusal(previous) == (status, "previous_response_id")
    assert worker.held == 0


def test_a_queued_answer_carries_its_position(raw: httpx.Client, worker: PlayingWorker) -> None:
    """How many wait before it; running ones do not count, and one that runs has none."""
    body = {"model": MODEL, "input": "x", "background": True}
    jobs = [raw.post("/v1/responses", json=body).json() for _ in range(3)]
    assert [job["queue_position"] for job in jobs] == [0, 1, 2]
    turn = worker.take()
    polled = [raw.get(f"/v1/responses/{job['id']}").json() for job in jobs]
    assert [job.get("queue_position") for job in polled] == [None, 0, 1]
    worker.finish(turn)
