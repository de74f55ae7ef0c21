"""Engines for the tests: the tiny one, one with wide heads, SmolLM2 from the model cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pool.settings import ModelSettings
from tasks.ports import Engine
from tests.engine.small_model import BYTES_PER_TOKEN, CONTEXT, write_small_model
from workers.engines import load_engine
from workers.engines.llama_cpp_engine import LlamaCpp
from workers.engines.numpy_llama import NumpyLlama
from workers.engines.tiny import TINY, tiny_llama
from workers.weights import ensure_weights

SMOLLM2 = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Workload:
    """How much an engine is given in the contract's tests: prompts of `lengths`, `tokens` generated each, `rooms`
    sessions at once; two prompts of `long` lengths; a prompt of `shared` tokens that others begin with."""

    lengths: tuple[int, ...]
    tokens: int
    rooms: tuple[int, ...]
    long: tuple[int, int]
    shared: int = 150


#: Every engine that must keep the contract, by the fixture that loads it: around the grid and the borders of pages.
WORKLOADS = {
    "tiny": Workload((1, 15, 16, 17, 33, 64, 70, 100, 129, 250, 5, 48), 24, (2, 8, 16), (520, 1960)),
    "wide": Workload((1, 16, 17, 63, 64, 65, 127, 128, 129, 200), 12, (2, 8), (700, 1990)),
    "smollm2": Workload((1, 17, 40), 3, (8,), (63, 130)),
    "llama_small": Workload((1, 15, 16, 17, 33, 64, 70, 100, 129, 250, 5, 48), 24, (2, 8, 16), (520, 1960)),
    "llama_smollm2": Workload((1, 16, 17, 40), 4, (2, 8), (63, 130)),
}


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2's GGUF file; downloaded once for this machine."""
    return ensure_weights(SMOLLM2)


@pytest.fixture(scope="session")
def tiny() -> Engine:
    return load_engine("tiny", ModelSettings(source="random:7"), weights=None)


@pytest.fixture(scope="session")
def wide() -> Engine:
    """Heads of SmolLM2's size, three to a KV head, and little else."""
    config = replace(TINY, layers=2, width=128, heads=6, kv_heads=2, head_dim=64, ffn_width=64)
    return NumpyLlama(*tiny_llama(7, config))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[Engine]:
    settings = ModelSettings(source=SMOLLM2, kv_budget_bytes=256 * 2**20)
    engine = load_engine(SMOLLM2, settings, weights=smollm2_path)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model in Q4_0."""
    return write_small_model(tmp_path_factory.mktemp("model") / "small.gguf")


@pytest.fixture(scope="session")
def llama_small(small_path: Path) -> Iterator[Engine]:
    """llama.cpp with the small model."""
    engine = load_llama(small_path, slots=20, slot_tokens=CONTEXT, bytes_per_token=BYTES_PER_TOKEN)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def llama_smollm2() -> Iterator[Engine]:
    """llama.cpp with SmolLM2, requantised."""
    engine = load_llama(ensure_weights(f"{SMOLLM2}:q4_0"), slots=12, slot_tokens=512, bytes_per_token=23_040)
    yield engine
    engine.close()


def load_llama(path: Path, *, slots: int, slot_tokens: int, bytes_per_token: int, **settings: Any) -> LlamaCpp:
    """llama.cpp with so many slots of so many positions, of which all but two are for running sessions."""
    chosen: dict[str, Any] = {
        "target_inflight": slots - 2,
        "kept_prefixes": 2,
        "kv_budget_bytes": slots * slot_tokens * bytes_per_token,
        "threads": 1,
    }
    model = ModelSettings(backend="llama_cpp", source=str(path), **(chosen | settings))
    engine = load_engine("llama", model, weights=path)
    assert isinstance(engine, LlamaCpp)
    return engine


def load_small(path: Path, *, slots: int = 6, **settings: Any) -> LlamaCpp:
    """A small model in slots of 512 positions."""
    return load_llama(path, slots=slots, slot_tokens=512, bytes_per_token=BYTES_PER_TOKEN, **settings)


@pytest.fixture
def small(small_path: Path) -> Iterator[LlamaCpp]:
    """An engine of this test's own: six slots of 512 positions."""
    engine = load_small(small_path)
    yield engine
    engine.check_integrity()
    engine.close()


@pytest.fixture(params=list(WORKLOADS))
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def workload(engine_name: str) -> Workload:
    return WORKLOADS[engine_name]


@pytest.fixture
def engine(request: pytest.FixtureRequest, engine_name: str) -> Iterator[Engine]:
    """An engine of `WORKLOADS`, shared by all tests; the sessions `a` to `d`, epochs 0 to 2, and the holder `h` are the
    test's own and gone before the next. Whoever leaves others behind fails."""
    loaded: Engine = request.getfixturevalue(engine_name)
    yield loaded
    for session in ("a", "b", "c", "d"):
        for epoch in range(3):
            loaded.release(session, epoch)
    loaded.unpin("h")
    loaded.check_integrity()
    usage = loaded.kv_usage()
    assert (usage.held, usage.pinned) == (0, 0)
