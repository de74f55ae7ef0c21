"""KV that has left its engine, by holder: in memory, and on disk what has no place there. Each within its budget.

The engine's thread owns all of it. Files are written and read by a thread of their own, one at a time, so no step waits
for a disk. What is unused longest leaves memory for the disk, and the disk for nowhere.

A file has no name: the system forgets it with the process, however that ends, and nobody else can open it.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pool.errors import ConfigurationError
from pool.rules.kv_blocks import IntegrityError
from pool.rules.offloading import Pace
from tasks.ports import Kept

log = logging.getLogger("genpool.loop")

#: Each takes one of the process's file descriptors.
MAX_FILES = 256
#: Some systems cannot make a file without a name: then it has one for a moment, in which its process may die.
_LEFTOVERS, _LEFTOVER_S = "genpool-*.kv", 60.0


@dataclass(frozen=True, slots=True)
class OffloadBudget:
    """`memory_bytes` and `disk_bytes`: 0 for none; `folder`: where files are; `retention_s`: how long anything stays
    that nobody asks for."""

    memory_bytes: int = 0
    disk_bytes: int = 0
    folder: Path | None = None
    retention_s: float = 1800.0

    def __bool__(self) -> bool:
        return self.memory_bytes > 0 or self.disk_bytes > 0


@dataclass(slots=True, eq=False)
class Offloaded:
    """What was kept for a holder. It is in memory where it has a `blob`, on disk where it has a `file`; while it is
    read or written, both. `failed`: it could not be written."""

    kept: Kept
    size: int
    used_s: float
    blob: bytes | None
    file: IO[bytes] | None = None
    failed: bool = False


class OffloadStore:
    """`wake` is called from another thread when a file was written or read. Raises ConfigurationError for a folder that
    cannot be used."""

    def __init__(self, budget: OffloadBudget, *, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self.budget = budget
        #: How fast bytes go to and from the disk.
        self.disk_pace = Pace()
        #: How many were given up: for others, for their age, or for a disk that took them not.
        self.dropped = 0
        #: How many could not be read again.
        self.unreadable = 0
        self._clock = clock
        self._wake = wake
        #: The longest unused first.
        self._entries: OrderedDict[str, Offloaded] = OrderedDict()
        self._tasks: list[tuple[Offloaded, Future[tuple[IO[bytes], bytes | None, float]]]] = []
        self._disk: ThreadPoolExecutor | None = None
        if budget.disk_bytes:
            self._prepare_folder()

    def _prepare_folder(self) -> None:
        folder = self.budget.folder
        if folder is None:
            raise ConfigurationError("offload_disk_bytes needs a folder.", param="offload_disk_bytes")
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for leftover in folder.glob(_LEFTOVERS):
                # Another process that starts may be faster.
                with suppress(FileNotFoundError):
                    if time.time() - leftover.stat().st_mtime > _LEFTOVER_S:
                        leftover.unlink()
        except OSError as error:
            raise ConfigurationError(
                f"offload_disk_bytes: {folder} cannot be used: {error.strerror}.", param="offload_disk_bytes"
            ) from None

    # -- what is there -----------------------------------------------------------------------------------------------

    def get(self, holder: str) -> Offloaded | None:
        """What was kept for a holder."""
        return self._entries.get(holder)

    def holders(self) -> frozenset[str]:
        """Those of whom there is anything."""
        return frozenset(self._entries)

    @property
    def memory_bytes(self) -> int:
        """In memory, what is being written or was just read included."""
        return sum(entry.size for entry in self._entries.values() if entry.blob is not None)

    @property
    def disk_bytes(self) -> int:
        """On disk."""
        return sum(entry.size for entry in self._entries.values() if entry.file is not None)

    # -- in ----------------------------------------------------------------------------------------------------------

    def room_for(self, size: int) -> bool | None:
        """Make room for so many bytes. None: not yet, files are being written; ask again. False: there never is."""
        if size > max(self.budget.memory_bytes, self.budget.disk_bytes):
            return False
        if self._tasks:
            return None
        if size > self.budget.memory_bytes:
            self._forget_read()
            return True
        while self.memory_bytes + size > self.budget.memory_bytes:
            holder, entry = next(item for item in self._entries.items() if item[1].blob is not None)
            if entry.file is not None:
                entry.blob = None
            elif entry.size <= self.budget.disk_bytes:
                self._write(entry)
                return None
            else:
                self._give_up(holder)
        return True

    def put(self, holder: str, kept: Kept) -> Offloaded:
        """Take what `room_for` has made room for, in place of what was there; it is safe at once, or when it is
        written."""
        self.drop(holder)
        entry = Offloaded(kept, len(kept.blob), self._clock(), kept.blob)
        # Its bytes belong to the entry, which may forget them.
        entry.kept = Kept(kept.scope, kept.tokens, b"")
        self._entries[holder] = entry
        if entry.size > self.budget.memory_bytes:
            self._write(entry)
        return entry

    def is_safe(self, entry: Offloaded) -> bool:
        """Whether it is where it may stay, so that the engine need not hold it any more."""
        return not entry.failed and (entry.file is not None or entry.size <= self.budget.memory_bytes)

    def touch(self, holder: str) -> None:
        """Somebody asks for it."""
        entry = self._entries.get(holder)
        if entry is not None:
            entry.used_s = self._clock()
            self._entries.move_to_end(holder)

    # -- out ---------------------------------------------------------------------------------------------------------

    def fetch(self, holder: str) -> Kept | None:
        """All of it, with its bytes. None: it is being read, ask again."""
        entry = self._entries[holder]
        self.touch(holder)
        if entry.blob is not None:
            return Kept(entry.kept.scope, entry.kept.tokens, entry.blob)
        if entry not in [busy for busy, _ in self._tasks]:
            self._forget_read()
            assert entry.file is not None
            self._start(entry, _read, entry.file)
        return None

    def _forget_read(self) -> None:
        """Of what was read of files, one is in memory at a time."""
        for entry in self._entries.values():
            if entry.file is not None:
                entry.blob = None

    def drop(self, holder: str) -> None:
        """Forget it. Idempotent."""
        entry = self._entries.pop(holder, None)
        if entry is not None:
            self._close(entry)

    def _close(self, entry: Offloaded) -> None:
        """Let its file go, unless that is in use: then it goes when the task has ended."""
        if entry.file is not None and entry not in [busy for busy, _ in self._tasks]:
            entry.file.close()

    def _give_up(self, holder: str) -> None:
        self.dropped += 1
        self.drop(holder)

    # -- files -------------------------------------------------------------------------------------------------------

    def _write(self, entry: Offloaded) -> None:
        """Begin to write it. What is on disk gives way to it, the longest unused first."""
        on_disk = [holder for holder, other in self._entries.items() if other.file is not None]
        while on_disk and (self.disk_bytes + entry.size > self.budget.disk_bytes or len(on_disk) >= MAX_FILES):
            self._give_up(on_disk.pop(0))
        assert self.budget.folder is not None and entry.blob is not None
        self._start(entry, _write, self.budget.folder, entry.blob)

    def _start(
        self, entry: Offloaded, work: Callable[..., tuple[IO[bytes], bytes | None, float]], *arguments: object
    ) -> None:
        if self._disk is None:
            self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="genpool-offload")
        task = self._disk.submit(work, *arguments)
        self._tasks.append((entry, task))
        task.add_done_callback(lambda _: self._wake())

    def poll(self) -> bool:
        """Take note of what was written and read, and of what has become too old; whether there was any."""
        # Each is asked once: one that ends just now is either done or not, never neither.
        done = [busy for busy in self._tasks if busy[1].done()]
        self._tasks = [busy for busy in self._tasks if busy not in done]
        for entry, task in done:
            self._settle(entry, task)
        return self._expire() or bool(done)

    def _settle(self, entry: Offloaded, task: Future[tuple[IO[bytes], bytes | None, float]]) -> None:
        holder = next((holder for holder, known in self._entries.items() if known is entry), None)
        try:
            file, blob, took_s = task.result()
        except Exception as error:  # noqa: BLE001 - a full disk must not end the loop; the prompt is computed again
            log.warning("offloaded KV of %s could not be written or read: %s", holder, type(error).__name__)
            self._fail(holder, entry)
            return
        self.disk_pace.learn(entry.size, took_s)
        entry.file, entry.blob = file, blob
        if holder is None:
            self._close(entry)

    def _fail(self, holder: str | None, entry: Offloaded) -> None:
        self.unreadable += entry.file is not None
        self.dropped += entry.file is None and self.is_safe(entry)
        entry.failed = True
        if holder is None:
            self._close(entry)
        else:
            self.drop(holder)

    def _expire(self) -> bool:
        """What nobody has asked for in a long time goes; it is in front."""
        before = self.dropped
        while self._entries:
            holder, entry = next(iter(self._entries.items()))
            if self._clock() - entry.used_s <= self.budget.retention_s:
                break
            self._give_up(holder)
        return self.dropped > before

    # -- the end -----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises IntegrityError when more is there than the budgets allow, or is nowhere. A single one more may be in
        memory while it is written, or read for a session that is about to begin."""
        entries = self._entries.values()
        largest = max((entry.size for entry in entries), default=0)
        wrong = {
            "memory": self.memory_bytes > self.budget.memory_bytes + largest,
            "disk": self.disk_bytes > self.budget.disk_bytes,
            "places": any(entry.blob is None and entry.file is None for entry in entries),
            "files": any(entry.file is not None and entry.file.closed for entry in entries),
        }
        if any(wrong.values()):
            raise IntegrityError(f"offloaded KV: {', '.join(name for name, is_wrong in wrong.items() if is_wrong)}")

    def close(self) -> None:
        """Forget everything. Idempotent."""
        if self._disk is not None:
            self._disk.shutdown()
            self._disk = None
        self.poll()
        for holder in list(self._entries):
            self.drop(holder)


def _write(folder: Path, blob: bytes) -> tuple[IO[bytes], bytes | None, float]:
    """The file, nothing, and how long it took."""
    began_s = time.perf_counter()
    file = tempfile.TemporaryFile(dir=folder, prefix="genpool-", suffix=".kv")  # noqa: SIM115 - its entry closes it
    try:
        file.write(blob)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file, None, time.perf_counter() - began_s


def _read(file: IO[bytes]) -> tuple[IO[bytes], bytes | None, float]:
    """The file, what is in it, and how long it took."""
    began_s = time.perf_counter()
    file.seek(0)
    return file, file.read(), time.perf_counter() - began_s
