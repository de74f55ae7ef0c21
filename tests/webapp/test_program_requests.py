"""Requests of Programs over HTTP: whose they are, what is refused, and how they wait and end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pool.rules.programs.lineage import MAX_DEPTH
from pool.store.connection import Client
from pool.store.program_keys import program_id_of
from tasks.api_keys import KeyLimits
from tests.waiting import wait_until
from tests.webapp.playing_worker import MODEL, PlayingWorker
from tests.webapp.program_app import (
    ASKED,
    CHAT,
    RESPONSES,
    MakeProgramApp,
    ProgramApp,
    context,
    program_apps,
)
from tests.webapp.refusals import error_of
from webapp.auth import NOBODY


@pytest.fixture
def make(redis_url: str, client: Client, tmp_path: Path) -> Iterator[MakeProgramApp]:
    """Makes applications."""
    yield from program_apps(redis_url, client, tmp_path)


@pytest.fixture
def app(make: MakeProgramApp) -> ProgramApp:
    """One that takes all sources of identity."""
    return make(program_scheduling_enable_key="auto")


# --- whose a request is

CLAUDE = "x-claude-code-"
IDENTITIES: list[tuple[dict[str, Any], dict[str, str], str, str | None]] = [
    (context("p"), {}, "p", None),
    (context("p", parent_program_id="q"), {}, "p", "q"),
    (context(task_id="t"), {}, "t:lead", None),
    (context(session_id="s", agent_id="a"), {}, "s:a", "s:lead"),
    ({"vllm_xargs": {"agentic_context": '{"program_id": "as-json"}'}}, {}, "as-json", None),
    ({"agent_hint": {"session_id": "s"}}, {}, "s", None),
    ({"agent_hint": {"session_id": "s", "parent_session_id": "q"}}, {}, "s", "q"),
    ({}, {f"{CLAUDE}session-id": "s"}, "s:lead", None),
    ({}, {f"{CLAUDE}session-id": "s", f"{CLAUDE}agent-id": "a"}, "s:a", "s:lead"),
    (
        {},
        {f"{CLAUDE}session-id": "s", f"{CLAUDE}agent-id": "a", f"{CLAUDE}parent-agent-id": "b"},
        "s:a",
        "s:b",
    ),
    ({}, {"session-id": "s", "thread-id": "s"}, "s:lead", None),
    ({}, {"Session-Id": "s", "Thread-Id": "t"}, "s:t", "s:lead"),
    ({}, {"x-session-id": "s"}, "s:lead", None),
    ({}, {"X-Session-Affinity": "s"}, "s:lead", None),
    ({}, {"X-Correlation-ID": "s"}, "s:lead", None),
    (context("p") | {"agent_hint": {"session_id": "s"}}, {"x-session-id": "x"}, "p", None),
    ({"agent_hint": {"session_id": "s"}}, {f"{CLAUDE}session-id": "x"}, "s", None),
    ({}, {f"{CLAUDE}session-id": "s", "session-id": "x", "x-session-id": "y"}, "s:lead", None),
]


@pytest.mark.parametrize(("body", "headers", "name", "parent"), IDENTITIES)
def test_every_source_of_identity(
    app: ProgramApp, body: dict[str, Any], headers: Mapping[str, str], name: str, parent: str | None
) -> None:
    """Makes the Program that its row of docs/programs.md says, with its parent, and the job waits in its pool."""
    answer = app.post(headers=headers, **body)
    assert (answer.status_code, answer.get_json()["status"]) == (200, "queued")
    record = app.record(name)
    assert record is not None
    assert record.text("parent") == ("" if parent is None else program_id_of(NOBODY, parent))
    shown = app.get(f"/v1/programs/{name}").get_json()
    assert (shown["id"], shown["object"], [each["model"] for each in shown["models"]]) == (name, "program", [MODEL])
    assert shown["models"][0] | {"state": "paused", "status": "reasoning", "generation": 0} == shown["models"][0]


@pytest.mark.parametrize("route", ASKED)
def test_every_route_has_programs(app: ProgramApp, route: str) -> None:
    """Also those that wait for the end, and streams: a client that is answered late has its request in the pool."""
    app.join("a")
    done: list[int] = []
    body = {**context("p"), "background": False} if route == RESPONSES else context("p")
    thread = threading.Thread(target=lambda: done.append(app.post(route, **body).status_code))
    thread.start()
    wait_until(lambda: app.record("p"), description="the Program")
    app.finish("p")
    thread.join()
    assert done == [200 if route == RESPONSES else 409]
    assert app.held == 0


def test_without_identity_a_request_takes_the_plain_path(app: ProgramApp) -> None:
    """Hints and ids of requests alone make no Program."""
    for body in ({}, context(request_id="r", priority=5), {"vllm_xargs": {}}, {"vllm_xargs": None, "agent_hint": None}):
        assert app.post(headers={"x-request-id": "r"}, **body).status_code == 200
    assert app.client.zcard(f"gp:{{{MODEL}:0}}:backlog") == 4
    assert list(app.client.scan_iter(match="gp:*:program:*")) == []


def test_by_default_only_the_canonical_object_counts(make: MakeProgramApp) -> None:
    """Headers and hints of agents are not looked at, and may hold anything."""
    app = make()
    assert app.post(headers={"x-session-id": "s"}, agent_hint={"session_id": 5}).status_code == 200
    assert list(app.client.scan_iter(match="gp:*:program:*")) == []
    assert app.post(**context("p")).status_code == 200
    assert app.record("p") is not None


def test_without_programs_the_fields_are_unknown(make: MakeProgramApp) -> None:
    """And headers of sessions mean nothing; Programs' routes say so."""
    app = make(on=False)
    for name, body in (("vllm_xargs", context("p")), ("agent_hint", {"agent_hint": {"session_id": "s"}})):
        refused = error_of(app.post(**body))
        assert (refused["code"], refused["param"]) == ("unknown_parameter", name)
    assert app.post(headers={"x-session-id": "s"}).status_code == 200
    assert error_of(app.get("/v1/programs/p"), 404)["code"] == "programs_off"
    assert error_of(app.finish("p"), 404)["code"] == "programs_off"
    assert app.get("/scheduling/diagnostics").get_json() == {"enabled": False, "models": []}


