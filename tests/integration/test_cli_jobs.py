"""The job commands as a user runs them: own processes, a real state server, a real worker with a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from pool.store.connection import connect
from pool.store.ranks import RankRegistry
from pool.store.server import StateServer, answers, socket_url
from tasks.client import Client
from tasks.config import load_configuration
from tasks.job_commands import build_request
from tests.builders import delivery, give_up, request
from tests.waiting import wait_until
from tests.webapp.playing_worker import PlayingWorker

ROOT = Path(__file__).parents[2]
MODEL = "tiny"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user of this test alone, whose only model needs no files."""
    return environment_in(tmp_path)


def environment_in(folder: Path) -> dict[str, str]:
    """The variables of a user with this folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GENPOOL_")}
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "GENPOOL_STATE__FOLDER": str(folder / "state"),
        "GENPOOL_MODELS__SMOLLM2_135M_INSTRUCT__ENABLED": "false",
        "GENPOOL_MODELS__TINY__SOURCE": "random:1",
    }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StateServer]:
    """The state server of that user's folder, without any worker."""
    with StateServer(tmp_path / "state") as server:
        yield server


def start(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    """The command as a process."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "genpool.py"), *arguments],
        env=environment,
        cwd=environment["GENPOOL_STATE__FOLDER"].removesuffix("/state"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(environment: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    with start(environment, *arguments) as process:
        out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def submitted(environment: dict[str, str], *arguments: str) -> str:
    """The id of a job that was queued."""
    code, out, err = run(environment, "submit", "Hello", *arguments)
    assert (code, err) == (0, "")
    return out.strip()


def status_of(environment: dict[str, str], job: str) -> dict[str, object]:
    """The job's record as the command shows it."""
    code, out, err = run(environment, "status", job)
    assert (code, err) == (0, "")
    status: dict[str, object] = json.loads(out)
    return status


@pytest.mark.usefixtures("server")
def test_a_submitted_job_can_be_read_and_cancelled(environment: dict[str, str]) -> None:
    """Without a worker it stays queued; cancelling twice is as good as once; its tail is empty."""
    job = submitted(environment, "--seed", "7")
    status = status_of(environment, job)
    assert (status["id"], status["model"], status["state"], status["seed"]) == (job, MODEL, "queued", 7)
    for _ in range(2):
        code, out, _ = run(environment, "cancel", job)
        assert (code, json.loads(out)["state"]) == (0, "cancelled")
    assert run(environment, "tail", job) == (0, "\n", "genpool: cancelled\n")


def test_a_cancelled_job_shows_what_it_had_said(environment: dict[str, str], server: StateServer) -> None:
    """As its HTTP answer does: what the log holds, which no record repeats; before the cancel too."""
    job = submitted(environment)
    with closing(PlayingWorker(server.url)) as worker:
        turn = worker.take()
        worker.say(turn, "Once ", "", "upon")
    said = [{"text": "Once upon", "finish_reason": None, "tokens": 3}]
    assert status_of(environment, job)["outputs"] == said
    code, out, _ = run(environment, "cancel", job)
    cancelled = json.loads(out)
    assert (code, cancelled["state"], cancelled["outputs"]) == (0, "cancelled", said)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("command", ["status", "cancel", "tail"])
@pytest.mark.parametrize("job", ["nonsense", f"gen_{MODEL}.0_{'0' * 32}"])
def test_an_unknown_job_is_one_line(environment: dict[str, str], command: str, job: str) -> None:
    """Malformed and unknown ids look alike."""
    assert run(environment, command, job) == (1, "", "Error: No generation has this id.\n")


def test_generate_brings_its_own_processes_and_takes_them_away(environment: dict[str, str], tmp_path: Path) -> None:
    """Text on stdout, notes on stderr, the same seed gives the same text, and nothing runs afterwards."""
    arguments = ("generate", "Hello", "--max-tokens", "12", "--seed", "7")
    code, first, err = run(environment, *arguments)
    assert code == 0, err
    assert first.strip()
    assert err == (f"genpool: starting state and worker {MODEL} ...\ngenpool: stopped at the token limit\n")
    assert not answers(socket_url(tmp_path / "state"))
    assert not list((tmp_path / "state").glob("*.sock"))
    assert run(environment, *arguments)[1] == first


@pytest.mark.usefixtures("server")
def test_generate_uses_a_state_server_that_runs(environment: dict[str, str], tmp_path: Path) -> None:
    """It starts a worker only, which also serves what waited, and leaves the server alone."""
    waiting = submitted(environment, "--max-tokens", "3", "--seed", "11")
    code, out, err = run(environment, "generate", "Hello", "--max-tokens", "5", "--seed", "11")
    assert code == 0, err
    assert out.strip()
    assert err.startswith(f"genpool: starting worker {MODEL} ...\n")
    assert status_of(environment, waiting)["state"] == "incomplete"
    code, out, err = run(environment, "tail", waiting)
    assert (code, err) == (0, "genpool: stopped at the token limit\n")
    assert out.strip()
    assert answers(socket_url(tmp_path / "state"))


def test_generate_refuses_a_model_that_is_unloaded(environment: dict[str, str], tmp_path: Path) -> None:
    """It says so at once, as `submit` does, and starts nothing. Where nothing runs, what is wanted is in the folder: it
    names the way out and leaves nothing behind."""
    with StateServer(tmp_path / "state"):
        assert run(environment, "models", "unload", MODEL) == (0, f"{MODEL}: unloaded\n", "")
        refused = run(environment, "generate", "Hello")
        assert refused == (1, "", f"Error: {MODEL} is not loaded. An admin must load it.\n")
        assert refused == run(environment, "submit", "Hello")
    code, out, err = run(environment, "generate", "Hello")
    assert (code, out) == (1, "")
    assert f"Run: genpool up, then: genpool models load {MODEL}\n" in err
    assert not answers(socket_url(tmp_path / "state"))
    assert not (tmp_path / "state" / f"worker-{MODEL}.log").exists()


def test_two_at_once_share_one_state_server(environment: dict[str, str]) -> None:
    """Whoever comes second is served to its end, whichever of the two owns the server."""
    with (
        start(environment, "generate", "Hello", "--max-tokens", "8", "--seed", "11") as first,
        start(environment, "generate", "Hello", "--max-tokens", "40", "--seed", "11") as second,
    ):
        for process in (first, second):
            out, err = process.communicate(timeout=90)
            assert process.returncode == 0, err
            assert out.strip()


def test_an_interrupt_cancels_the_job_and_stops_the_worker(environment: dict[str, str], server: StateServer) -> None:
    """A job that waits behind half a minute of others is cancelled; the state server that ran before goes on."""
    settings = load_configuration(environ=environment).settings
    options = {"model": MODEL, "max_tokens": 900, "temperature": None, "seed": 11}  # a seed that takes all of them
    with closing(Client(settings)) as client, closing(connect(server.url)) as store:
        others = {client.submit(build_request(settings, "Hello", **options)) for _ in range(30)}
        with start(environment, "generate", "Hello") as process:
            jobs = wait_until(
                lambda: len(found := jobs_of(store)) > len(others) and found, description="the job", timeout_s=30
            )
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        (job,) = jobs - others
        assert client.get(job).state == "cancelled"
        assert RankRegistry(store, MODEL).live() == []


@pytest.fixture(scope="module", autouse=True)
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`generate` with a model that cannot be loaded, and its user's folder. It ends after some pauses, during which the
    other tests run."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken.gguf").write_bytes(b"not a model")
    source = {"GENPOOL_MODELS__TINY__SOURCE": str(folder / "broken.gguf")}
    with start(environment_in(folder) | source, "generate", "Hello") as process:
        yield process, folder
        process.kill()


