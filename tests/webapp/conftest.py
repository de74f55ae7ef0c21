"""Fixtures of the HTTP tests: an application in this process, nodes of their own, and a worker that the test plays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from flask import Flask
from flask.testing import FlaskClient
from openai import OpenAI

from pool.program_settings import ProgramSettings
from pool.settings import LimitSettings, ModelSettings, ServerSettings
from pool.state_settings import StateSettings
from pool.store.server import StateServer
from tasks.config import Settings
from tests.webapp.api_process import ApiProcess
from tests.webapp.playing_worker import MODEL, PlayingWorker
from webapp.app import create_app


@pytest.fixture
def worker(redis_url: str) -> Iterator[PlayingWorker]:
    """A registered worker of the model; at the end, what is left of its jobs goes away."""
    worker = PlayingWorker(redis_url)
    worker.register()
    yield worker
    worker.cancel_all()
    worker.close()


@pytest.fixture
def make_app(redis_url: str) -> Iterator[Callable[..., Flask]]:
    """Applications in this process, over the test's state server or another."""
    apps: list[Flask] = []

    def make(url: str = redis_url, *, programs: ProgramSettings | None = None, **server: float) -> Flask:
        settings = settings_for(url, **server)
        if programs is not None:
            settings = settings.model_copy(update={"programs": programs})
        apps.append(create_app(settings))
        return apps[-1]

    yield make
    for app in apps:
        app.extensions["genpool"].close()


def settings_for(url: str, **server: float) -> Settings:
    """Settings of an application in this process."""
    return Settings(
        state=StateSettings(url=url),
        server=ServerSettings(**{"sync_wait_seconds": 10, "keepalive_seconds": 0.2, **server}),  # type: ignore[arg-type]
        limits=LimitSettings(body_bytes=4096, pending_per_model=5),
        models={
            MODEL: ModelSettings(source="random:1"),
            "disabled": ModelSettings(source="random:2", enabled=False),
        },
    )


@pytest.fixture
def app(make_app: Callable[..., Flask]) -> Flask:
    """The application in this process."""
    return make_app()


@pytest.fixture
def http(app: Flask) -> FlaskClient:
    """Flask's own client of `app`."""
    return app.test_client()


@pytest.fixture(scope="session")
def node(state_server: StateServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    """A node of two processes, for all tests of the session; the state server is emptied between them."""
    node = ApiProcess(state_server.url, tmp_path_factory.mktemp("node"), SERVER__PROCESSES="2").start()
    yield node
    node.stop()


@pytest.fixture(scope="session")
def other_node(state_server: StateServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    """A second node on the same state."""
    node = ApiProcess(state_server.url, tmp_path_factory.mktemp("other")).start()
    yield node
    node.stop()


@pytest.fixture(scope="session")
def narrow_node(state_server: StateServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    """A node with low limits: one job, 4 KiB bodies, 0.3 s of waiting."""
    limits = {"LIMITS__PENDING_PER_MODEL": "1", "LIMITS__BODY_BYTES": "4096", "SERVER__SYNC_WAIT_SECONDS": "0.3"}
    node = ApiProcess(state_server.url, tmp_path_factory.mktemp("narrow"), **limits).start()
    yield node
    node.stop()


@pytest.fixture
def start_node(state_server: StateServer, tmp_path: Path) -> Iterator[Callable[..., ApiProcess]]:
    """Start nodes with settings of their own; they end with the test."""
    nodes: list[ApiProcess] = []

    def start(*arguments: str, **settings: str) -> ApiProcess:
        nodes.append(ApiProcess(state_server.url, tmp_path / f"node-{len(nodes)}", *arguments, **settings))
        return nodes[-1].start()

    yield start
    for node in nodes:
        node.stop()


@pytest.fixture
def openai(node: ApiProcess) -> Iterator[OpenAI]:
    """The official client of `node`."""
    with node.openai() as client:
        yield client


@pytest.fixture
def raw(node: ApiProcess) -> Iterator[httpx.Client]:
    """A plain HTTP client of `node`."""
    with httpx.Client(base_url=node.base_url, timeout=20) as client:
        yield client
