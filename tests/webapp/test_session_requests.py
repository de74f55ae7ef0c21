"""Headers that name a session: what is stored of them where replicas go by it, and nothing where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from pool.program_settings import ProgramSettings
from pool.replica_settings import CONSISTENT_HASH
from pool.store.flows import session_of
from pool.store.ids import parse_ref
from tasks.catalogue import Catalogue
from tasks.config import load_configuration
from tests.webapp.conftest import settings_for
from tests.webapp.playing_worker import MODEL, PlayingWorker
from tests.webapp.program_app import ASKED, RESPONSES, context
from webapp.app import create_app
from webapp.auth import NOBODY

#: Makes an application: its request policy, and whether Programs are on.
Make = Callable[..., Flask]


@pytest.fixture
def make(redis_url: str) -> Iterator[Make]:
    """Applications in this process whose model goes by sessions, unless told otherwise."""
    apps: list[Flask] = []

    def build(policy: str = CONSISTENT_HASH, **programs: object) -> Flask:
        settings = settings_for(redis_url)
        of_model = settings.models[MODEL].model_copy(update={"request_policy": policy})
        changed: dict[str, object] = {"models": settings.models | {MODEL: of_model}}
        if programs:
            changed["programs"] = ProgramSettings.model_validate({"enabled": True, **programs})
        apps.append(create_app(settings.model_copy(update=changed)))
        return apps[-1]

    yield build
    for app in apps:
        app.extensions["genpool"].close()


def post(app: Flask, headers: Mapping[str, str], **body: object) -> TestResponse:
    """A background request."""
    said = {"model": MODEL, **ASKED[RESPONSES], "background": True, **body}
    return app.test_client().post(RESPONSES, json=said, headers=headers)


def session_stored(worker: PlayingWorker, answer: TestResponse) -> str | None:
    """What the job's record and its turn say of a session, alike."""
    assert answer.status_code == 200, answer.text
    session, turn = worker.client.hmget(worker.keys.job(parse_ref(answer.get_json()["id"]).token), "session", "turn")
    if session is None:
        assert turn is None or len(turn.split(b":")) == 7
        return None
    assert turn.endswith(b":" + session)
    found: str = session.decode()
    return found


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({}, None),
        ({"x-session-id": ""}, None),
        ({"x-session-id": "chat-1"}, "chat-1"),
        ({"X-Session-Affinity": "chat-1"}, "chat-1"),
        ({"X-Session-Affinity": "chat-2", "X-Session-Id": "chat-1"}, "chat-1"),
        # As of Programs: agents of a session begin with the same prompt.
        ({"x-claude-code-session-id": "chat-1", "x-claude-code-agent-id": "search"}, "chat-1"),
    ],
)
def test_a_session_header_is_stored_as_digits(
    make: Make, worker: PlayingWorker, headers: dict[str, str], session: str | None
) -> None:
    """In the job's record, by its tenant; its name is nowhere in the state server."""
    answer = post(make(), headers)
    assert session_stored(worker, answer) == (None if session is None else session_of(NOBODY, session))
    for key in worker.client.scan_iter(match="gp:*:job:*"):
        assert b"chat-" not in b"".join(worker.client.hvals(key))


def test_without_the_policy_headers_mean_nothing(make: Make, worker: PlayingWorker) -> None:
    """They are not even looked at."""
    app = make("least_inflight")
    for value in ("chat-1", "x" * 257):
        assert session_stored(worker, post(app, {"x-session-id": value})) is None


@pytest.mark.parametrize("name", ["x-session-id", "X-Session-Affinity"])
def test_a_session_that_is_too_long_is_refused_by_name(make: Make, worker: PlayingWorker, name: str) -> None:
    """With the limit; nothing stays enqueued."""
    answer = post(make(), {name: "x" * 257})
    error = answer.get_json()["error"]
    assert (answer.status_code, error["param"]) == (400, name.lower())
    assert "256" in error["message"]
    assert worker.held == 0
    assert session_stored(worker, post(make(), {name: "x" * 256})) == session_of(NOBODY, "x" * 256)


@pytest.mark.usefixtures("worker")
def test_an_unknown_model_is_said_whatever_the_header(make: Make) -> None:
    """The policy of a model that is not there is nobody's matter."""
    answer = post(make(), {"x-session-id": "x" * 257}, model="nobody")
    assert answer.status_code == 404


def test_a_programs_requests_go_by_their_program(make: Make, worker: PlayingWorker) -> None:
    """Where Programs are on, plain requests go by the header, unless it names a Program."""
    canonical = make(program_scheduling_enable_key="vllm_xargs.agentic_context")
    session = {"x-session-id": "chat-1"}
    assert session_stored(worker, post(canonical, session)) == session_of(NOBODY, "chat-1")
    assert session_stored(worker, post(canonical, session, **context("agent"))) is None
    assert session_stored(worker, post(make(program_scheduling_enable_key="auto"), session)) is None
    worker.client.flushall()


def test_a_reload_changes_the_policy_at_once(make: Make, worker: PlayingWorker, tmp_path: Path) -> None:
    """For what comes from then on."""
    file = tmp_path / "genpool.toml"
    file.write_text(f'[models.{MODEL}]\nsource = "random:1"\nrequest_policy = "least_inflight"\n')
    app = make()
    catalogue: Catalogue = app.extensions["genpool"].services.catalogue
    catalogue._load = lambda: load_configuration(file, environ={})
    changes = catalogue.reload()
    assert "request_policy" in changes.changed_fields[MODEL]
    assert session_stored(worker, post(app, {"x-session-id": "chat-1"})) is None
