"""Child processes that do not outlive their starter, not even one that was killed with SIGKILL.

On Linux the kernel kills a leashed child when its parent dies (PR_SET_PDEATHSIG, set by `leash_exec` between fork and
exec). The kernel counts the *thread* that forked as the parent, so every child is started from one thread that lives
as long as this process. Other systems have no such call: there, a starter that is killed leaves its children running.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, BinaryIO

_EXEC_SCRIPT = str(Path(__file__).with_name("leash_exec.py"))
#: In the place of a signal: see `leash_exec`.
_WITH_CHILDREN = "group"
_SPAWNER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="leash")


def spawn(
    argv: Sequence[str],
    *,
    stdout: int | IO[Any],
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    private_files: bool = False,
    with_children: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `argv` on a leash, in its own process group, without standard input; stderr goes where stdout goes.

    The process that runs `argv` has the returned object's pid, unless `with_children`: then that is a keeper's, its
    parent, which takes the whole group along when this process dies, whatever `argv` has started in it. It exits as
    `argv` does, with 128 + N for signal N. `private_files`: it creates files only its user can read.
    """
    how = _WITH_CHILDREN if with_children else str(int(signal.SIGKILL))
    command = [sys.executable, "-I", "-S", _EXEC_SCRIPT, str(os.getpid()), how, *argv]
    return _SPAWNER.submit(
        lambda: subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            pass_fds=tuple(pass_fds),
            process_group=0,
            umask=0o077 if private_files else -1,
        )
    ).result()


def open_private_log(path: Path) -> BinaryIO:
    """`path` opened for appending; a new file is readable by its user only."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab")
