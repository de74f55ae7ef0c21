"""Ids, queries and labels from outside: data that is checked, and never more than data."""

from __future__ import annotations

import json

import pytest
from flask.testing import FlaskClient

from tests.webapp.playing_worker import MODEL
from tests.webapp.refusals import error_of

#: A worker has published the model, so everything is checked before queueing.
pytestmark = pytest.mark.usefixtures("worker")


def test_cancel_and_poll_of_strange_ids_are_404(http: FlaskClient) -> None:
    """Ids are data: whatever is not one of ours is unknown."""
    for job in ("x", "resp_", "*", "resp_tiny.0_" + "F" * 32, "a%00b", "a%0Ab", "gp:%7Btiny:0%7D:queue", "..%2F.."):
        for answer in (http.get(f"/v1/responses/{job}"), http.post(f"/v1/responses/{job}/cancel")):
            error_of(answer, 404)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=1", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&starting_after=%C2%B2", "starting_after"),
        ("stream=true&starting_after=99999999999", "starting_after"),
        ("include_obfuscation=true", "include_obfuscation"),
        ("verbose=1", "verbose"),
        ("include=message.output_text.logprobs", "include"),
        ("include[]=reasoning.encrypted_content", "include[]"),
        ("stream=true&stream=false", "stream"),
        ("stream=true&starting_after=1&starting_after=1", "starting_after"),
        ("include=&include=", "include"),
        ("before=", "before"),
    ],
)
def test_wrong_queries_name_the_parameter(http: FlaskClient, query: str, param: str) -> None:
    """The query of a poll is checked as strictly as a body."""
    assert error_of(http.get(f"/v1/responses/resp_tiny.0_{'0' * 32}?{query}"))["param"] == param


@pytest.mark.parametrize("query", ["include=", "include[]=", "include_obfuscation=false", "stream=false"])
def test_a_query_that_asks_for_nothing_is_none(http: FlaskClient, query: str) -> None:
    """Options that genpool lacks, without a value."""
    job = http.post("/v1/responses", json={"model": MODEL, "input": "x", "background": True}).get_json()["id"]
    assert http.get(f"/v1/responses/{job}?{query}").get_json()["status"] == "queued"


@pytest.mark.parametrize(
    "word", ["", "no\u00a0break", "\u0646\u200c\u06cc", "\U0001f468\u200d\U0001f469", "\u2028", "\ue000"]
)
def test_a_label_may_be_any_text(http: FlaskClient, word: str) -> None:
    """Of any script, and none at all; it comes back as it was sent."""
    body = {"model": MODEL, "input": "x", "background": True, "user": word, "safety_identifier": word}
    answer = http.post("/v1/responses", json=body).get_json()
    assert (answer["user"], answer["safety_identifier"]) == (word, word)


@pytest.mark.parametrize("word", ["\0", "a\nb", "\x1b[0m", "\x7f", "\x85", "\ud800"])
def test_a_label_holds_no_control_character(http: FlaskClient, word: str) -> None:
    """Nor a surrogate."""
    for field in ("user", "safety_identifier", "previous_response_id", "model"):
        body = json.dumps({"model": MODEL, "input": "x", "background": True, field: word})
        refused = http.post("/v1/responses", data=body, content_type="application/json")
        assert error_of(refused)["param"] == field


def test_a_job_has_one_id(http: FlaskClient) -> None:
    """Other kinds, other digits, leading zeros: 404 for whatever is asked, and the job is as it was."""
    job = http.post("/v1/responses", json={"model": MODEL, "input": "x", "background": True}).get_json()["id"]
    kind, place, token = job.split("_")
    others = [f"{other}_{place}_{token}" for other in ("chatcmpl", "cmpl", "gen")]
    others += [f"{kind}_{MODEL}.{shard}_{token}" for shard in ("00", "0000", "\u0660", "\uff10", "1", "")]
    for other in others:
        for method, path in (("GET", ""), ("POST", "/cancel"), ("DELETE", ""), ("GET", "/input_items")):
            error_of(http.open(f"/v1/responses/{other}{path}", method=method), 404)
        body = {"model": MODEL, "input": "x", "previous_response_id": other}
        error_of(http.post("/v1/responses", json=body), 404)
    assert http.get(f"/v1/responses/{job}").get_json()["status"] == "queued"
