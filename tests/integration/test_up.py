"""`genpool up`, the whole of it: a request through every process, deaths of each, and an end without leftovers."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pool.store.server import socket_path
from tasks.launch import HURRY_NOTE
from tests.processes import descendants, free_port, is_running
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


def up_environment(state_folder: Path) -> dict[str, str]:
    """A user of its own, with one tiny model."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GENPOOL_")}
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "GENPOOL_STATE__FOLDER": str(state_folder),
        "GENPOOL_MODELS__SMOLLM2_135M_INSTRUCT__ENABLED": "false",
        "GENPOOL_MODELS__TINY__SOURCE": "random:1",
    }


class Up:
    """A running `genpool up` of a user of its own, with one tiny model; `settings`: further variables."""

    def __init__(self, folder: Path, *arguments: str, **settings: str) -> None:
        self.folder = folder / "state"
        self.environment = up_environment(self.folder) | settings
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "genpool.py"), "up", "--port", "0", *arguments],
            env=self.environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        ready = wait_until(self._ready_line, description="the ready line", timeout_s=60)
        assert "serves tiny" in ready
        self.ready = ready.rstrip("\n")
        self.port = int(ready.split("http://127.0.0.1:")[1].split("/")[0])

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            self.lines.extend(stdout)

    def _ready_line(self) -> str:
        assert self.process.poll() is None, "".join(self.lines)
        return next((line for line in list(self.lines) if line.startswith("genpool is ready")), "")

    def children(self, words: str) -> list[int]:
        """The direct children whose command line holds `words`."""
        return [
            pid
            for pid, command in descendants(self.process.pid).items()
            if words in command and parent_of(pid) == self.process.pid and is_running(pid)
        ]

    def kill(self, words: str) -> None:
        """Kill the one such child and wait for its successor."""
        (victim,) = self.children(words)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: self.children(words) not in ([], [victim]), description=f"a new {words}")

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Status and body; (0, b"") when nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def text(self) -> str:
        """The answer to one fixed, seeded request."""
        status, body = self.ask(
            "POST", "/v1/responses", {"model": "tiny", "input": "Hello", "max_output_tokens": 8, "temperature": 0}
        )
        assert status == 200, body
        return str(json.loads(body)["output"][0]["content"][0]["text"])

    def end(self) -> None:
        """Make sure that it is gone."""
        self.process.kill()
        self.process.wait()
        self._reader.join(timeout=10)


def parent_of(pid: int) -> int:
    """The parent of a process, 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """A running genpool."""
    running = Up(tmp_path)
    try:
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def shared_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One for those tests that leave it as it was."""
    running = Up(tmp_path_factory.mktemp("shared"))
    try:
        yield running
    finally:
        running.end()


def test_it_serves_survives_every_death_and_leaves_nothing(up: Up) -> None:
    """State server, worker and API are killed one after the other; each time the same request gets the same answer."""
    expected = up.text()
    for words in ("valkey-server", "celery", "gunicorn"):
        up.kill(words)
        wait_until(lambda: up.ask("GET", "/readyz")[0] == 200, description="readiness", timeout_s=60)
        assert up.text() == expected
    everything = descendants(up.process.pid)
    assert len(everything) >= 4
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(timeout=60) == 0
    assert not [command for pid, command in everything.items() if is_running(pid)]
    assert not socket_path(up.folder).exists()
    assert sorted(path.name for path in up.folder.iterdir()) == ["appendonlydir", "server.lock", "valkey.log"]


_ENDED = re.compile(r"worker tiny ended with signal 9(?:, (\d+) times in a row)?; starting it again in ([\d.]+) s\n")


def test_a_worker_that_keeps_dying_takes_nothing_along(shared_up: Up) -> None:
    """However often: the API and the state server stay, each restart is announced, and once it lives, it serves."""
    everything = {words: shared_up.children(words) for words in ("valkey-server", "gunicorn")}

    def announced() -> list[tuple[int, float]]:
        found = [match for line in list(shared_up.lines) if (match := _ENDED.fullmatch(line))]
        return [(int(match[1] or 1), float(match[2])) for match in found]

    before = len(announced())
    for times in range(1, 6):
        (worker,) = wait_until(lambda: shared_up.children("celery"), description="a worker", timeout_s=60)
        os.kill(worker, signal.SIGKILL)
        wait_until(
            lambda times=times: len(announced()) == before + times, description="the restart to be told", timeout_s=60
        )
        assert shared_up.ask("GET", "/healthz")[0] == 200
    # The first one had perhaps lived for long, which begins the row anew.
    told = announced()[before + 1 :]
    first = told[0][0]
    assert first in (1, 2)
    assert told == [(row, 0.5 * 2 ** (row - 1)) for row in range(first, first + 4)]
    assert {words: shared_up.children(words) for words in everything} == everything
    wait_until(lambda: shared_up.ask("GET", "/readyz")[0] == 200, description="readiness", timeout_s=60)
    assert shared_up.text()


