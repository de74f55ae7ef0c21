"""What can run a model, by the name of its backend."""

from __future__ import annotations

from tasks.config import Settings
from workers.backends.in_process import open_in_process
from workers.backends.served import Served


def open_backend(name: str, settings: Settings, limit: int) -> Served:
    """Load the model `name`, or reach the server that runs it; blocks until it can serve. `limit`: generations in
    flight at most. Raises ConfigurationError, or what else keeps it from serving."""
    return open_in_process(name, settings, limit)