# --- what is refused

CONTEXT = "vllm_xargs.agentic_context"
REFUSED: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"vllm_xargs": 5}, {}, "vllm_xargs"),
    ({"vllm_xargs": {"other": 1}}, {}, "vllm_xargs.other"),
    ({"vllm_xargs": {"agentic_context": 5}}, {}, CONTEXT),
    ({"vllm_xargs": {"agentic_context": "no json"}}, {}, CONTEXT),
    (context("p", parent_program_id="p"), {}, f"{CONTEXT}.parent_program_id"),
    (context("p", blocks_parent=True), {}, f"{CONTEXT}.blocks_parent"),
    (context(5), {}, f"{CONTEXT}.program_id"),  # type: ignore[arg-type]
    (context("x" * 257), {}, f"{CONTEXT}.program_id"),
    (context("line\nbreak"), {}, f"{CONTEXT}.program_id"),
    (context("p", step_id=-1), {}, f"{CONTEXT}.step_id"),
    (context("p", step_id=True), {}, f"{CONTEXT}.step_id"),
    (context("p", priority=1.5), {}, f"{CONTEXT}.priority"),
    (context("p", deadline_seconds=-1), {}, f"{CONTEXT}.deadline_seconds"),
    (context("p", kv_retention_ttl_seconds="5"), {}, f"{CONTEXT}.kv_retention_ttl_seconds"),
    (context("p", expected_output_length=-1), {}, f"{CONTEXT}.expected_output_length"),
    (context("p", expected_resume="no"), {}, f"{CONTEXT}.expected_resume"),
    ({"agent_hint": 5}, {}, "agent_hint"),
    ({"agent_hint": {}}, {}, "agent_hint.session_id"),
    ({"agent_hint": {"session_id": "s", "blocks_parent": True}}, {}, "agent_hint.blocks_parent"),
    ({"agent_hint": {"session_id": "s", "parent_session_id": "s"}}, {}, "agent_hint.parent_session_id"),
    ({}, {"x-session-id": "x" * 257}, "x-session-id"),
    (
        {},
        {f"{CLAUDE}session-id": "s", f"{CLAUDE}agent-id": "a", f"{CLAUDE}parent-agent-id": "a"},
        f"{CLAUDE}parent-agent-id",
    ),
]