@pytest.fixture(scope="module", autouse=True)
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A genpool of a model that cannot be loaded. It ends after some pauses, during which the other tests run."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken.gguf").write_bytes(b"not a model")
    with subprocess.Popen(
        [sys.executable, str(ROOT / "genpool.py"), "up", "--port", "0"],
        env=up_environment(folder / "state") | {"GENPOOL_MODELS__TINY__SOURCE": str(folder / "broken.gguf")},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield process
        process.kill()


def test_a_model_that_cannot_be_loaded_ends_it_with_the_reason(broken: subprocess.Popen[str]) -> None:
    """At the very first start nothing else would tell."""
    output, _ = broken.communicate(timeout=100)
    assert broken.returncode == 1
    assert "worker tiny ended 5 times in a row" in output
    assert "tiny: cannot be served" in output.rpartition("Its last lines:")[2]
    assert "genpool is ready" not in output


def test_the_ready_line_names_flower_and_each_replica_has_a_worker(tmp_path: Path) -> None:
    """With the address that answers; all workers of a model serve it, each under a name of its own."""
    pytest.importorskip("flower")
    port = free_port()
    running = Up(tmp_path, "--flower", "--flower-port", str(port), GENPOOL_MODELS__TINY__REPLICAS="2")

    def ranks() -> set[str]:
        (tiny,) = [
            row for row in json.loads(running.ask("GET", "/v1/admin/models?ranks=1")[1])["data"] if row["enabled"]
        ]
        return {rank["rank"].partition("@")[0] for rank in tiny["ranks"] if rank["state"] == "loaded"}

    try:
        wait_until(lambda: ranks() == {"tiny", "tiny-2"}, description="both replicas", timeout_s=60)
        docs = f"examples are at http://127.0.0.1:{running.port}/docs"
        assert running.ready.endswith(f"serves tiny; {docs}; Flower is at http://127.0.0.1:{port}")
        running.port = port
        wait_until(lambda: running.ask("GET", "/healthcheck")[0] == 200, description="Flower", timeout_s=30)
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=60) == 0
    finally:
        running.end()
    (line,) = (line for line in running.lines if line.startswith("stopping: "))
    order = "api, then worker tiny and worker tiny 2, then flower, then state"
    assert line == f"stopping: {order}; mostly seconds, at most 100 s; a second signal hurries\n"


def test_its_last_words_tell_what_becomes_of_unfinished_work(up: Up) -> None:
    """A hurried end hands a running generation back, says so, beside Celery's own words, and ends with one."""
    body = {"model": "tiny", "input": "Hello", "background": True, "ignore_eos": True, "temperature": 0}
    status, answer = up.ask("POST", "/v1/responses", body | {"max_output_tokens": 1900})
    assert status == 200, answer
    path = f"/v1/responses/{json.loads(answer)['id']}"
    wait_until(lambda: json.loads(up.ask("GET", path)[1])["status"] == "in_progress", description="it to run")
    up.process.send_signal(signal.SIGINT)
    wait_until(lambda: any("draining; 1 generations" in line for line in up.lines), description="draining")
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(timeout=60) == 0
    up.end()
    said = [line.rstrip("\n") for line in up.lines if " | " not in line]
    assert said[-3:] == [
        f"worker tiny: {HURRY_NOTE}",
        "tiny: unfinished generations handed back: 1; they go on after the next start",
        "stopped",
    ]


def test_a_killed_supervisor_takes_everything_along(up: Up) -> None:
    """No process outlives it, gunicorn's own children included, and the next one can start on the same folder."""
    everything = descendants(up.process.pid)
    assert len(everything) >= 4
    up.process.kill()
    up.process.wait()
    wait_until(
        lambda: not [command for pid, command in everything.items() if is_running(pid)],
        description="all processes to end",
        timeout_s=20,
    )
    again = Up(up.folder.parent)
    try:
        assert again.text()
    finally:
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(timeout=60) == 0
        again.end()


def test_a_second_one_on_the_same_folder_is_refused(shared_up: Up) -> None:
    """One state server a folder; the first goes on."""
    second = subprocess.run(
        [sys.executable, str(ROOT / "genpool.py"), "up", "--port", "0"],
        env=shared_up.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 1
    assert second.stderr == (
        f"Error: The state folder {shared_up.folder} is in use by another genpool (process {shared_up.process.pid}).\n"
    )
    assert shared_up.ask("GET", "/readyz")[0] == 200
