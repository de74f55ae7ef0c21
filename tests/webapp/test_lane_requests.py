"""Lanes and fairness keys over HTTP: how requests name them, who may, and what an operator sees and changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient

from pool.rules.fairness import BATCH, INTERACTIVE, NORMAL
from pool.store.flows import key_of
from pool.store.ids import parse_ref
from tasks.api_keys import ADMIN, USER, KeyLimits, new_key
from tests.webapp.conftest import settings_for
from tests.webapp.playing_worker import MODEL, PlayingWorker
from webapp.app import create_app

RESPONSES, QUEUES = "/v1/responses", "/v1/admin/queues"
CHAT = "/v1/chat/completions"
LIMITS = {
    "alice": KeyLimits(weight=3, inflight=2),
    "bob": KeyLimits(highest_lane=NORMAL),
    "gateway": KeyLimits(fairness_keys=1),
}


def submit(http: FlaskClient, **body: Any) -> Any:
    """A background request."""
    headers = body.pop("headers", {})
    said = {"model": MODEL, "input": "x", "background": True, **body}
    return http.post(RESPONSES, json=said, headers=headers)


def stored(worker: PlayingWorker, job: str, *names: str) -> list[str]:
    """Fields of its record."""
    found = worker.client.hmget(worker.keys.job(parse_ref(job).token), names)
    return [value.decode() for value in found]


@pytest.mark.parametrize(
    ("body", "lane", "tier"),
    [
        ({}, NORMAL, "default"),
        ({"service_tier": "auto"}, NORMAL, "default"),
        ({"service_tier": "default"}, NORMAL, "default"),
        ({"service_tier": "flex"}, BATCH, "flex"),
        ({"service_tier": "priority"}, INTERACTIVE, "priority"),
        ({"lane": "batch"}, BATCH, "flex"),
        ({"lane": "interactive", "service_tier": "priority"}, INTERACTIVE, "priority"),
        ({"lane": "interactive", "service_tier": "auto"}, INTERACTIVE, "priority"),
        ({"lane": None, "service_tier": None}, NORMAL, "default"),
    ],
)
def test_a_request_names_its_lane(
    http: FlaskClient, worker: PlayingWorker, body: dict[str, Any], lane: str, tier: str
) -> None:
    """By our field or by the one that official clients have; the answer says which it is."""
    answer = submit(http, **body).get_json()
    assert answer["service_tier"] == tier
    assert stored(worker, answer["id"], "lane") == [lane]


def test_a_lane_that_is_none_is_refused(http: FlaskClient, worker: PlayingWorker) -> None:
    """By name, with what there is; so are two fields that differ."""
    for body, param in (
        ({"lane": "first"}, "lane"),
        ({"lane": 1}, "lane"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"lane": "batch", "service_tier": "priority"}, "service_tier"),
        ({"fairness_key": ""}, "fairness_key"),
        ({"fairness_key": "x" * 257}, "fairness_key"),
        ({"fairness_key": "a\nb"}, "fairness_key"),
    ):
        answer = submit(http, **body)
        assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, param)
    assert worker.held == 0


def test_chat_completions_wait_in_lanes_too(http: FlaskClient, worker: PlayingWorker) -> None:
    """Whole answers and streams."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "service_tier": "flex"}
    with worker.answering("x"):
        assert http.post(CHAT, json=body).get_json()["service_tier"] == "flex"
        assert b'"service_tier":"flex"' in http.post(CHAT, json={**body, "stream": True}).data.replace(b" ", b"")


@pytest.mark.usefixtures("worker")
def test_an_operator_sees_what_waits(http: FlaskClient) -> None:
    """By model, lane and key; keys as hashes."""
    for body in ({}, {"lane": "batch", "fairness_key": "secret"}, {"lane": "batch", "fairness_key": "secret"}):
        assert submit(http, **body).status_code == 200
    answer = http.get(QUEUES)
    assert "secret" not in answer.text
    (queue,) = [each for each in answer.get_json()["data"] if each["model"] == MODEL]
    waiting = {lane["lane"]: (lane["waiting"], [key["key"] for key in lane["keys"]]) for lane in queue["lanes"]}
    assert waiting == {
        INTERACTIVE: (0, []),
        NORMAL: (1, [key_of("default", "")]),
        BATCH: (2, [key_of("default", "secret")]),
    }


