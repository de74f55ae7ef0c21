"""F44: nothing but the probes and the API's description is open, however a request is written; admin routes need an
admin key; others' jobs are unknown; a broker message that would run code is refused unread."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai as sdk
import pytest

from tasks.api_keys import ADMIN, METRICS, USER, new_key
from tasks.celery import app as celery_app
from tests.faults.conftest import StartSystem
from tests.faults.raw_http import Answer, port_of, post, send
from tests.system import SCRIPTED, System
from tests.waiting import wait_until
from webapp.app import create_app

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
OPEN = {"/healthz", "/health", "/readyz", "/", "/docs", "/docs/", "/openapi.json"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
PENDING = 3


@dataclass(frozen=True)
class Door:
    """A system with keys; `keys` by the name they were made for, `lines` what is stored of them."""

    system: System
    keys: dict[str, str]
    lines: dict[str, str]
    file: Path

    def send(self, method: str, path: str, who: str = "", body: bytes = b"", **headers: str) -> Answer:
        """A request with somebody's key."""
        fields = {"Authorization": f"Bearer {self.keys[who]}"} if who else {}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        return send(port_of(self.system), method, path, fields, body)

    def submit(self, who: str, **body: Any) -> Answer:
        """A background job."""
        whole = json.dumps({"model": SCRIPTED, "input": "say x", "background": True, **body}).encode()
        return self.send("POST", RESPONSES, who, whole, Content_Type="application/json")

    def store(self, *names: str, more: str = "") -> None:
        """Write the file, as an editor does."""
        text = "# a comment\n\n" + "".join(f"{self.lines[name]}\n" for name in names) + more
        draft = self.file.with_suffix(".new")
        draft.write_text(text)
        draft.replace(self.file)


KINDS = {"alice": USER, "bob": USER, "root": ADMIN, "scraper": METRICS}


