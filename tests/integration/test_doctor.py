"""`genpool doctor`: a sound installation has no finding that failed, and each thing that is wrong is named."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from genpool import cli
from pool.store.connection import Client, connect
from pool.store.lifecycle import Lifecycle
from pool.store.server import StateServer
from tasks import doctor
from tasks.api_keys import new_key
from tasks.config import API_KEYS_VARIABLE, Settings, load_configuration
from tasks.doctor import FAILED, OK, Finding, examine
from tests.processes import free_port
from tests.webapp.api_process import ApiProcess
from tests.webapp.playing_worker import MODEL, PlayingWorker
from workers.weights import SOURCES, weights_fault

SHIPPED = "smollm2-135m-instruct"

Examine = Callable[[], dict[str, Finding]]


@pytest.fixture(autouse=True)
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache and no state of the user's takes part."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StateServer]:
    """A state server of this test alone: its configuration is changed."""
    with StateServer(tmp_path / "server") as server:
        yield server


@pytest.fixture
def client(server: StateServer) -> Iterator[Client]:
    """Of that server."""
    client = connect(server.url)
    yield client
    client.connection_pool.disconnect()


@pytest.fixture
def settings(server: StateServer, tmp_path: Path) -> Settings:
    """One enabled model, on that server."""
    return settings_of(tmp_path, f'[state]\nurl = "{server.url}"\n[server]\nport = {free_port()}\n')


def settings_of(folder: Path, toml: str, source: str = "random:1") -> Settings:
    """Settings of a file; the shipped model is disabled."""
    path = folder / "genpool.toml"
    path.write_text(f'{toml}[models.{MODEL}]\nsource = "{source}"\n[models.{SHIPPED}]\nenabled = false\n')
    return load_configuration(path, environ={}).settings


def found(settings: Settings, clock: Callable[[], float] = time.time) -> dict[str, Finding]:
    """Findings by check; each failure has a remedy, and nothing else has one."""
    findings = list(examine(settings, weights_fault, clock))
    assert all(bool(finding.remedy) == (finding.status == FAILED) for finding in findings)
    return {finding.check: finding for finding in findings}


def failed(settings: Settings, clock: Callable[[], float] = time.time) -> set[str]:
    """The checks that failed."""
    return {name for name, finding in found(settings, clock).items() if finding.status == FAILED}


@pytest.fixture
def worker(server: StateServer) -> Iterator[PlayingWorker]:
    """A live rank of the model."""
    worker = PlayingWorker(server.url)
    worker.register()
    yield worker
    worker.close()


@pytest.mark.usefixtures("worker")
def test_a_sound_installation_has_nothing_to_do(settings: Settings, tmp_path: Path) -> None:
    """Table and JSON say the same, and the exit code is 0."""
    findings = found(settings)
    assert {finding.status for finding in findings.values()} == {OK}
    assert findings["celery"].detail == importlib.metadata.version("celery")
    assert findings[f"worker {MODEL}"].detail == "rank-of-the-test"
    command = ["--config", str(tmp_path / "genpool.toml"), "doctor"]
    table, as_json = (CliRunner().invoke(cli, [*command, *more]) for more in ([], ["--json"]))
    assert (table.exit_code, as_json.exit_code) == (0, 0)
    assert [entry["check"] for entry in json.loads(as_json.output)] == list(findings)
    assert [line.split("  ")[0] for line in table.output.splitlines()] == ["CHECK", *findings]


def test_what_is_wrong_with_the_state_server_is_named(settings: Settings, client: Client) -> None:
    """Policy, persistence and memory; and that nobody serves the model."""
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("appendonly", "no")
    # So much that the connections of the doctor itself change the share little.
    client.set("gp:test:ballast", b"x" * 2**23)
    client.config_set("maxmemory", int(client.info("memory")["used_memory"] * 1.1))
    assert failed(settings) == {"state memory policy", "state persistence", "state memory", f"worker {MODEL}"}
    client.delete("gp:test:ballast")


def test_a_model_that_an_admin_unloaded_is_no_failure(
    settings: Settings, client: Client, worker: PlayingWorker
) -> None:
    """Its worker lives, and the way back is shown. Without a worker nobody could load it: that is one."""
    Lifecycle(client, MODEL).unload(0)
    assert worker.registry.beat(worker.rank, "life-1", lease_ms=60_000, facts={"state": "unloaded"})
    finding = found(settings)[f"worker {MODEL}"]
    assert (finding.status, failed(settings)) == (OK, set())
    assert "by an admin" in finding.detail and finding.detail.endswith(f"genpool models load {MODEL}")
    worker.registry.retire(worker.rank, "life-1")
    assert failed(settings) == {f"worker {MODEL}"}


@pytest.mark.usefixtures("worker")
def test_a_replica_takes_no_writes(settings: Settings, client: Client) -> None:
    """It answers, and yet it cannot be used."""
    client.replicaof("127.0.0.1", free_port())
    assert failed(settings) == {"state writable"}


def test_a_state_server_that_is_away_is_one_failure(tmp_path: Path) -> None:
    """What depends on it is skipped; the exit code is 1, and the way out is shown."""
    settings = settings_of(tmp_path, f'[state]\nurl = "unix://{tmp_path}/nobody.sock"\n')
    assert failed(settings) == {"state server"}
    assert found(settings)["workers"].status == doctor.SKIPPED
    done = CliRunner().invoke(cli, ["--config", str(tmp_path / "genpool.toml"), "doctor"])
    assert done.exit_code == 1
    assert "state server: Check state.url" in done.output


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("off_s", [-60.0, 60.0])
def test_clocks_that_differ_are_named(settings: Settings, off_s: float) -> None:
    """In either direction."""
    assert failed(settings, lambda: time.time() + off_s) == {"clock"}
    detail = found(settings, lambda: time.time() + off_s)["clock"].detail
    assert detail.endswith("behind" if off_s > 0 else "ahead")


@pytest.mark.usefixtures("worker")
def test_a_port_is_free_ours_or_taken(settings: Settings, server: StateServer, tmp_path: Path) -> None:
    """A stranger on it is a failure, a genpool is not; `--port` looks where `genpool up --port` put it."""
    assert "free" in found(settings)["api port"].detail
    with socket.create_server((settings.server.host, settings.server.port)):
        assert failed(settings) == {"api port"}
    node = ApiProcess(server.url, tmp_path / "node").start()
    try:
        command = ["--config", str(tmp_path / "genpool.toml"), "doctor", "--json", "--port", str(node.port)]
        looked = {entry["check"]: entry for entry in json.loads(CliRunner().invoke(cli, command).output)}
        assert looked["api port"]["detail"] == f"genpool answers at 127.0.0.1:{node.port}"
        ours = settings_of(tmp_path, f'[state]\nurl = "{server.url}"\n[server]\nport = {node.port}\n')
        assert "genpool answers" in found(ours)["api port"].detail
    finally:
        node.stop()


@pytest.mark.usefixtures("worker")
@pytest.mark.usefixtures("worker")
def test_keys_are_there_when_they_must_be(server: StateServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None are needed on loopback; elsewhere there must be some, which only their owner can change."""
    monkeypatch.delenv(API_KEYS_VARIABLE, raising=False)
    file = tmp_path / "keys"
    state = f'[state]\nurl = "{server.url}"\n[server]\nport = {free_port()}\n'
    assert found(settings_of(tmp_path, state))["api keys"].detail.startswith("none")
    settings = settings_of(tmp_path, f'{state}host = "0.0.0.0"\n')
    assert failed(settings) == {"api keys"}
    assert "genpool keys new" in found(settings)["api keys"].detail
    settings = settings_of(tmp_path, f'{state}host = "0.0.0.0"\nkeys_file = "{file}"\n')
    assert failed(settings) == {"api keys"}
    key, line = new_key("caller")
    file.write_text(f"{line}\n")
    assert found(settings)["api keys"].detail == "1 in force"
    assert failed(settings) == set()
    file.chmod(0o666)
    assert "can write" in found(settings)["api keys"].detail
    file.write_text(f"{key}\n")
    assert "line 1" in found(settings)["api keys"].detail
    assert "keep the keys they had" in found(settings)["api keys"].remedy
    assert key not in repr(found(settings))


