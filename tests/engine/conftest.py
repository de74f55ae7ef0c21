"""Engines for the tests: the tiny one, and SmolLM2 from the model cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pool.settings import ModelSettings
from tasks.ports import Engine
from workers.engines import load_engine
from workers.weights import ensure_weights

SMOLLM2 = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2's GGUF file; downloaded once for this machine."""
    return ensure_weights(SMOLLM2)


@pytest.fixture(scope="session")
def tiny() -> Engine:
    return load_engine("tiny", ModelSettings(source="random:7"), weights=None)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[Engine]:
    engine = load_engine(SMOLLM2, ModelSettings(source=SMOLLM2), weights=smollm2_path)
    yield engine
    engine.close()


@pytest.fixture(params=["tiny", "smollm2"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Every engine that must keep the contract. Engines are shared by all tests; the sessions `a` to `d`, epochs 0 to
    2, are the test's own and gone before the next."""
    loaded: Engine = request.getfixturevalue(request.param)
    yield loaded
    for session in ("a", "b", "c", "d"):
        for epoch in range(3):
            loaded.release(session, epoch)
