"""A genpool worker as it is shipped, except for its engine: `python -m benchmarks.noop_worker -Q noop ...`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.noop_engine import NoopEngine
from pool.settings import ModelSettings
from tasks.celery import app
from tasks.ports import Engine
from workers.engines import BACKENDS


def load(name: str, settings: ModelSettings, weights: Path | None) -> Engine:  # noqa: ARG001 - a backend's signature
    """The engine of any model of this process."""
    return NoopEngine()


if __name__ == "__main__":
    # The names of backends are fixed by the settings' schema, so this one takes the place of a real one, here only.
    BACKENDS["numpy"] = load
    app.worker_main(["worker", *sys.argv[1:]])
