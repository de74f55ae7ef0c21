"""gunicorn's configuration, from genpool's settings. Used as `-c python:webapp.gunicorn_conf`.

Stopping (SIGTERM): a process stops accepting; open Responses streams break within a second, so that their clients
continue on another node from the last `sequence_number`; chat streams end with an error in band; synchronous requests
may still finish for 2 s and are then answered (504) with the id of their job, which goes on. Whatever is left after
`graceful_timeout` is cut. No job is cancelled by a stop, unless the state server is away all that time: whose reader is
gone it learns only from the process.

`timeout` is gunicorn's watch over a process's main thread, not a limit on requests: with threads, a request may take as
long as it likes.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tasks.api_keys import KeyRing, check_exposed
from tasks.config import load_settings
from tasks.program_log import set_log_level
from webapp.arrivals import FIELDS, LINE_BYTES

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
#: Files a process opens beside its clients' connections.
OWN_FILES = 64

_settings = load_settings()
_server = _settings.server

# Before anything imports prometheus_client, which decides at import where its values live.
_own_metrics = MULTIPROCESS_VARIABLE not in os.environ
if _own_metrics:
    os.environ[MULTIPROCESS_VARIABLE] = tempfile.mkdtemp(prefix="genpool-metrics-")

bind = f"[{_server.host}]:{_server.port}" if ":" in _server.host else f"{_server.host}:{_server.port}"
workers = _server.processes
worker_class = "webapp.gunicorn_worker.Worker"
logger_class = "webapp.gunicorn_log.Log"
threads = _server.threads
worker_connections = threads + 512  # the surplus is connections that hold no thread: kept alive, or still sending
backlog = 2048
keepalive = 1  # for how long is the worker's: server.idle_seconds
limit_request_line = limit_request_field_size = LINE_BYTES
limit_request_fields = FIELDS
timeout = 60
graceful_timeout = 10
control_socket_disable = True
preload_app = False
accesslog = None  # a request's query and headers are the caller's
errorlog = "-"
loglevel = "info"
proc_name = "genpool-api"


def on_starting(server: Any) -> None:
    """Refuse addresses that other machines can reach, unless there are keys; and start from empty metrics."""
    keyed = KeyRing(_settings).required
    for address in server.cfg.address:
        if isinstance(address, tuple):
            check_exposed(str(address[0]), keyed=keyed)
    files = server.cfg.worker_connections + OWN_FILES
    if (allowed := allow_open_files(files)) < files:
        server.log.warning("%d open files are allowed, %d connections may need %d", allowed, files - OWN_FILES, files)
    folder = Path(os.environ[MULTIPROCESS_VARIABLE])
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.db"):
        file.unlink()


def allow_open_files(count: int) -> int:
    """Ask for as many; returns how many this process and its children may open. A connection is an open file, and many
    systems allow 1,024 unless a process asks for more, up to a limit that it cannot pass."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return count if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def when_ready(server: Any) -> None:
    """The same for sockets that were handed over (systemd, `fd://`), whose address nobody wrote down here."""
    keyed = KeyRing(_settings).required
    for listener in server.LISTENERS:
        if isinstance(address := listener.getsockname(), tuple):
            check_exposed(str(address[0]), keyed=keyed)


def post_worker_init(worker: Any) -> None:
    """In the forked process: tell the application when to stop, and start its upkeep."""
    node = worker.wsgi.extensions["genpool"]
    node.stopping = lambda: not worker.alive
    node.maintenance.start()
    if node.services.programs is not None:
        set_log_level(node.settings.programs)
        node.services.programs.start()


def worker_exit(server: Any, worker: Any) -> None:
    """In the process that ends, after its last answer: what the state server was away for is told it yet, if it comes
    back before the main process loses its patience. The main process, where no application lives, calls this too."""
    application = getattr(worker, "wsgi", None)
    if application is not None:
        application.extensions["genpool"].waits.settle(server.cfg.graceful_timeout)


def child_exit(server: Any, worker: Any) -> None:  # noqa: ARG001 - gunicorn's signature
    """Drop the live gauges of a process that ended."""
    # prometheus_client must not be imported before the variable above is set.
    from prometheus_flask_exporter.multiprocess import GunicornInternalPrometheusMetrics  # noqa: PLC0415

    GunicornInternalPrometheusMetrics.mark_process_dead_on_child_exit(worker.pid)


def on_exit(server: Any) -> None:  # noqa: ARG001 - gunicorn's signature
    """Remove the metrics folder if it is ours."""
    if _own_metrics:
        shutil.rmtree(os.environ[MULTIPROCESS_VARIABLE], ignore_errors=True)