def test_a_worker_that_cannot_start_is_reported_with_its_last_lines(
    broken: tuple[subprocess.Popen[str], Path],
) -> None:
    """Nobody waits for a worker that keeps dying."""
    process, folder = broken
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (1, "")
    assert f"worker {MODEL} ended 3 times in a row" in err
    assert "cannot be served" in err
    assert not answers(socket_url(folder / "state"))


def test_generate_leaves_others_jobs_to_others(environment: dict[str, str], server: StateServer) -> None:
    """Its worker also takes what waits; when its own text is complete, the rest goes back to the queue, with what was
    done of it, and is not waited for."""
    environment["GENPOOL_MODELS__TINY__TARGET_INFLIGHT"] = "4"
    settings = load_configuration(environ=environment).settings
    long = request(model=MODEL, max_tokens=1900)
    with closing(Client(settings)) as client, closing(connect(server.url)) as store:
        others = [client.submit(long) for _ in range(3)]
        code, out, err = run(environment, "generate", "Hello", "--max-tokens", "12", "--seed", "11")
        assert (code, bool(out.strip())) == (0, True), err
        records = [client.get(job) for job in others]
        assert [record.state for record in records] == ["queued"] * 3
        assert any(record.logged_tokens for record in records)
        assert RankRegistry(store, MODEL).live() == []