@pytest.mark.usefixtures("worker")
def test_llama_cpp_is_there_where_a_model_needs_it(
    server: StateServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not looked for otherwise."""
    state = f'[state]\nurl = "{server.url}"\n[server]\nport = {free_port()}\n'
    assert "llama.cpp" not in found(settings_of(tmp_path, state))
    needing = settings_of(tmp_path, f'{state}[models.needing]\nsource = "{tmp_path}"\nbackend = "llama_cpp"\n')
    assert found(needing)["llama.cpp"].status == OK
    versions = importlib.metadata.version

    def without(name: str) -> str:
        if name == "llama-cpp-python":
            raise importlib.metadata.PackageNotFoundError(name)
        return versions(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    assert "make llama" in found(needing)["llama.cpp"].remedy


@pytest.mark.usefixtures("worker")
def test_budgets_fit_into_this_machines_memory(server: StateServer, tmp_path: Path) -> None:
    """Of each model beside the smaller ones; the setting that asks for too much is named, with what it may be. Weights
    that nobody configured are said to be missing from the sum."""
    state = f'[state]\nurl = "{server.url}"\n[server]\nport = {free_port()}\n'
    sound = found(settings_of(tmp_path, state))[f"memory of {MODEL}"]
    assert sound.status == OK
    assert "take 80 MiB of" in sound.detail and "weight_bytes is 0" in sound.detail
    greedy = f'{state}[models.greedy]\nsource = "random:1"\nweight_bytes = 7\nkv_budget_bytes = {2**50}\n'
    findings = found(settings_of(tmp_path, greedy))
    assert {name for name, each in findings.items() if each.status == FAILED} == {"worker greedy", "memory of greedy"}
    remedy = findings["memory of greedy"].remedy
    most = int(remedy.removeprefix("Lower models.greedy.kv_budget_bytes to ").removesuffix(" at most."))
    assert 0 < most < 2**50
    assert "weight_bytes" not in findings["memory of greedy"].detail


@pytest.mark.usefixtures("worker")
def test_model_files_are_there_and_whole(server: StateServer, tmp_path: Path) -> None:
    """A path without a file, a file that is none, a known file of the right size with other content."""
    state = f'[state]\nurl = "{server.url}"\n[server]\nport = {free_port()}\n'
    path = tmp_path / "weights.gguf"
    settings = settings_of(tmp_path, state, str(path))
    assert "is not there" in found(settings)[f"model {MODEL}"].detail
    path.write_bytes(b"not weights")
    assert "is no GGUF file" in found(settings)[f"model {MODEL}"].detail
    path.write_bytes(b"GGUF...")
    assert failed(settings) == set()
    known = SOURCES[SHIPPED]
    cached = tmp_path / "cache" / "genpool" / "models" / SHIPPED / known.file_name
    cached.parent.mkdir(parents=True)
    with cached.open("wb") as file:
        file.truncate(known.size_bytes)
    settings = settings_of(tmp_path, state, SHIPPED)
    assert failed(settings) == {f"model {MODEL}"}
    assert "damaged" in found(settings)[f"model {MODEL}"].detail


def test_folders_belong_to_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others must not write to the cache or the state, nor read the state; there must be room on the disk."""
    state, cache = tmp_path / "own", tmp_path / "cache" / "genpool" / "models"
    cache.mkdir(parents=True)
    with StateServer(state):
        settings = settings_of(tmp_path, f'[state]\nfolder = "{state}"\n[server]\nport = {free_port()}\n')
        assert failed(settings) == {f"worker {MODEL}"}
    assert found(settings)["state server"].remedy == "Run: genpool up"
    state.chmod(0o755)
    assert found(settings)["state folder"].status == OK
    (state / "appendonlydir").chmod(0o755)
    next((state / "appendonlydir").iterdir()).chmod(0o644)
    assert "can read" in found(settings)["state folder"].detail
    state.chmod(0o770)
    cache.chmod(0o777)
    monkeypatch.setattr(doctor, "DISK_RESERVE_BYTES", 2**62)
    assert failed(settings) == {
        "state server", "state folder", "model cache", "disk of state folder", "disk of model cache",
    }  # fmt: skip


@pytest.mark.usefixtures("worker")
def test_a_requirement_that_is_not_met_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too old, or not there at all."""
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda _: ["celery>99", "no-such-package>=1", "ruff>99; extra=='x'"]
    )
    assert failed(settings) == {"celery", "no-such-package"}
    assert "celery>99" in found(settings)["celery"].remedy