@pytest.mark.parametrize(("body", "headers", "field"), REFUSED)
def test_what_is_wrong_is_named(app: ProgramApp, body: dict[str, Any], headers: Mapping[str, str], field: str) -> None:
    """A 400 with the field, and nothing stored."""
    for route in ASKED:
        refused = error_of(app.post(route, headers=headers, **body))
        assert refused["param"] == field
        assert field.rpartition(".")[2] in refused["message"]
    assert list(app.client.scan_iter(match="gp:*:program:*")) == []
    assert app.held == 0


def test_the_description_says_what_is_accepted(make: MakeProgramApp) -> None:
    """Where Programs are on, the two fields are described as they are validated, but for what no schema can say."""
    app = make(program_scheduling_enable_key="auto")
    document = app.get("/openapi.json").get_json()
    body = {"$ref": "#/components/schemas/ChatRequest", "components": document["components"]}
    validator = Draft202012Validator(body)
    plain = {"model": MODEL, **ASKED[CHAT]}
    for said, _, _, _ in IDENTITIES:
        assert validator.is_valid(plain | said), said
    beyond = ("no json", "line\\n", "blocks_parent': True", "'p', 'parent_program_id': 'p'", "'s', 'parent_session")
    for said, headers, _ in REFUSED:
        if not headers and not any(text in repr(said) for text in beyond):
            assert not validator.is_valid(plain | said), said
    off = make(on=False).get("/openapi.json").get_json()["components"]["schemas"]["ChatRequest"]["properties"]
    assert not {"vllm_xargs", "agent_hint"} & off.keys()
    assert {"vllm_xargs", "agent_hint"} <= document["components"]["schemas"]["ChatRequest"]["properties"].keys()


def test_durations_are_finite(app: ProgramApp) -> None:
    """Whatever a JSON parser makes of them."""
    for value in ("Infinity", "NaN", "1e999"):
        body = json.dumps({"model": MODEL, "input": "x", **context("p", deadline_seconds="VALUE")})
        sent = app.http.post(RESPONSES, data=body.replace('"VALUE"', value), content_type="application/json")
        assert error_of(sent)["param"] == f"{CONTEXT}.deadline_seconds"


def test_nobody_is_his_own_ancestor(app: ProgramApp) -> None:
    """By what is stored of the others; the field is named as its source calls it."""
    assert app.post(**context("a", parent_program_id="b")).status_code == 200
    assert app.post(**context("b", parent_program_id="c")).status_code == 200
    assert error_of(app.post(**context("c", parent_program_id="a")))["param"] == f"{CONTEXT}.parent_program_id"
    hint = {"agent_hint": {"session_id": "c", "parent_session_id": "a"}}
    assert error_of(app.post(**hint))["param"] == "agent_hint.parent_session_id"
    assert app.record("c") is None
    record = app.record("b")
    assert record is not None and record.text("root") == program_id_of(NOBODY, "c")


def test_trees_have_a_greatest_depth(app: ProgramApp) -> None:
    """So many levels above one."""
    for level in range(MAX_DEPTH + 1):
        parent = {"parent_program_id": f"p{level - 1}"} if level else {}
        assert app.post(**context(f"p{level}", **parent)).status_code == 200
    refused = error_of(app.post(**context("deeper", parent_program_id=f"p{MAX_DEPTH}")))
    assert refused["param"] == f"{CONTEXT}.parent_program_id" and str(MAX_DEPTH) in refused["message"]


# --- what a key allows


