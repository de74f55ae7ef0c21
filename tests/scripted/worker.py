"""A genpool worker as it is shipped, except for its engine: `python -m tests.scripted.worker -Q MODEL ...`.

The model `tiny` keeps its real engine; every other one is scripted. SCRIPTED_LOG names the log file, SCRIPTED_DELAY_MS
how long a step takes, SCRIPTED_CONTEXT how many tokens a session holds, SCRIPTED_BLOCK how many a block of it,
SCRIPTED_SESSIONS, if it is there, how many generations the engine runs at once at most. As long as the file
SCRIPTED_LOAD is there, a load waits, or fails with what the file says.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from celery.__main__ import main

from pool.settings import ModelSettings
from tasks.ports import Engine
from tests.scripted.engine import ScriptedEngine
from workers.engines import BACKENDS

_REAL = BACKENDS["numpy"]


def load(name: str, settings: ModelSettings, weights: Path | None) -> Engine:
    """The engine of a model of this process."""
    if name == "tiny":
        return _REAL(name, settings, weights)
    told = Path(os.environ["SCRIPTED_LOAD"])
    while told.exists() and not told.read_text():
        time.sleep(0.02)
    if told.exists():
        raise RuntimeError(told.read_text())
    return ScriptedEngine(
        delay_ms=float(os.environ["SCRIPTED_DELAY_MS"]),
        log_path=Path(os.environ["SCRIPTED_LOG"]),
        context_length=int(os.environ["SCRIPTED_CONTEXT"]),
        block_tokens=int(os.environ["SCRIPTED_BLOCK"]),
        max_sessions=int(os.environ.get("SCRIPTED_SESSIONS", "4096")),
    )


if __name__ == "__main__":
    # The names of backends are fixed by the settings' schema, so this one takes the place of a real one, here only.
    BACKENDS["numpy"] = load
    # As `celery` does it: `app.worker_main` would lose the exit code.
    sys.argv[1:1] = ["-A", "tasks", "worker"]
    main()
