"""The engines by backend name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from pool.errors import ConfigurationError
from pool.settings import ModelSettings
from tasks.ports import Engine
from workers.engines.gguf_model import read_gguf
from workers.engines.llama_cpp_model import load_llama_cpp
from workers.engines.numpy_llama import NumpyLlama
from workers.engines.tiny import tiny_llama

#: Threads of an engine whose settings name no number, where there are as many cores.
MAX_DEFAULT_THREADS = 4

_RANDOM = re.compile(r"random:([0-9]{1,9})")


def is_random(source: str) -> bool:
    """Whether a model's `source` asks for generated weights, so that no file is needed."""
    return source.startswith("random:")


def load_engine(name: str, settings: ModelSettings, *, weights: Path | None) -> Engine:
    """Load the model `name` in this process. `weights`: its file, already resolved; None for `random:SEED`.

    Raises ConfigurationError for an unknown backend, a malformed source, or a file the engine cannot run.
    """
    load = BACKENDS.get(settings.backend)
    if load is None:
        raise ConfigurationError(f"Model {name}: no engine is called {settings.backend!r}.", param="backend")
    return load(name, settings, weights)


def _cores() -> int:
    """Cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not every system has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _threads(settings: ModelSettings) -> int:
    return settings.threads or min(MAX_DEFAULT_THREADS, _cores())


def _load_numpy(name: str, settings: ModelSettings, weights: Path | None) -> Engine:
    if is_random(settings.source):
        seed = _RANDOM.fullmatch(settings.source)
        if seed is None:
            raise ConfigurationError(
                f"Model {name}: a random source is random:SEED, SEED up to 9 digits.", param="source"
            )
        model = tiny_llama(int(seed[1]))
    elif weights is None:
        raise ConfigurationError(f"Model {name}: no weights for {settings.source!r}.", param="source")
    else:
        model = read_gguf(weights)
    return NumpyLlama(
        *model,
        threads=_threads(settings),
        kv_bytes=settings.kv_budget_bytes,
        exact=settings.exact,
    )


def _load_llama_cpp(name: str, settings: ModelSettings, weights: Path | None) -> Engine:
    if weights is None:
        raise ConfigurationError(
            f"Model {name}: llama.cpp runs GGUF files; {settings.source} is for the backend numpy.", param="source"
        )
    return load_llama_cpp(name, settings, weights, threads=_threads(settings))


#: How each backend of the settings is loaded. A program may put its own in before it starts a worker in its process.
BACKENDS: dict[str, Callable[[str, ModelSettings, Path | None], Engine]] = {
    "numpy": _load_numpy,
    "llama_cpp": _load_llama_cpp,
}