@pytest.mark.usefixtures("server")
def test_a_late_signal_shows_no_traceback(environment: dict[str, str]) -> None:
    """Whenever it comes: while the worker stops, or while Python ends."""
    with start(environment, "generate", "Hello", "--max-tokens", "12", "--seed", "11") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "stopped at the token limit" not in (line := process.stderr.readline()):
            assert line, "it ended before its text was complete"

        def ended() -> bool:
            process.send_signal(signal.SIGTERM)
            return process.poll() is not None

        wait_until(ended, description="the command to end", timeout_s=60, every_s=0.005)
        assert process.stderr.read() == ""
        assert process.stdout.read().strip()
    assert process.returncode in (0, 128 + signal.SIGTERM)


def test_dead_letters_from_the_command_line(environment: dict[str, str], server: StateServer) -> None:
    """Listed, tried again under a new id, removed; unknown ids are named, with exit code 1."""
    first, second = submitted(environment, "--seed", "7"), submitted(environment)
    with closing(connect(server.url, max_connections=2)) as store:
        rank = delivery(server.url, model=MODEL)
        give_up(store, rank, model=MODEL)
        rank.reader.connection_pool.disconnect()
        rank.writer.connection_pool.disconnect()
    code, out, _ = run(environment, "dead-letters", "list")
    head, *rows = out.splitlines()
    assert (code, head.split()) == (0, ["MODEL", "JOB", "CODE", "LOSSES", "LAST", "RANK", "WHEN", "RECORD"])
    shown = sorted(row.split()[:5] for row in rows)
    assert shown == sorted([MODEL, job, "poison", "1", "rank-a"] for job in (first, second))
    assert all(row.endswith("Z  kept") for row in rows)
    listed = json.loads(run(environment, "dead-letters", "list", "--model", MODEL, "--json")[1])
    assert {row["job"]: row["record_exists"] for row in listed} == {first: True, second: True}

    unknown = f"gen_{MODEL}.0_{'0' * 32}"
    code, out, err = run(environment, "dead-letters", "retry", first, unknown, "gen_*")
    assert (code, err) == (1, f"{unknown}: No dead letter has this id.\ngen_*: No dead letter has this id.\n")
    old, new = out.split(" -> ")
    assert old == first
    status = status_of(environment, new.strip())
    assert (status["state"], status["seed"]) == ("queued", 7)
    assert run(environment, "dead-letters", "drop", "--all") == (0, f"dropped {second}\n", "")
    assert run(environment, "dead-letters", "retry", "--all", "--model", MODEL) == (0, "", "")


def jobs_of(store: redis.Redis) -> set[str]:
    """The ids of all jobs of the model."""
    keys = store.scan_iter(match=f"gp:{{{MODEL}:0}}:job:*", count=1000)
    return {f"gen_{MODEL}.0_{key.decode().rpartition(':')[2]}" for key in keys}


def test_check_audits_the_live_state(environment: dict[str, str], server: StateServer) -> None:
    """Exit code 0 and one line when all is well; 1, the invariant and the job when it is not."""
    job = submitted(environment)
    assert run(environment, "check")[:2] == (0, "No violation.\n")
    client = connect(server.url, max_connections=1)
    client.delete("gp:{tiny:0}:backlog")
    client.connection_pool.disconnect()
    code, out, _ = run(environment, "check")
    assert code == 1
    assert out.startswith(f"I1  {job.rpartition('_')[2]}  no worker can reach the job")
    code, out, _ = run(environment, "check", "--json")
    assert (code, json.loads(out)[0]["invariant"]) == (1, "I1")