def test_keys_bound_what_requests_may_ask_for(make: MakeProgramApp) -> None:
    """Priority and deadline; at the bound they pass, and other keys have their own."""
    limits = KeyLimits(max_priority=5, min_deadline_seconds=2.5)
    app = make(keys={"alice": limits, "bob": KeyLimits()})
    assert app.post(owner="alice", **context("p", priority=5, deadline_seconds=2.5)).status_code == 200
    for field, value, limit in (("priority", 6, "5"), ("deadline_seconds", 2.4, "2.5")):
        refused = error_of(app.post(owner="alice", **context("q", **{field: value})))
        assert refused["param"] == f"{CONTEXT}.{field}" and limit in refused["message"]
        assert app.post(owner="bob", **context("q", **{field: value})).status_code == 200


def test_a_key_has_so_many_programs(make: MakeProgramApp) -> None:
    """Counted where one begins; requests of those that are there always pass, and an end makes room."""
    app = make(keys={"alice": KeyLimits(max_programs=2), "bob": KeyLimits(max_programs=1)})
    for name in ("a", "b", "a", "b"):
        assert app.post(owner="alice", **context(name)).status_code == 200
    for headers in ({}, {"Idempotency-Key": "k"}, {"Idempotency-Key": "k"}):
        answer = app.post(owner="alice", headers=headers, **context("c"))
        refused = error_of(answer, 429)
        assert refused["code"] == "key_programs_full" and "2 Programs" in refused["message"]
        assert int(answer.headers["Retry-After"]) >= 1
    assert app.record("c", "alice") is None and app.held == 4
    assert app.post(owner="bob", **context("a")).status_code == 200
    assert app.finish("a", "alice").status_code == 200
    assert app.post(owner="alice", headers={"Idempotency-Key": "k"}, **context("c")).status_code == 200
    for name, owner in (("b", "alice"), ("c", "alice"), ("a", "bob")):
        assert app.finish(name, owner).status_code == 200
    assert app.client.exists(f"gp:{{{MODEL}:0}}:owners") == 0


def test_two_tenants_may_use_the_same_id(make: MakeProgramApp) -> None:
    """They never meet: another key's Programs are unknown, also as parents."""
    app = make(keys={"alice": KeyLimits(), "bob": KeyLimits(), "admin": KeyLimits()})
    assert app.post(owner="alice", **context("same", parent_program_id="up")).status_code == 200
    for owner in ("bob", "admin"):
        unknown = error_of(app.get("/v1/programs/same", owner), 404)
        assert unknown == error_of(app.get("/v1/programs/never-was", owner), 404)
        assert error_of(app.finish("same", owner), 404) == unknown
    assert app.post(owner="bob", **context("up", parent_program_id="same")).status_code == 200
    assert app.post(owner="bob", **context("same")).status_code == 200
    assert app.finish("same", "bob").status_code == 200
    assert app.record("same", "alice") is not None and app.record("same", "bob") is None


# --- how a request waits and ends


def test_requests_wait_with_a_position(app: ProgramApp) -> None:
    """Programs in the order in which they would be admitted, requests of one Program behind each other."""
    first = app.post(**context("first")).get_json()
    urgent = app.post(**context("urgent", priority=3)).get_json()
    later = app.post(**context("urgent")).get_json()
    positions = {
        name: app.get(f"{RESPONSES}/{job['id']}").get_json()["queue_position"]
        for name, job in {"first": first, "urgent": urgent, "later": later}.items()
    }
    assert positions == {"first": 1, "urgent": 0, "later": 1}


def test_a_need_above_the_whole_capacity_is_refused(make: MakeProgramApp) -> None:
    """It would wait for ever; the limit is named."""
    app = make(token_capacity_per_dp_rank=500, decode_buffer_tokens=100)
    assert app.post(**context("p", expected_output_length=450)).status_code == 200
    for body in (context("q", expected_output_length=500), {**context("q"), "input": "x" * 2000}):
        refused = error_of(app.post(**body))
        assert (refused["code"], refused["param"]) == ("program_capacity_exceeded", "input")
        assert "500" in refused["message"]
    assert app.record("q") is None
    assert (
        make(token_capacity_per_dp_rank=500, binding_only=True).post(**context("q"), input="x" * 2000).status_code
        == 200
    )