@pytest.fixture(scope="module")
def door(start_shared_system: StartSystem, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """One node, one worker; two users, an admin and a scraper, and one that is stored nowhere."""
    made = {name: new_key(name, KINDS.get(name, USER)) for name in (*KINDS, "nobody")}
    keys, lines = ({name: pair[at] for name, pair in made.items()} for at in (0, 1))
    lines["bob"] += f" pending={PENDING}"
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("\n".join(lines[name] for name in KINDS))
    system = start_shared_system(
        workers=1, delay_ms=5, key=keys["alice"], sections={"server": {"keys_file": str(file)}}
    )
    yield Door(system, keys, lines, file)


def routes() -> list[str]:
    """A path for each rule of the application, and what there is none for."""
    rules = [re.sub(r"<[^>]*>", "x", rule.rule) for rule in create_app().url_map.iter_rules()]
    return [*rules, "/v1/admin/models/m/load", "/v1/admin/queues", "/nowhere", "/flower", "/v1/"]


def unauthorised(answer: Answer, method: str = "GET") -> None:
    """A 401 that says how to do better."""
    assert answer.status == 401, answer.body
    assert answer.headers["www-authenticate"].startswith("Bearer ")
    assert answer.headers["x-request-id"]
    if method == "HEAD":
        assert answer.body == b""
    else:
        error = answer.error(401)
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")


def test_f44_no_route_and_no_method_without_a_key(door: Door) -> None:
    """Each route with each method, without a key and with a wrong one: 401, but for the probes and the description."""
    found = routes()
    assert set(found) > OPEN and RESPONSES in found and "/metrics" in found
    for path in found:
        for method in METHODS:
            for who in ("", "nobody"):
                answer = door.send(method, path, who)
                if path in OPEN and method in ("GET", "HEAD", "OPTIONS"):
                    assert answer.status in (200, 302, 503)  # not all models are served here
                else:
                    unauthorised(answer, method)


ODD_PATHS = [
    "/v1/models/", "//v1/models", "/v1//models", "/./v1/models", "/healthz/", "/healthz/../v1/models",
    "/healthz/%2e%2e/v1/models", "/%2e%2e/v1/models", "/v1/%2e%2e/metrics", "//v1/admin/queues", "/v1/admin",
    "/v1/admin/", "/V1/ADMIN/queues", "/v1/admin/../models", "/v1/%61dmin/queues", "/healthz;/v1/models", "/metrics/",
    "/metrics%00", "/healthz%2f..%2fmetrics", "/readyz%20", "http://x/v1/models", "http://healthz/metrics",
    "/v1/models?key=x", "/v1/models#/healthz", "/v1/models/%2e%2e%2fhealthz", "/HEALTHZ",
    "/docs/metrics", "/docs/../metrics", "/docs//",
]  # fmt: skip


@pytest.mark.parametrize("path", ODD_PATHS)
def test_f44_no_way_of_writing_a_path_opens_it(door: Door, path: str) -> None:
    """Slashes, dots, escapes, case, another host's name."""
    for method in ("GET", "HEAD", "OPTIONS", "POST"):
        unauthorised(door.send(method, path), method)


WRONG = [
    "Bearer", "Bearer ", "Basic {key}", "{key}", "Bearer {key}x", "Bearer {key},Bearer {key}", "Token {key}",
    "Bearer sha256:{digest}", "Bearer {digest}", "Bearer {line}", "Bearer \xff\xfe", "Bearer null",
    "Bearer " + "x" * 8000,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_f44_only_the_key_itself_is_one(door: Door, number: int) -> None:
    """Not its hash, not the stored line, not another scheme, nor a header that claims another method."""
    line = door.lines["root"]
    value = WRONG[number].format(key=door.keys["root"], digest=line.split(":")[1], line=line)
    unauthorised(door.send("GET", "/v1/models", Authorization=value))
    for name in ("X_HTTP_Method_Override", "X_HTTP_Method", "X_Method_Override"):
        unauthorised(door.send("POST", "/v1/models", **{name: "OPTIONS"}))
    unauthorised(door.send("GET", "/v1/models", X_Original_URL="/healthz", X_Rewrite_URL="/healthz"))
    unauthorised(door.send("GET", f"/v1/models?api_key={door.keys['root']}", X_Api_Key=door.keys["root"]))


def test_f44_official_clients_understand(door: Door) -> None:
    """The right key works as their API key; a wrong one, and one of another kind, are their exceptions for it."""
    base = f"{door.system.api_url(door.system.apis[0])}/v1"

    def client(who: str) -> sdk.OpenAI:
        return sdk.OpenAI(base_url=base, api_key=door.keys[who], max_retries=0, timeout=20)

    with client("alice") as right, client("nobody") as wrong, client("scraper") as other:
        assert right.responses.create(model=SCRIPTED, input="say x").output_text == "x"
        with pytest.raises(sdk.AuthenticationError) as refused:
            wrong.responses.create(model=SCRIPTED, input="say x")
        assert refused.value.code == "invalid_api_key"
        with pytest.raises(sdk.PermissionDeniedError):
            other.models.list()
    door.system.assert_recovered()


def test_f44_a_key_opens_what_it_is_for(door: Door) -> None:
    """Users: the API; metrics keys: the figures; the admin: all of it. In any case of the scheme's name."""
    allowed = {
        "/v1/models": {"alice": 200, "root": 200, "scraper": 403},
        "/metrics": {"alice": 403, "root": 200, "scraper": 200},
        "/v1/admin/models/scripted/load": {"alice": 403, "root": 405, "scraper": 403},
        "/v1/admin/queues": {"alice": 403, "root": 404, "scraper": 403},
        "//v1/admin/queues": {"alice": 403, "root": 404, "scraper": 403},
        "/v1/%61dmin/queues": {"alice": 403, "root": 404, "scraper": 403},
        "/v1/admin": {"alice": 403, "root": 404, "scraper": 403},
        "/nowhere": {"alice": 404, "root": 404, "scraper": 403},
    }
    for path, statuses in allowed.items():
        for who, status in statuses.items():
            for method in ("GET", "HEAD"):
                assert door.send(method, path, who).status == status, (path, who, method)
            if status == 403:
                assert door.send("OPTIONS", path, who).status == 403
                assert door.send("POST", path, who).error(403)["code"] == "key_not_allowed"
    answer = door.send("GET", "/v1/models", Authorization=f"bEARER   {door.keys['alice']} ")
    assert answer.status == 200


def test_f44_a_job_of_somebody_else_s_is_unknown(door: Door) -> None:
    """Reading, streaming and cancelling: the same words as for an id that never was, also once the job has expired, and
    for an admin; its own caller is not disturbed. Idempotency keys are each caller's own."""
    job = door.submit("alice", input="repeat 2000 x").json()["id"]
    door.system.accepted.append(job)
    never = job[:-32] + "0" * 32
    for who in ("bob", "root"):
        for method, path in (("GET", ""), ("HEAD", ""), ("GET", "?stream=true"), ("POST", "/cancel")):
            theirs = door.send(method, f"{RESPONSES}/{job}{path}", who)
            unknown = door.send(method, f"{RESPONSES}/{never}{path}", who)
            assert (theirs.status, theirs.body) == (404, unknown.body) == (unknown.status, theirs.body)
            assert set(theirs.headers) == set(unknown.headers)
    assert door.send("GET", f"{RESPONSES}/{job}", "alice").json()["status"] in ("queued", "in_progress")
    assert door.send("POST", f"{RESPONSES}/{job}/cancel", "alice").json()["status"] == "cancelled"
    with door.system.client() as client:
        client.delete(door.system.keys().job(job[-32:]))  # as its TTL will
    door.system.accepted.remove(job)
    assert door.send("GET", f"{RESPONSES}/{job}", "alice").error(410)["code"] == "expired"
    assert door.send("GET", f"{RESPONSES}/{job}", "bob").body == unknown.body
    same = json.dumps({"model": SCRIPTED, "input": "say x", "background": True}).encode()
    fields = {"Content_Type": "application/json", "Idempotency_Key": "mine"}
    ids = {who: door.send("POST", RESPONSES, who, same, **fields).json()["id"] for who in ("alice", "bob", "alice")}
    assert len(set(ids.values())) == 2
    door.system.accepted += ids.values()
    door.system.assert_recovered()


def test_f44_a_caller_holds_no_more_than_its_limit(door: Door) -> None:
    """One caller's line bounds it, whatever door and process it comes through; others, and its own polls and cancels,
    are not touched. The refused leave nothing and are told when to come back."""
    held = [door.submit("bob", input="repeat 3000 x").json()["id"] for _ in range(PENDING)]
    full = [door.submit("bob")]
    chat = json.dumps({"model": SCRIPTED, "messages": [{"role": "user", "content": "say x"}]}).encode()
    full.append(door.send("POST", CHAT, "bob", chat, Content_Type="application/json"))
    for answer in full:
        error = answer.error(429)
        assert (error["code"], error["type"]) == ("key_queue_full", "rate_limit_error")
        assert 1 <= int(answer.headers["retry-after"]) <= 120
    door.system.accepted.append(door.submit("alice").json()["id"])
    for job in held:
        assert door.send("GET", f"{RESPONSES}/{job}", "bob").status == 200
    assert door.send("POST", f"{RESPONSES}/{held[0]}/cancel", "bob").status == 200
    last = door.submit("bob")
    assert last.status == 200
    door.system.accepted += [*held, last.json()["id"]]
    for job in held[1:]:
        assert door.send("POST", f"{RESPONSES}/{job}/cancel", "bob").status == 200
    for job in door.system.accepted:
        door.system.ended(job)
    door.system.assert_recovered()


def test_f44_keys_change_without_a_restart(door: Door) -> None:
    """A new key works and a revoked one does not, within seconds; a file that is broken or gone changes nothing, one
    that is empty locks everybody out."""

    def status(who: str) -> int:
        return door.send("GET", "/v1/models", who).status

    def becomes(who: str, wanted: int) -> None:
        wait_until(lambda: status(who) == wanted, description=f"{who} to get {wanted}")

    try:
        door.store("alice", "nobody")
        becomes("nobody", 200)
        becomes("root", 401)
        assert status("alice") == 200
        door.store("alice", more="bob user sha256:oops\n")
        log = door.system.apis[0].output
        wait_until(lambda: status("nobody") and "stay as they were" in log(), description="the broken file to be seen")
        assert (status("alice"), status("nobody"), status("bob")) == (200, 200, 401)
        door.file.unlink()
        wait_until(lambda: status("nobody") and log().count("stay as they were") > 1, description="no file to be seen")
        assert status("nobody") == 200
        door.store()
        becomes("alice", 401)
        assert door.send("GET", "/healthz").status == 200
    finally:
        door.store(*KINDS)
        becomes("alice", 200)


def test_f44_keys_and_hashes_are_found_nowhere(door: Door) -> None:
    """Not in logs, metrics, errors or the state, whatever was done with them."""
    for who in (*KINDS, "nobody"):
        door.send("GET", f"/nowhere/{door.keys[who]}", who)
    answers = [door.send("GET", "/metrics", "root").body.decode()]
    answers += [post(port_of(door.system), RESPONSES, b"{", Authorization=f"Bearer {door.keys['alice']}").body.decode()]
    with door.system.client() as client:
        stored = [repr([key, client.dump(key)]) for key in client.scan_iter()]
    logs = [part.output() for part in door.system.parts]
    secrets = [*door.keys.values(), *(line.split(":")[1].split()[0] for line in door.lines.values())]
    for place in (*answers, *stored, *logs):
        assert not [secret for secret in secrets if secret in place]


def effect(path: Path) -> bytes:
    """A pickle that makes a file when it is loaded."""

    class Effect:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return os.mkdir, (str(path),)

    return pickle.dumps(Effect())


def test_f44_a_pickled_message_runs_nothing(door: Door, tmp_path: Path) -> None:
    """Not in the body, under any of its names, and the worker goes on consuming."""
    proof, canary = tmp_path / "proof", tmp_path / "canary"
    pickle.loads(effect(proof))
    assert proof.exists(), "the message would do nothing anyway"
    with door.system.client() as client:
        for content_type in ("application/x-python-serialize", "pickle", "application/json"):
            properties = {"delivery_tag": str(uuid.uuid4()), "delivery_info": {"exchange": "", "routing_key": SCRIPTED}}
            message = {
                "body": base64.b64encode(effect(canary)).decode(),
                "content-type": content_type,
                "content-encoding": "binary",
                "headers": {"lang": "py", "task": "genpool.generate", "id": str(uuid.uuid4())},
                "properties": {**properties, "body_encoding": "base64", "delivery_mode": 2},
            }
            client.lpush(SCRIPTED, json.dumps(message))
        wait_until(lambda: client.llen(SCRIPTED) == 0, description="the messages to be taken")
        wait_until(lambda: client.hlen("unacked") == 0, description="the messages to be dealt with")
    assert not canary.exists()
    assert list(celery_app.conf.accept_content) == ["json"]
    assert list(celery_app.conf.result_accept_content) == ["json"]
    assert (celery_app.conf.event_serializer, celery_app.conf.task_serializer) == ("json", "json")
    door.system.assert_recovered()
    assert door.system.workers[0].alive