def test_an_operator_changes_lanes_and_cancels(http: FlaskClient, worker: PlayingWorker) -> None:
    """Of a job that waits; never of one that runs, and nothing of what it was asked is shown."""
    first, second = (submit(http, input="secret").get_json()["id"] for _ in range(2))
    shown = http.get(f"/v1/admin/jobs/{second}").get_json()
    assert (shown["status"], shown["lane"], shown["queue_position"]) == ("queued", NORMAL, 1)
    changed = http.patch(f"/v1/admin/jobs/{second}", json={"lane": "interactive"})
    assert (changed.status_code, changed.get_json()["lane"], changed.get_json()["queue_position"]) == (
        200,
        INTERACTIVE,
        0,
    )
    assert "secret" not in changed.text
    turn = worker.take()
    assert turn.handout.lease.token == parse_ref(second).token
    late = http.patch(f"/v1/admin/jobs/{second}", json={"lane": "batch"})
    assert (late.status_code, late.get_json()["error"]["code"]) == (409, "not_waiting")
    assert late.headers["x-should-retry"] == "false"
    for _ in range(2):
        assert http.delete(f"/v1/admin/jobs/{first}").get_json()["status"] == "cancelled"
    worker.finish(turn)
    assert http.delete(f"/v1/admin/jobs/{second}").status_code == 400
    for job, status in (("resp_x", 404), (first.replace(first[-4:], "0000"), 404)):
        assert http.get(f"/v1/admin/jobs/{job}").status_code == status
        assert http.patch(f"/v1/admin/jobs/{job}", json={"lane": "batch"}).status_code == status
    assert http.patch(f"/v1/admin/jobs/{first}", json={"lane": "no"}).get_json()["error"]["param"] == "lane"
    assert http.patch(f"/v1/admin/jobs/{first}", json={}).get_json()["error"]["param"] == "lane"


@pytest.fixture
def keyed(redis_url: str, tmp_path: Path) -> Iterator[Callable[[str], tuple[FlaskClient, dict[str, str]]]]:
    """Clients with the keys of LIMITS, and `root`, an admin's."""
    file, headers = tmp_path / "keys", {}
    lines = []
    for name in (*LIMITS, "root"):
        key, line = new_key(name, ADMIN if name == "root" else USER, LIMITS.get(name, KeyLimits()))
        lines.append(line)
        headers[name] = {"Authorization": f"Bearer {key}"}
    file.write_text("\n".join(lines))
    settings = settings_for(redis_url)
    server = settings.server.model_copy(update={"keys_file": str(file)})
    app: Flask = create_app(settings.model_copy(update={"server": server}))
    yield lambda name: (app.test_client(), headers[name])
    app.extensions["genpool"].close()


Keyed = Callable[[str], tuple[FlaskClient, dict[str, str]]]


def test_a_key_s_line_says_how_its_jobs_wait(keyed: Keyed, worker: PlayingWorker) -> None:
    """Its weight and what it may have in flight; without them, what the settings say."""
    for name, terms in (("alice", "1:3:2"), ("bob", "1:1:0")):
        http, headers = keyed(name)
        job = submit(http, headers=headers).get_json()["id"]
        (turn,) = stored(worker, job, "turn")
        assert turn.startswith(f"1:{key_of(name, '')}:1") and turn.endswith(f":{parse_ref(job).token}:{terms}")


def test_a_key_s_line_bounds_its_lanes(keyed: Keyed, worker: PlayingWorker) -> None:
    """By both names of a lane; lower ones are open."""
    http, headers = keyed("bob")
    for body in ({"lane": "interactive"}, {"service_tier": "priority"}):
        answer = submit(http, headers=headers, **body)
        assert (answer.status_code, answer.get_json()["error"]["param"]) == (403, "lane")
    assert submit(http, headers=headers, lane="batch").status_code == 200
    assert worker.held == 1


def test_fairness_keys_are_for_those_who_may(keyed: Keyed, worker: PlayingWorker) -> None:
    """Or a caller could take as many shares as it likes."""
    http, headers = keyed("alice")
    answer = submit(http, headers=headers, fairness_key="mine")
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (403, "fairness_key")
    http, headers = keyed("gateway")
    job = submit(http, headers=headers, fairness_key="user-7").get_json()["id"]
    (turn,) = stored(worker, job, "turn")
    assert turn.split(":")[1] == key_of("gateway", "user-7") != key_of("gateway", "")


def test_admin_routes_are_for_admins(keyed: Keyed, worker: PlayingWorker) -> None:
    """A user's key sees no queues, and no job by that door, not even its own."""
    http, headers = keyed("alice")
    job = submit(http, headers=headers).get_json()["id"]
    for method, path in (
        ("GET", QUEUES),
        *((method, f"/v1/admin/jobs/{job}") for method in ("GET", "PATCH", "DELETE")),
    ):
        assert http.open(path, method=method, headers=headers, json={"lane": "batch"}).status_code == 403
    root, headers = keyed("root")
    assert root.get(QUEUES, headers=headers).status_code == 200
    assert root.delete(f"/v1/admin/jobs/{job}", headers=headers).get_json()["status"] == "cancelled"
    assert worker.held == 0
