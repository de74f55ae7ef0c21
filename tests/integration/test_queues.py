"""`genpool queues`: the queues as they are, and their rates since the look before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from genpool import cli
from pool.store.connection import Client
from tasks.client import Client as JobClient
from tasks.config import Settings, load_configuration
from tasks.queues import Queue, Queues, duration
from tests.builders import give_up, request
from tests.waiting import wait_until
from tests.webapp.playing_worker import MODEL, PlayingWorker

FACTS = {"effective_target_inflight": 3, "decode_tokens_per_sec": 12.5}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> Settings:
    """One model beside the shipped one."""
    path = tmp_path / "genpool.toml"
    path.write_text(f'[state]\nurl = "{redis_url}"\n[models.{MODEL}]\nsource = "random:1"\n')
    return load_configuration(path, environ={}).settings


@pytest.fixture
def worker(redis_url: str) -> Iterator[PlayingWorker]:
    """A rank that says it runs three at once."""
    worker = PlayingWorker(redis_url)
    worker.register()
    worker.registry.beat(worker.rank, "life-1", lease_ms=60_000, facts=FACTS)
    yield worker
    worker.cancel_all()
    worker.client.delete(worker.keys.dead)
    worker.close()


@pytest.fixture
def submit(settings: Settings) -> Iterator[Callable[[], str]]:
    """Queue a job; its id."""
    jobs = JobClient(settings)
    yield lambda: jobs.submit(request(model=MODEL))
    jobs.close()


def of_model(queues: list[Queue]) -> Queue:
    """The queue of the test's model."""
    return next(queue for queue in queues if queue.model == MODEL)


def test_a_look_shows_depth_and_the_next_one_rates(
    settings: Settings, client: Client, worker: PlayingWorker, submit: Callable[[], str]
) -> None:
    """Depth, age, slots and dead letters at once; rates from the second look on, over the time between."""
    queues = Queues(settings, client)
    for _ in range(3):
        submit()
    first = of_model(queues.look())
    assert (first.queued, first.running, first.slots, first.ranks, first.dead_letters) == (3, 0, 3, 1, 0)
    assert first.submitted_per_second is first.ended_per_second is None
    assert first.row()[-3:] == ("-", "-", "12.5")
    turn = worker.take()
    worker.say(turn, "a", "b")
    worker.finish(turn)
    worker.take()
    submit()
    second = of_model(queues.look())
    assert (second.queued, second.running) == (2, 1)
    assert second.oldest_seconds > 0
    assert second.submitted_per_second and second.ended_per_second
    assert second.ended_per_second == pytest.approx(second.submitted_per_second, rel=0.01)
    assert second.output_tokens_per_second == 12.5
    give_up(client, worker.delivery)
    third = of_model(queues.look())
    assert (third.queued, third.running, third.dead_letters) == (0, 1, 2)
    assert third.row()[2] == "-"


@pytest.mark.usefixtures("worker")
def test_the_command_prints_a_table_or_json(settings: Settings, tmp_path: Path) -> None:
    """Every model of the catalogue, rates included."""
    command = ["--config", str(tmp_path / "genpool.toml"), "queues"]
    table, as_json = (CliRunner().invoke(cli, [*command, *more]) for more in ([], ["--json"]))
    assert (table.exit_code, as_json.exit_code) == (0, 0)
    lines = [line.split() for line in table.output.splitlines()]
    assert lines[0][:4] == ["MODEL", "QUEUED", "OLDEST", "RUNNING"]
    assert [line[0] for line in lines[1:]] == list(settings.models)
    assert [MODEL, "0", "-", "0", "3", "1", "0", "0.0", "0.0", "12.5"] in lines
    entry = next(entry for entry in json.loads(as_json.output) if entry["model"] == MODEL)
    assert (entry["slots"], entry["submitted_per_second"]) == (3, 0.0)


@pytest.mark.usefixtures("worker")
def test_watching_goes_on_until_an_interrupt(submit: Callable[[], str], tmp_path: Path) -> None:
    """A look each time, the newest state in it; Ctrl-C is a clean end."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "genpool.py"), "queues", "--watch", "0.1", "--json"],
        env={**os.environ, "GENPOOL_CONFIG": str(tmp_path / "genpool.toml"), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    looks: list[int] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            looks.extend(entry["queued"] for entry in json.loads(line) if entry["model"] == MODEL)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_until(lambda: len(looks) >= 2, description="two looks", timeout_s=30)
        submit()
        wait_until(lambda: looks[-1] == 1, description="the job to be seen", timeout_s=30)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    finally:
        process.kill()
        reader.join()
        assert process.communicate()[1] == ""


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.44, "0.4s"), (59.9, "59s"), (185, "3m05s"), (7800, "2h10m"), (356_400, "4d03h")],
)
def test_a_duration_is_short(seconds: float, shown: str) -> None:
    """Two units at most."""
    assert duration(seconds) == shown
