"""Fixtures for fault cases: whole systems of real processes, ended with their test or their module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system import System

StartSystem = Callable[..., System]


@pytest.fixture
def start_system(tmp_path: Path) -> Iterator[StartSystem]:
    """Start systems; the options are those of `System`. They end with the test."""
    yield from _starter(tmp_path)


@pytest.fixture(scope="module")
def start_shared_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartSystem]:
    """The same for systems that outlive their test: they end with the module."""
    yield from _starter(tmp_path_factory.mktemp("shared"))


def _starter(folder: Path) -> Iterator[StartSystem]:
    systems: list[System] = []

    def start(**options: Any) -> System:
        system = System(folder / f"system-{len(systems)}", **options)
        systems.append(system)
        system.start()
        return system

    yield start
    for system in systems:
        system.close()
