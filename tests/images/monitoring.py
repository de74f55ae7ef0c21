"""The compose file's Prometheus, run for a test: its own configuration, with other addresses and shorter intervals."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.debian_programs import NotToBeHad, unpack
from tests.processes import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "genpool.json"
#: What Grafana puts for the dashboard's variables, as wide as a test needs.
VARIABLES = {"$model": ".+", "$__rate_interval": "30s"}


@dataclass(frozen=True)
class Query:
    """One query of the dashboard. `title`: its panel's."""

    title: str
    legend: str
    expression: str

    @property
    def filled(self) -> str:
        """The expression as Prometheus gets it."""
        text = self.expression
        for name, value in VARIABLES.items():
            text = text.replace(name, value)
        return text


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, without the headings."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries() -> list[Query]:
    """All queries of all panels."""
    return [Query(p["title"], t["legendFormat"], t["expr"]) for p in panels() for t in p["targets"]]


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=20)

    def ready(self) -> bool:
        """Whether it answers."""
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def targets(self) -> list[dict[str, Any]]:
        """What it scrapes."""
        found: list[dict[str, Any]] = self._http.get("/api/v1/targets").json()["data"]["activeTargets"]
        return found

    def values(self, expression: str) -> list[float]:
        """The values of all series that an expression has now; fails the test for a wrong expression."""
        answer = self._http.post("/api/v1/query", data={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        return [float(series["value"][1]) for series in answer["data"]["result"]]

    def close(self) -> None:
        """Let go of its connections."""
        self._http.close()


def configuration(targets: list[str], key_file: Path) -> str:
    """docker/prometheus/prometheus.yml for a system of this machine, a scrape each second."""
    given = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    given["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
    (job,) = given["scrape_configs"]
    assert job.pop("dns_sd_configs")
    assert job["authorization"].pop("credentials_file") == "/run/secrets/metrics_key"
    job["authorization"]["credentials_file"] = str(key_file)
    job["static_configs"] = [{"targets": targets}]
    text: str = yaml.safe_dump(given)
    return text


@contextmanager
def prometheus(folder: Path, targets: list[str], key_file: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes these; skips the test where none can be had."""
    try:
        program = unpack("prometheus", ("prometheus",), "usr/bin/prometheus")
    except NotToBeHad as missing:
        pytest.skip(f"no Prometheus: {missing}")
    file = folder / "prometheus.yml"
    file.write_text(configuration(targets, key_file), encoding="utf-8")
    port = free_port()
    argv = [str(program), f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*argv, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_until(server.ready, description="Prometheus", timeout_s=30)
        yield server
    finally:
        server.close()
        process.terminate()
        process.wait(20)
