"""What can run a model, by the name of its backend."""

from __future__ import annotations

from collections.abc import Callable

from pool.settings import ModelSettings
from tasks.config import Settings
from workers.backends.in_process import open_in_process
from workers.backends.remote import open_remote
from workers.backends.remote import parts_of as parts_of
from workers.backends.served import Served


def open_backend(
    name: str, model: ModelSettings, settings: Settings, limit: int, part: int, is_wanted: Callable[[], bool]
) -> Served:
    """Load the model `name`, or reach the server that runs it; blocks until it can serve. `model`: its settings as they
    are now; `limit`: generations in flight at most; `part`: which of its ranks in this process.

    Raises ConfigurationError, or what else keeps it from serving; early, where it `is_wanted` no more.
    """
    if model.is_remote:
        return open_remote(name, model, settings, limit, part, is_wanted)
    return open_in_process(name, model, settings, limit)
