"""/v1/responses over a live server, through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai as sdk
import pytest
from openai import OpenAI

from tests.waiting import wait_until
from tests.webapp.api_process import ApiProcess
from tests.webapp.playing_worker import MODEL, PlayingWorker

pytestmark = pytest.mark.usefixtures("worker")


def frames(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The data of server-sent events."""
    return (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {"))


def replay(node: ApiProcess, job: str, after: int | None = None) -> list[dict[str, Any]]:
    """The events of a job that has ended."""
    query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    answer = httpx.get(f"{node.base_url}/v1/responses/{job}", params=query, timeout=20)
    assert answer.status_code == 200, answer.text
    return list(frames(iter(answer.text.splitlines())))


def test_sync_answer_is_complete_for_the_official_client(openai: OpenAI, worker: PlayingWorker) -> None:
    """A synchronous request answers text, usage and everything it was asked with."""
    with worker.answering("Hel", "", "lo"):
        response = openai.responses.create(
            model=MODEL, input="Say hello", instructions="Be brief.", metadata={"run": "7"}, temperature=0.5,
            max_output_tokens=8, user="ann", extra_body={"top_k": 5, "seed": 3, "ignore_eos": True, "min_tokens": 1},
        )  # fmt: skip
    assert response.output_text == "Hello"
    assert (response.status, response.model, response.temperature) == ("completed", MODEL, 0.5)
    assert (response.instructions, response.metadata, response.user) == ("Be brief.", {"run": "7"}, "ann")
    assert response.max_output_tokens == 8
    assert response.usage is not None
    assert response.usage.output_tokens == 3
    assert response.usage.total_tokens == response.usage.input_tokens + 3
    assert response.usage.input_tokens_details.cached_tokens == 0
    assert response.incomplete_details is None and response.error is None


def test_length_limited_answer_is_incomplete(openai: OpenAI, worker: PlayingWorker) -> None:
    """The token limit ends a response as incomplete, with its reason."""
    with worker.answering("a", "b", reason="length"):
        response = openai.responses.create(model=MODEL, input="Count", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "ab"


def test_stream_helper_collects_text_and_events_in_order(openai: OpenAI, worker: PlayingWorker) -> None:
    """The stream helper of the official client sees the whole order, numbered without gaps."""
    with (
        worker.answering("Hel", "", "lo"),
        openai.responses.stream(model=MODEL, input="Say hello") as stream,
    ):
        events = list(stream)
        final = stream.get_final_response()
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(10))
    assert final.output_text == "Hello"


def test_background_polls_from_queued_to_completed(openai: OpenAI, worker: PlayingWorker) -> None:
    """A background request answers at once; polls show each state, the text so far, and in the end the result."""
    response = openai.responses.create(model=MODEL, input="Later", background=True)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    turn = worker.take()
    worker.say(turn, "par", "tial")
    running = openai.responses.retrieve(response.id)
    assert (running.status, running.output_text) == ("in_progress", "partial")
    worker.finish(turn)
    done = openai.responses.retrieve(response.id)
    assert (done.status, done.output_text, done.id) == ("completed", "partial", response.id)


def test_cancel_keeps_the_partial_text_and_repeats(openai: OpenAI, worker: PlayingWorker) -> None:
    """Cancelling a running job is final and idempotent; what was shown stays readable."""
    response = openai.responses.create(model=MODEL, input="Long", background=True)
    turn = worker.take()
    worker.say(turn, "some")
    first = openai.responses.cancel(response.id)
    second = openai.responses.cancel(response.id)
    assert first.status == second.status == "cancelled"
    assert first.output_text == "some"
    assert worker.held == 0


def test_what_ended_early_tells_what_it_used(openai: OpenAI, worker: PlayingWorker) -> None:
    """Prompt and logged tokens of a job that was begun, cancelled or failed, polled or streamed; nothing of one that
    never was, or that has not ended."""
    cancelled, failed, never = (
        openai.responses.create(model=MODEL, input="Long", background=True).id for _ in range(3)
    )
    for job in (cancelled, failed):
        turn = worker.take()
        worker.say(turn, "a", "b", "c")
        assert openai.responses.retrieve(job).usage is None
        if job == failed:
            worker.fail(turn, "engine_error")
        else:
            openai.responses.cancel(job)
        usage = openai.responses.retrieve(job).usage
        assert usage is not None and usage.output_tokens == 3
        assert usage.input_tokens == turn.handout.prompt_tokens > 0
        assert usage.total_tokens == usage.input_tokens + 3
        *_, last = openai.responses.retrieve(job, stream=True)
        assert last.response.usage == usage
    assert openai.responses.cancel(never).usage is None


def test_cancel_of_a_completed_job_is_refused(openai: OpenAI, worker: PlayingWorker) -> None:
    """What has ended cannot be cancelled: 400. What never was: 404."""
    with worker.answering("x"):
        response = openai.responses.create(model=MODEL, input="Quick")
    with pytest.raises(sdk.BadRequestError) as refused:
        openai.responses.cancel(response.id)
    assert refused.value.code == "not_cancellable"
    with pytest.raises(sdk.NotFoundError) as unknown:
        openai.responses.cancel(f"resp_{MODEL}.0_{'0' * 32}")
    assert unknown.value.code == "not_found"


def test_resume_from_another_node_continues_the_numbers(
    openai: OpenAI, worker: PlayingWorker, other_node: ApiProcess
) -> None:
    """A background stream left in the middle goes on elsewhere: every number once, no text lost or repeated."""
    stream = openai.responses.create(model=MODEL, input="Tell", background=True, stream=True)
    turn = worker.take()
    worker.say(turn, "one ", "two ")
    seen: list[Any] = []
    for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    stream.close()
    job, last = seen[0].response.id, seen[-1].sequence_number
    with other_node.openai() as elsewhere:
        resumed = elsewhere.responses.retrieve(job, stream=True, starting_after=last)
        worker.say(turn, "", "three")
        worker.finish(turn)
        seen.extend(resumed)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "one two three"
    assert seen[-1].type == "response.completed"
    assert seen[-1].response.output_text == "one two three"


def test_live_and_replayed_events_are_identical(
    raw: httpx.Client, worker: PlayingWorker, node: ApiProcess, other_node: ApiProcess
) -> None:
    """The events a live client saw are the events every node replays, from any point."""
    body = {"model": MODEL, "input": "Tell", "background": True, "stream": True}
    with worker.answering("a", "", "b", "c"), raw.stream("POST", "/v1/responses", json=body) as answer:
        live = list(frames(answer.iter_lines()))
    job = live[0]["response"]["id"]
    assert [event["type"] for event in live[:3]] == ["response.created", "response.queued", "response.in_progress"]
    for place in (node, other_node):
        assert replay(place, job) == live
    for after in (0, 3, len(live) - 2):
        assert replay(other_node, job, after) == live[after + 1 :]


@pytest.mark.parametrize("ending", ["completed", "failed", "cancelled"])
@pytest.mark.parametrize("background", [True, False])
def test_a_number_after_the_end_is_refused(
    raw: httpx.Client, worker: PlayingWorker, other_node: ApiProcess, ending: str, background: bool
) -> None:
    """Once the response has ended, by naming the last number; at that the stream is empty, and while the response runs
    any number may still come."""
    body = {"model": MODEL, "input": "Tell", "stream": True, "background": background}
    with raw.stream("POST", "/v1/responses", json=body) as answer:
        events = frames(answer.iter_lines())
        live = [next(events)]
        job = live[0]["response"]["id"]
        turn = worker.take()
        worker.say(turn, "a", "", "b")
        url = f"{other_node.base_url}/v1/responses/{job}"
        query = {"stream": "true", "starting_after": "2000"}
        with httpx.stream("GET", url, params=query, timeout=20) as running:
            assert running.status_code == 200
        if ending == "cancelled":
            assert raw.post(f"/v1/responses/{job}/cancel").status_code == 200
        elif ending == "failed":
            worker.fail(turn, "engine_error")
        else:
            worker.finish(turn)
        live.extend(events)
    last = live[-1]["sequence_number"]
    assert replay(other_node, job, last) == []
    for after in (last + 1, 2000):
        refused = httpx.get(url, params={"stream": "true", "starting_after": str(after)}, timeout=20)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "starting_after")
        assert error["message"].endswith(f"its last event has the number {last}.")


def test_takeover_shows_no_event(raw: httpx.Client, worker: PlayingWorker) -> None:
    """A job that goes back to the queue and on to another attempt continues its stream as if nothing had happened."""
    body = {"model": MODEL, "input": "Tell", "stream": True}
    with raw.stream("POST", "/v1/responses", json=body) as answer:
        events = frames(answer.iter_lines())
        job = next(events)["response"]["id"]
        turn = worker.take()
        worker.say(turn, "one ")
        assert worker.delivery.hand_back([turn.handout.lease]) == 1
        again = worker.take()
        again.said, again.counts = turn.said, turn.counts
        worker.say(again, "two")
        worker.finish(again)
        rest = list(events)
    deltas = [event["delta"] for event in rest if event["type"] == "response.output_text.delta"]
    assert deltas == ["one ", "two"]
    assert [event["sequence_number"] for event in rest] == list(range(1, len(rest) + 1))
    assert rest[-1]["response"]["id"] == job


@pytest.mark.parametrize("background", [False, True])
def test_cancelled_stream_ends_as_incomplete(openai: OpenAI, other_node: ApiProcess, background: bool) -> None:
    """A stream whose job is cancelled ends with response.incomplete carrying the status cancelled."""
    stream = openai.responses.create(model=MODEL, input="Long", background=background, stream=True)
    first = next(stream)
    assert first.type == "response.created"
    with other_node.openai() as elsewhere:
        elsewhere.responses.cancel(first.response.id)
    last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"


def test_failed_job_maps_to_its_status_and_stream_event(openai: OpenAI, worker: PlayingWorker) -> None:
    """A failed generation is an error to a synchronous caller, never to be sent again, and an event in a stream."""
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(openai.responses.create, model=MODEL, input="Fail")
        worker.fail(worker.take(), "engine_error")
        with pytest.raises(sdk.InternalServerError) as failure:
            pending.result()
    assert failure.value.code == "engine_error"
    assert failure.value.response.headers["x-should-retry"] == "false"

    stream = openai.responses.create(model=MODEL, input="Fail", stream=True)
    turn = worker.take()
    worker.say(turn, "shown")
    worker.fail(turn, "poison")
    last = list(stream)[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None and last.response.error.code == "poison"
    assert last.response.output_text == "shown"


def test_leaving_a_plain_stream_cancels_its_job(raw: httpx.Client, worker: PlayingWorker) -> None:
    """A client that goes away while its job is queued, or running in silence, ends the job."""
    for begun in (False, True):
        with raw.stream("POST", "/v1/responses", json={"model": MODEL, "input": "Long", "stream": True}) as answer:
            next(frames(answer.iter_lines()))
            if begun:
                worker.take()
        wait_until(lambda: worker.held == 0, description=f"the job to be cancelled (begun: {begun})")


def test_leaving_a_sync_request_cancels_its_job(node: ApiProcess, worker: PlayingWorker) -> None:
    """A client that stops waiting for its synchronous answer ends the job."""
    with httpx.Client(base_url=node.base_url, timeout=0.5) as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post("/v1/responses", json={"model": MODEL, "input": "Long"})
    wait_until(lambda: worker.held == 0, description="the job to be cancelled")


def test_leaving_a_background_stream_or_a_replay_cancels_nothing(raw: httpx.Client, worker: PlayingWorker) -> None:
    """Background jobs outlive every reader."""
    body = {"model": MODEL, "input": "Long", "stream": True, "background": True}
    with raw.stream("POST", "/v1/responses", json=body) as answer:
        job = next(frames(answer.iter_lines()))["response"]["id"]
    turn = worker.take()
    with raw.stream("GET", f"/v1/responses/{job}", params={"stream": "true"}) as answer:
        next(frames(answer.iter_lines()))
    record = worker.keys.job(turn.handout.lease.token)
    wait_until(lambda: worker.client.hget(record, "watch") == b"", description="both readers to be forgotten")
    worker.say(turn, "still here")
    worker.finish(turn)
    assert raw.get(f"/v1/responses/{job}").json()["status"] == "completed"


def test_silent_stream_sends_comment_lines(raw: httpx.Client) -> None:
    """While a job waits, the stream stays alive with comment lines, and says that it must not be buffered."""
    body = {"model": MODEL, "input": "Wait", "stream": True}
    with raw.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["content-type"].startswith("text/event-stream")
        comments = (line for line in answer.iter_lines() if line.startswith(":"))
        assert [next(comments), next(comments)] == [": keep-alive"] * 2


def test_sync_wait_that_is_too_long_names_the_job(narrow_node: ApiProcess, worker: PlayingWorker) -> None:
    """After sync_wait_seconds the caller gets the id, and how many wait before it, and may not resend; the job goes
    on."""
    with narrow_node.openai(max_retries=3) as client, pytest.raises(sdk.InternalServerError) as failure:
        client.responses.create(model=MODEL, input="Slow")
    answer = failure.value.response
    assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
    body = answer.json()
    assert (body["error"]["code"], body["status"], body["queue_position"]) == ("sync_wait_exceeded", "queued", 0)
    assert worker.held == 1
    turn = worker.take()
    worker.say(turn, "done")
    worker.finish(turn)
    later = httpx.get(narrow_node.base_url + answer.headers["location"]).json()
    assert (later["id"], later["status"]) == (body["id"], "completed")


def test_full_queue_is_a_429_that_may_be_sent_again(narrow_node: ApiProcess, worker: PlayingWorker) -> None:
    """At the bound nothing is stored, and the client is told when to come back."""
    with narrow_node.openai() as client:
        client.responses.create(model=MODEL, input="First", background=True)
        with pytest.raises(sdk.RateLimitError) as full:
            client.responses.create(model=MODEL, input="Second", background=True)
    assert full.value.code == "executor_queue_full"
    assert full.value.response.headers["retry-after"].isdigit()
    assert worker.held == 1


def test_many_short_jobs_all_answer(openai: OpenAI, worker: PlayingWorker) -> None:
    """Results that come before or while their waiter looks are never missed, and never told twice."""

    def streamed(_: int) -> str:
        events = openai.responses.create(model=MODEL, input="Quick", stream=True)
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    def waited(_: int) -> str:
        return openai.responses.create(model=MODEL, input="Quick").output_text

    with worker.answering("a", "b", "c"), ThreadPoolExecutor(16) as pool:
        assert set(pool.map(waited, range(100))) == {"abc"}
        assert set(pool.map(streamed, range(100))) == {"abc"}