def given_up(app: ProgramApp, **body: Any) -> Any:
    """The answer to a chat completion that nobody begins, when its time is over."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(app.post(CHAT, **body)))
    thread.start()
    wait_until(lambda: app.sweep() or answers, description="the end of the wait")  # type: ignore[func-returns-value]
    thread.join()
    return answers[0]


def test_a_deadline_that_passes_in_the_queue(app: ProgramApp) -> None:
    """504, and no client sends it again."""
    answer = given_up(app, **context("p", deadline_seconds=0.2))
    assert error_of(answer, 504)["code"] == "deadline_exceeded"
    assert "before it began" in error_of(answer, 504)["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert app.held == 0 and app.record("p") is None


def test_a_queue_timeout(make: MakeProgramApp) -> None:
    """429 with when to come back: of the Programs' own timeout, the request's, and a later deadline the shortest."""
    for app, body in (
        (make(queue_timeout_seconds=0.2), context("p", deadline_seconds=30)),
        (make(), {**context("p"), "queue_timeout_seconds": 0.2}),
    ):
        answer = given_up(app, **body)
        assert error_of(answer, 429)["code"] == "queue_timeout"
        assert int(answer.headers["Retry-After"]) >= 1 and answer.headers["x-should-retry"] == "true"
        assert app.held == 0


def test_what_came_while_no_rank_was_up_goes_on_when_one_is(app: ProgramApp) -> None:
    """It waits, bound to none, and is admitted by the first rank that comes."""
    assert app.post(**context("p")).get_json()["queue_position"] == 0
    app.plan()
    record = app.record("p")
    assert record is not None and (record.text("state"), record.text("rank")) == ("paused", "")
    assert app.get("/scheduling/diagnostics").get_json()["models"][0]["programs_total"] == 1
    app.join("a")
    wait_until(lambda: app.plan() or is_active(app), description="a place")  # type: ignore[func-returns-value]
    app.finish("p")


def is_active(app: ProgramApp) -> bool:
    """Whether the Program `p` has a place."""
    record = app.record("p")
    return record is not None and record.text("state") == "active"


def test_a_cancelled_request_leaves_its_program(app: ProgramApp) -> None:
    """One that never completed anything is gone with its last request."""
    jobs = [app.post(**context("p")).get_json()["id"] for _ in range(2)]
    for job, is_there in zip(jobs, (True, False), strict=True):
        assert app.http.post(f"{RESPONSES}/{job}/cancel").get_json()["status"] == "cancelled"
        assert (app.record("p") is not None) is is_there
    assert app.held == 0


def test_a_resend_with_its_key_finds_the_same_request(app: ProgramApp) -> None:
    """In its Program, once."""
    answers = [app.post(headers={"Idempotency-Key": "k"}, **context("p")).get_json()["id"] for _ in range(2)]
    assert len(set(answers)) == 1 and app.held == 1
    other = app.post(headers={"Idempotency-Key": "k"}, **context("q"))
    assert error_of(other, 409)["code"] == "idempotency_conflict"


def test_without_a_worker_requests_wait_unless_they_shall_not(make: MakeProgramApp, redis_url: str) -> None:
    """`fail_fast_without_workers`: 503 while the model has no worker, of Programs and plain ones, and the key stays
    free."""
    app = make(limits={"fail_fast_without_workers": True})
    for body in ({}, context("p")):
        for headers in ({}, {"Idempotency-Key": "k"}):
            answer = app.post(headers=headers, **body)
            assert error_of(answer, 503)["code"] == "no_worker"
            assert answer.headers["Retry-After"] and answer.headers["x-should-retry"] == "true"
    assert app.held == 0
    worker = PlayingWorker(redis_url)
    worker.register()
    assert app.post(headers={"Idempotency-Key": "k"}, **context("p")).status_code == 200
    worker.close()
