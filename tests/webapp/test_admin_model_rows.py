"""GET /v1/admin/models and `genpool models list`: how models and their replicas stand, as the state server knows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient

from genpool import cli
from pool.store.connection import Client
from pool.store.executors import executors
from tasks.api_keys import ADMIN, USER, new_key
from tests.processes import free_port
from tests.webapp.conftest import settings_for
from tests.webapp.playing_worker import MODEL, PlayingWorker
from webapp.app import create_app

PATH = "/v1/admin/models"
EIGHT = {"state": "loaded", "configured_target_inflight": 8, "effective_target_inflight": 8}


def row(http: FlaskClient, query: str = "") -> dict[str, Any]:
    """The row of the test's model."""
    answer = http.get(PATH + query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = next(each for each in answer.get_json()["data"] if each["id"] == MODEL)
    return found


def beat(worker: PlayingWorker, rank: str, **facts: Any) -> None:
    """A replica tells this of itself."""
    worker.registry.beat(rank, f"life-of-{rank}", lease_ms=60_000, facts=facts)


def submit(http: FlaskClient, **body: Any) -> None:
    """A background job."""
    assert (
        http.post("/v1/responses", json={"model": MODEL, "input": "x", "background": True, **body}).status_code == 200
    )


def test_a_model_without_replicas_queues(http: FlaskClient, worker: PlayingWorker) -> None:
    """It is unloaded, and takes jobs all the same; a disabled one does not."""
    worker.registry.retire(worker.rank, "life-1")
    submit(http)
    found = row(http)
    assert (found["state"], found["accepting_new_requests"], found["loaded_replicas"]) == ("unloaded", True, 0)
    assert (found["queue_depth"], found["runtime_inflight"]) == (1, 0)
    assert (found["configured_target_inflight"], found["effective_target_inflight"], found["target_inflight"]) == (
        0,
        0,
        1,
    )
    rows = {each["id"]: each for each in http.get(PATH).get_json()["data"]}
    assert list(rows) == [MODEL, "disabled"]
    assert (rows["disabled"]["enabled"], rows["disabled"]["accepting_new_requests"]) == (False, False)
    assert "ranks" not in found


def test_replicas_add_up_and_are_listed_when_asked_for(http: FlaskClient, worker: PlayingWorker) -> None:
    """Only what is loaded counts; a clamped replica shows both of its limits."""
    worker.registry.retire(worker.rank, "life-1")
    beat(worker, "b", **EIGHT)
    beat(worker, "a", state="loaded", configured_target_inflight=4, effective_target_inflight=1, runtime_inflight=1)
    beat(worker, "c", state="loading", configured_target_inflight=8)
    found = row(http, "?ranks=1")
    assert (found["state"], found["loaded_replicas"], found["loading_replicas"]) == ("loaded", 2, 1)
    assert (found["configured_target_inflight"], found["effective_target_inflight"]) == (12, 9)
    shown = [(each["rank"], each["state"], each["effective_target_inflight"]) for each in found["ranks"]]
    assert shown == [("a", "loaded", 1), ("b", "loaded", 8), ("c", "loading", 0)]
    (clamped, *_) = found["ranks"]
    assert (clamped["configured_target_inflight"], clamped["runtime_inflight"]) == (4, 1)
    assert row(http, "?ranks=0") == {name: value for name, value in found.items() if name != "ranks"}


def test_read_and_not_begun_counts_as_queued(http: FlaskClient, worker: PlayingWorker) -> None:
    """Only what a replica has begun is in flight: until then a cancel costs nothing."""
    for _ in range(3):
        submit(http)
    worker.take()
    assert len(worker.delivery.read(1, 100)) == 1
    found = row(http)
    assert (found["queue_depth"], found["runtime_inflight"]) == (2, 1)
    assert found["oldest_queued_seconds"] >= 0


def test_a_failed_replica_tells_why(http: FlaskClient, worker: PlayingWorker) -> None:
    """The model has failed when no other replica serves or loads it."""
    worker.registry.retire(worker.rank, "life-1")
    beat(worker, "a", state="failed", last_error="no room")
    assert (row(http)["state"], row(http)["last_error"]) == ("failed", "no room")
    beat(worker, "b", **EIGHT)
    assert row(http)["state"] == "loaded"


@pytest.mark.parametrize(("query", "param"), [("?ranks=2", "ranks"), ("?ranks=", "ranks"), ("?rank=1", "rank")])
def test_a_wrong_query_is_refused_by_name(http: FlaskClient, query: str, param: str) -> None:
    """Nothing is guessed."""
    answer = http.get(PATH + query)
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, param)


def test_rows_cost_one_round_trip_and_no_look_at_jobs(client: Client, http: FlaskClient, worker: PlayingWorker) -> None:
    """However many models, replicas and jobs there are: two scripts a model, sent together, and nothing else."""
    beat(worker, "a", **EIGHT)
    for _ in range(4):
        submit(http)
    executors(client, [MODEL])
    before = client.info("commandstats")
    client.config_resetstat()
    executors(client, [MODEL, "disabled"])
    after = client.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in after.items()}
    assert calls.pop("evalsha") == 4
    assert before and not set(calls) & {"hmget", "xrange", "xpending", "scan"}, calls


def test_the_command_lists_the_same(redis_url: str, http: FlaskClient, worker: PlayingWorker, tmp_path: Path) -> None:
    """As a table, by replica, and as JSON; without a state server the catalogue alone."""
    beat(worker, worker.rank.replace("rank", "other"), **EIGHT)
    submit(http)

    def run(url: str, *arguments: str) -> str:
        config = tmp_path / "genpool.toml"
        config.write_text(f'[state]\nurl = "{url}"\n[models.{MODEL}]\nsource = "random:1"\n')
        result = CliRunner().invoke(cli, ["--config", str(config), "models", "list", *arguments])
        return result.output

    (line,) = [line.split() for line in run(redis_url).splitlines() if line.startswith(f"{MODEL} ")]
    assert line[5:11] == ["yes", "loaded", "2", "0", "8", "8"]
    assert [line.split()[1:4] for line in run(redis_url, "--ranks").splitlines()[1:]] == [
        ["other-of-the-test", "loaded", "0"],
        [worker.rank, "loaded", "0"],
    ]
    told = next(each for each in json.loads(run(redis_url, "--json", "--ranks")) if each["id"] == MODEL)
    assert {**told, "oldest_queued_seconds": 0} == {**row(http, "?ranks=1"), "oldest_queued_seconds": 0}
    nowhere = f"redis://127.0.0.1:{free_port()}"
    (line,) = [line.split() for line in run(nowhere).splitlines() if line.startswith(f"{MODEL} ")]
    assert line[5:8] == ["yes", "-", "-"]
    assert "No state server answers" in run(nowhere, "--ranks")


def test_rows_are_for_admins(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there are keys: they are about everybody's work."""
    made = {kind: new_key(kind, kind) for kind in (USER, ADMIN)}
    monkeypatch.setenv("GENPOOL_API_KEYS", ";".join(line for _, line in made.values()))
    app = create_app(settings_for(redis_url))
    statuses = {
        kind: app.test_client().get(PATH, headers={"Authorization": f"Bearer {key}"}).status_code
        for kind, (key, _) in made.items()
    }
    assert statuses == {USER: 403, ADMIN: 200}
    assert app.test_client().get(PATH).status_code == 401
    app.extensions["genpool"].close()
