"""What `genpool generate` starts when nothing runs yet, for its own duration: a state server, a worker.

Several such commands may run at once on one folder: the first one's server serves them all. Everybody holds a shared
lock on `users.lock` meanwhile, and whoever started a server or a worker stops it only once it can hold that lock alone.
Looking and starting is done under `start.lock`. Jobs that nobody waits for here (of `genpool submit`, of an API) are
not waited for: the worker hands them back.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from pool.errors import ConfigurationError, ModelClosed, StateUnavailable
from pool.store.connection import connect
from pool.store.lifecycle import Lifecycle
from pool.store.ranks import RankRegistry
from pool.store.refusals import closed
from pool.store.server import answers
from tasks.config import Settings, state_folder, state_url
from tasks.launch import HAND_BACK, embedded_server, state_child, worker_child
from tasks.supervisor import RestartPolicy, Supervisor
from tasks.urls import masked

#: How long the worker may take to hand back what it holds.
HAND_BACK_S = 10.0
#: A worker that cannot start should be reported soon: somebody waits at a terminal.
POLICY = RestartPolicy(first_delay_s=0.2, fast_s=120, give_up_after=3)


def state_server_hint(settings: Settings) -> str | None:
    """What to do when the state server does not answer; None when it does."""
    url = state_url(settings)
    if answers(url):
        return None
    if settings.state.url:
        return f"No state server answers at {masked(url)} (state.url)."
    return f"No state server runs for {state_folder(settings)}. Start one: genpool up"


def require_state_server(settings: Settings) -> None:
    """Raise StateUnavailable, saying what to do, unless the state server answers."""
    hint = state_server_hint(settings)
    if hint is not None:
        raise StateUnavailable(hint)


@contextmanager
def own_runtime(settings: Settings, model: str, note: Callable[[str], None]) -> Iterator[Supervisor]:
    """Make sure that a state server answers and a worker serves `model`; what was started here ends with the block.

    Yields the supervisor of what was started: its `turn` must be called now and then, and its `failure` be heeded.
    Raises StateUnavailable when the named state server does not answer, or an own one does not start; ModelClosed for a
    model that an admin has unloaded: no worker would ever load it.
    """
    with ExitStack() as stack:
        users = stack.enter_context(_locked(settings, "users.lock", fcntl.LOCK_SH))
        with _locked(settings, "start.lock", fcntl.LOCK_EX):
            supervisor = _start_what_is_missing(settings, model, note, stack, users)
        yield supervisor


def _start_what_is_missing(
    settings: Settings, model: str, note: Callable[[str], None], stack: ExitStack, users: int
) -> Supervisor:
    """Started one caller at a time, until the worker serves, so that the next caller finds it."""
    server = None if settings.state.url or answers(state_url(settings)) else embedded_server(settings)
    if server is None:
        require_state_server(settings)
        _refuse_unloaded(settings, model)
        children = []
    else:
        stack.callback(server.release)
        state = state_child(server)
        # Before the stage of the worker, and as soon as it can be read: what is wanted is kept in the folder.
        children = [replace(state, ready=lambda: server.is_ready() and _refuse_unloaded(settings, model, kept=True))]
    if server is not None or not _is_served(settings, model):
        log_path = state_folder(settings) / f"worker-{model}.log"
        worker = worker_child(settings, model, log_path=log_path)
        children.append(
            replace(
                worker,
                # An admin may unload it while it is waited for.
                ready=lambda: _refuse_unloaded(settings, model) and _is_served(settings, model),
                stop_signal=HAND_BACK,
                stop_grace_s=HAND_BACK_S,
            )
        )
    if children:
        note(f"starting {' and '.join(child.name for child in children)} ...")
    supervisor = Supervisor([[child] for child in children], stream=sys.stderr, policy=POLICY)
    stack.callback(_stop, supervisor)
    if children:
        stack.callback(_wait_alone, users, note)
    if not supervisor.start():
        raise StateUnavailable(supervisor.failure or "stopped before it was ready")
    return supervisor


def _stop(supervisor: Supervisor) -> None:
    """Stopping is short and must not be cut short: a signal only hurries it."""
    with supervisor.heeding_signals():
        supervisor.stop()


def _is_served(settings: Settings, model: str) -> bool:
    """Whether a worker that lives has loaded `model`."""
    client = connect(state_url(settings), max_connections=1)
    try:
        return bool(RankRegistry(client, model).live())
    except StateUnavailable:
        return False
    finally:
        client.close()


def _refuse_unloaded(settings: Settings, model: str, *, kept: bool = False) -> bool:
    """Raise ModelClosed where an admin has unloaded `model`, for good. True otherwise, False when that cannot be told.
    `kept`: nothing ran before, so that nobody can load it as things are."""
    client = connect(state_url(settings), max_connections=1)
    try:
        wanted = Lifecycle(client, model).read()
    except StateUnavailable:
        return False
    finally:
        client.close()
    if not wanted.unloads or wanted.loads_next:
        return True
    if kept:
        raise ModelClosed(
            f"{model} is not loaded: an admin has unloaded it, which {state_folder(settings)} keeps. "
            f"Run: genpool up, then: genpool models load {model}",
            code="model_not_loaded",
        )
    raise closed(model, b"unloaded" if wanted.is_unloaded else b"unloading", again=False)


@contextmanager
def _locked(settings: Settings, name: str, mode: int) -> Iterator[int]:
    """Hold a lock file of the state folder; yields its descriptor."""
    folder = state_folder(settings)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"The state folder {folder} cannot be used: {error.strerror}", param="state.folder"
        ) from error
    try:
        fcntl.flock(fd, mode)
        yield fd
    finally:
        os.close(fd)


def _wait_alone(fd: int, note: Callable[[str], None]) -> None:
    noted = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not noted:
                note("another genpool generate still uses what this one started; waiting for it to end ...")
                noted = True
            time.sleep(0.1)
