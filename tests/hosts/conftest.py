"""Fixtures for tests over several hosts; they are skipped, with the reason, where none can be made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.hosted import API, STATE, WORKERS, HostedSystem
from tests.hosts.lab import Lab, NoHosts, way


@pytest.fixture
def hosted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[HostedSystem]:
    """Four hosts, and what runs on them. Parameter: further options of the system."""
    try:
        way()
    except NoHosts as error:
        pytest.skip(str(error))
    with Lab(STATE, API, *WORKERS) as lab, HostedSystem(tmp_path / "system", lab, **request.param) as system:
        system.start()
        yield system
