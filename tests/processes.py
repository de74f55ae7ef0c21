"""Processes and ports in tests."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process lives. One that has ended but was not yet collected by its parent counts as ended; one whose
    first thread has ended before the others does not: its parent cannot collect it yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        if stat.read_text().rpartition(")")[2].split()[0] not in ("Z", "X"):
            return True
        return len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except OSError:
        return not Path("/proc/self").exists()  # without /proc, the signal's answer is the best there is


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descendants(pid: int) -> dict[int, str]:
    """Processes below `pid` and their command lines (Linux: read from /proc)."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended while we looked
    below = {pid}
    found: dict[int, str] = {}
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        found |= {child: _command_line(child) for child in below}
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""
