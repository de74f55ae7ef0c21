"""Run as a script by `pool.store.leash`: tie this process to its parent's life, then become the wanted program.

    python -I -S leash_exec.py PARENT_PID SIGNAL PROGRAM [ARGUMENT...]
    python -I -S leash_exec.py PARENT_PID group PROGRAM [ARGUMENT...]

With `group` it does not become the program but its parent, and kills its whole process group when its own parent dies:
the kernel's signal reaches a child alone, not what that has started.

It is a process of its own, and not a `preexec_fn`, because Python code between fork and exec can deadlock a starter
that has threads. It imports next to nothing, so it costs about 15 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tie_to_parent(parent_pid: int, signal_number: int) -> None:
    """Ask the kernel for `signal_number` when the parent dies; exit at once if it already has. Linux only: elsewhere
    nothing is tied."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(1)


def keep_group(parent_pid: int) -> None:
    """Return in a child that is tied to this process; here, wait for it, and exit as it does."""
    signal.signal(signal.SIGUSR1, lambda *_: os.killpg(os.getpgrp(), signal.SIGKILL))
    # Sent to the whole group: the program decides what comes of it. A handler, as exec would keep it ignored.
    signal.signal(signal.SIGTERM, lambda *_: None)
    tie_to_parent(parent_pid, signal.SIGUSR1)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        tie_to_parent(keeper, signal.SIGKILL)
        return
    _, status = os.waitpid(child, 0)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def main() -> None:
    parent_pid, how, program = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if how == "group":
        keep_group(parent_pid)
    else:
        tie_to_parent(parent_pid, int(how))
    for number in (signal.SIGINT, signal.SIGQUIT):
        # A shell starts background commands with these ignored, and the program would inherit that.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program, sys.argv[3:])
    except OSError as error:
        print(f"cannot run {program}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
