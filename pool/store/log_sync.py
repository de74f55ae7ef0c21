"""The embedded server's append-only file, brought to the disk once a second from here.

A server that does this itself (`appendfsync everysec`) keeps what it writes in its own memory while an fsync is under
way, up to two seconds, and confirms it all the same: a kill of that process loses confirmed writes. One that never
syncs hands each write to the kernel before it confirms it, so a kill loses nothing; what the kernel has reaches the
disk from here.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

log = logging.getLogger("genpool.state")

EVERY_S = 1.0
#: `fdatasync` is not everywhere; it spares the write of the file's times.
_sync = getattr(os, "fdatasync", os.fsync)


class LogSync:
    """A thread that syncs the append-only files of a server's `folder`; nothing happens while they do not grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "appendonlydir"
        self._synced: dict[str, int] = {}
        self._failing = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="genpool-log-sync", daemon=True)

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    def stop(self) -> None:
        """Sync what there is, and end the thread."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self._attempt()
        self._attempt()

    def _attempt(self) -> None:
        try:
            self.sync()
        except OSError as error:
            if not self._failing:
                log.error("the append-only file cannot be brought to the disk: %s; trying again", error.strerror)
            self._failing = True
        else:
            self._failing = False

    def sync(self) -> list[str]:
        """Bring to the disk what the files have grown by; names of those that had. Raises OSError."""
        sizes = {path.name: path.stat().st_size for path in self._folder.glob("*.aof")}
        grown = [name for name, size in sizes.items() if self._synced.get(name) != size]
        for name in grown:
            fd = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _sync(fd)
            finally:
                os.close(fd)
        self._synced = sizes
        return grown
