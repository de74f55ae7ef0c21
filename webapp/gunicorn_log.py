"""gunicorn's log, without what an exception says: libraries' messages may quote a prompt, a header, a key."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

from gunicorn.glogging import Logger

from pool.errors import GenpoolError


class Log(Logger):  # type: ignore[misc]  # gunicorn ships no types
    """Tells kind and place of an exception; its words only where they are ours, or of the import system. What genpool
    itself logs goes the same way, in the same form."""

    def setup(self, cfg: Any) -> None:
        """Open the log as gunicorn is configured; also after each reload."""
        super().setup(cfg)
        ours = logging.getLogger("genpool")
        ours.handlers = list(self.error_log.handlers)
        ours.setLevel(self.loglevel)

    def exception(self, msg: str, *args: Any, **_: Any) -> None:
        """Log the exception that is being handled."""
        error = sys.exc_info()[1]
        said = f": {error}" if isinstance(error, GenpoolError | ImportError) else ""
        place = "".join(traceback.format_tb(error.__traceback__)) if error is not None else ""
        self.error(msg, *args)
        self.error("%s%s\n%s", type(error).__name__, said, place)
