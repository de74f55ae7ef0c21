"""`genpool up` while its catalogue changes: workers come and go by it, and nobody else is disturbed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_up import Up
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

LATE = '[models.late]\nsource = "random:2"\n'
#: Not there.
LAME = '[models.lame]\nsource = "nowhere.gguf"\n'
TWICE = "[models.tiny]\nreplicas = 2\n"


def reload(up: Up, tables: str) -> dict[str, Any]:
    """Have the configuration file hold these tables, and be read again; what is answered."""
    (up.folder.parent / "genpool.toml").write_text(tables)
    status, body = up.ask("POST", "/v1/admin/settings/reload")
    assert status == 200, body
    answer: dict[str, Any] = json.loads(body)
    return answer


def workers(up: Up, model: str) -> list[int]:
    """Processes of workers of the model."""
    return up.children(f" -Q {model} ")


def answers(up: Up, model: str) -> bool:
    """Whether a request is answered."""
    body = {"model": model, "input": "Hello", "max_output_tokens": 2, "temperature": 0}
    return up.ask("POST", "/v1/responses", body)[0] == 200


def test_workers_come_and_go_with_the_catalogue(tmp_path: Path) -> None:
    """A model that is added is served, also beside one that cannot be; more replicas are started and fewer stopped; the
    workers of what is removed end. The first worker is the same process throughout."""
    up = Up(tmp_path)
    try:
        first = workers(up, "tiny")
        assert len(first) == 1
        assert sorted(reload(up, LAME + LATE)["added"]) == ["lame", "late"]
        wait_until(lambda: answers(up, "late"), description="the new model to answer", timeout_s=60)
        wait_until(
            lambda: any("worker lame ended with" in line for line in list(up.lines)),
            description="the one that cannot be loaded to be told of",
            timeout_s=60,
        )
        late = workers(up, "late")
        assert len(late) == 1 and workers(up, "tiny") == first

        assert reload(up, LATE + TWICE)["changed_fields"] == {"tiny": ["replicas"]}
        wait_until(lambda: len(workers(up, "tiny")) == 2, description="the second replica", timeout_s=30)
        wait_until(lambda: not workers(up, "lame"), description="the failing worker to be let go", timeout_s=30)
        assert workers(up, "late") == late

        assert reload(up, "")["removed"] == ["late"]
        wait_until(lambda: not workers(up, "late"), description="the removed model's worker to end", timeout_s=30)
        wait_until(lambda: workers(up, "tiny") == first, description="the second replica to end", timeout_s=30)
        assert not answers(up, "late") and answers(up, "tiny")
        assert not any("worker tiny ended" in line for line in list(up.lines))
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(timeout=60) == 0
    finally:
        up.end()
