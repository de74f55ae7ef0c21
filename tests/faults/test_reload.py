"""The models of the configuration file are read again while everything runs: every process follows, or says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.conftest import StartSystem
from tests.system import ROOT, SCRIPTED, TINY, Part, System
from tests.waiting import wait_until


@pytest.fixture
def system(start_system: StartSystem) -> System:
    """Two nodes of two processes, and a worker that also consumes the queue of a model to come."""
    system = start_system(apis=2, workers=0, sections={"server": {"processes": 2}})
    worker = system.worker_part(0)
    worker.argv[worker.argv.index(SCRIPTED)] = f"{SCRIPTED},other"
    system.workers.append(worker)
    worker.start()
    system.await_worker(worker)
    return system


def post(system: System, path: str, *, api: int = 0, **body: Any) -> httpx.Response:
    """To a node, over a connection of its own: any of its processes may answer."""
    return httpx.post(f"{system.api_url(system.apis[api])}{path}", json=body, timeout=30)


def ready(system: System, api: int) -> dict[str, Any]:
    """What a process of a node says."""
    found: dict[str, Any] = httpx.get(f"{system.api_url(system.apis[api])}/readyz", timeout=30).json()
    return found


def queues(system: System) -> list[str]:
    """The models whose queues a node shows."""
    answer = httpx.get(f"{system.api_url(system.apis[0])}/v1/admin/queues", timeout=30)
    return [each["model"] for each in answer.json()["data"]]


def file_of(system: System, part: Part) -> Path:
    """A part's configuration file."""
    return system.folder / f"{part.name}.toml"


def edit(system: System, *parts: Part, add: str) -> None:
    """Add lines to the files of these parts."""
    for part in parts:
        with file_of(system, part).open("a") as file:
            file.write(add)


def standings(system: System, api: int) -> set[tuple[int, str | None]]:
    """Version and error of both processes of a node, over some tries."""
    found = [ready(system, api).get("catalogue", {}) for _ in range(12)]
    return {(each["version"], each["error"]) for each in found if each}


def stands(system: System, api: int, version: int, error: str | None = None) -> None:
    """Wait until both processes of a node say so."""
    wait_until(lambda: standings(system, api) == {(version, error)}, description=f"node {api}: {error}", timeout_s=60)


def facts(system: System) -> Mapping[str, Any]:
    """What the worker tells."""
    return system.ranks()[0].facts


@pytest.mark.timeout(240)
def test_every_process_follows_or_says_why_not(system: System) -> None:
    """A new model is served by the worker that was waiting for it; a file that differs or is broken leaves its process
    with the models it had, until it is mended; a broken file of the asked node changes nothing anywhere."""
    api, other, worker = *system.apis, system.workers[0]
    assert post(system, "/v1/responses", model="other", input="say x").status_code == 404
    edit(system, api, other, worker, add='[models.other]\nsource = "random:1"\n')
    answer = post(system, "/v1/admin/settings/reload").json()
    assert (answer["added"], answer["removed"], answer["updated"]) == (["other"], [], [])
    assert set(answer["unchanged"]) >= {SCRIPTED, TINY} and answer["needs_restart"] == []
    version = answer["version"]
    for node in (0, 1):
        stands(system, node, version)
    wait_until(lambda: facts(system)["catalogue_version"] == version, description="the worker to follow", timeout_s=30)
    wait_until(lambda: system.ranks("other"), description="the new model to be loaded", timeout_s=60)
    served = post(system, "/v1/responses", api=1, model="other", input="say x", max_output_tokens=1)
    assert served.status_code == 200, served.text
    assert "other" in queues(system), "what waits of it is shown, too"

    # Nodes differ; one's file is broken.
    text = file_of(system, api).read_text()
    changed = text.replace('[models.other]\nsource = "random:1"\n', "").replace("threads = 64", "threads = 65")
    changed = changed.replace("[models.tiny]\n", "[models.tiny]\ndrain_timeout_seconds = 1\n")
    file_of(system, api).write_text(changed)
    file_of(system, worker).write_text("[models.other\n")
    answer = post(system, "/v1/admin/settings/reload").json()
    assert (answer["removed"], answer["updated"], answer["version"]) == (["other"], [TINY], version + 1)
    assert answer["changed_fields"] == {TINY: ["drain_timeout_seconds"]}
    assert answer["needs_restart"] == ["server.threads"]
    wait_until(
        lambda: facts(system)["catalogue_error"] == "catalogue_invalid", description="the worker's error", timeout_s=30
    )
    stands(system, 1, version, "catalogue_differs")
    assert system.ranks("other"), "it serves what it had"
    assert post(system, "/v1/responses", api=1, model="other", input="say x", max_output_tokens=1).status_code == 200
    assert post(system, "/v1/responses", model="other", input="say x").status_code == 404
    for part in (other, worker):
        file_of(system, part).write_text(changed)
    stands(system, 1, version + 1)
    wait_until(lambda: not system.ranks("other"), description="the worker to leave a removed model", timeout_s=30)
    assert "other" in queues(system), "what a removed model holds must end, too"

    # Nothing of a broken file is taken over.
    edit(system, api, add="[models.bad]\nsource = 3\n")
    refused = post(system, "/v1/admin/settings/reload")
    assert refused.status_code == 400 and "models.bad.source" in refused.json()["error"]["message"]
    assert standings(system, 0) == {(version + 1, None)}
    file_of(system, api).write_text(changed)
    system.assert_recovered()


def test_the_command_line_loads_unloads_and_reloads(start_system: StartSystem) -> None:
    """Straight from the state server; it waits for what it asked, and lists states."""
    system = start_system(workers=1)

    def run(*arguments: str, code: int = 0) -> str:
        environment = {**os.environ, "GENPOOL_CONFIG": str(file_of(system, system.apis[0])), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "genpool", "models", *arguments],
            cwd=system.folder, env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    assert run("unload", SCRIPTED, "--drain-timeout", "5") == f"{SCRIPTED}: unloaded\n"
    assert {row["id"]: row["state"] for row in json.loads(run("list", "--json"))}[SCRIPTED] == "unloaded"
    assert run("load", SCRIPTED) == f"{SCRIPTED}: loaded\n"
    assert "No model of this name" in run("load", "nowhere", code=1)
    edit(system, system.apis[0], system.workers[0], add='[models.other]\nsource = "random:1"\n')
    changes = json.loads(run("reload"))
    assert (changes["added"], changes["removed"], changes["updated"]) == (["other"], [], [])
    assert "needs_restart" not in changes, "it cannot know with what the others began"
    wait_until(lambda: "other" in ready(system, 0)["models"], description="the node to follow", timeout_s=30)
    system.assert_recovered()
