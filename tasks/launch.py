"""Which processes make up a running genpool, and with which commands, environments and readiness checks.

A stage of the supervisor starts when the one before it is ready, and stages stop in the opposite order: the API first,
so that nothing new comes in; then the workers, which drain; then Flower; the state server last.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pool.errors import ConfigurationError, StateUnavailable, UnknownModel
from pool.replica_settings import names_devices
from pool.rules.model_states import FAILED, LOADING
from pool.store.connection import connect
from pool.store.lifecycle import Lifecycle
from pool.store.ranks import RankRegistry
from pool.store.server import StateServer
from pool.store.totals import surveys
from tasks.config import Settings, state_folder, state_url
from tasks.probes import answers_ok
from tasks.supervisor import Child

#: Celery's cold shutdown: running generations are handed back, at no cost to them.
HAND_BACK = signal.SIGQUIT
HURRY_NOTE = "told to hurry (Celery calls it a cold shutdown): what runs is handed back, and nothing is lost"
#: How long a child may take beyond its own grace before it is killed.
STOP_MARGIN_S = 10.0
API_GRACE_S = 40.0
FLOWER_HOST = "127.0.0.1"
READY_TIMEOUT_S = 2.0
#: Which devices CUDA shows to a process.
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
#: Which of the `stages` is that of the workers, counted as an index.
WORKERS_STAGE = -2
#: A worker's environment: one BLAS thread, because the engine has threads of its own and BLAS's would spin beside them.
#: Every library that may stand behind numpy reads one of these, at import.
WORKER_ENV = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)


def enabled_models(settings: Settings) -> list[str]:
    """Names of the enabled models, in the catalogue's order."""
    return [name for name, model in settings.models.items() if model.enabled]


def require_model(settings: Settings, model: str) -> None:
    """Raise UnknownModel unless `model` is in the catalogue and enabled."""
    if model not in settings.models:
        raise UnknownModel(f"No model is named {model}. Known: {', '.join(settings.models) or 'none'}.", param="model")
    if not settings.models[model].enabled:
        raise UnknownModel(f"The model {model} is disabled in the configuration.", param="model")


def worker_argv(model: str, *, concurrency: int | None = None, name: str | None = None) -> list[str]:
    """The Celery command that serves `model`. `name` None: MODEL@HOST."""
    argv = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "-Q", model, "-n", name or f"{model}@%h"]
    argv += ["--without-gossip", "--without-mingle", "--loglevel", "INFO"]
    return argv if concurrency is None else [*argv, "--concurrency", str(concurrency)]


def worker_child(
    settings: Settings, model: str, *, replica: int = 0, log_path: Path | None = None, events: bool = False
) -> Child:
    """A worker of `model`, the one of this number (from 0) here; SIGTERM lets it drain. `events`: it sends task events
    from its first job on."""
    name = f"{model}-{replica + 1}@%h" if replica else None
    return Child(
        name=f"worker {model}" + (f" {replica + 1}" if replica else ""),
        argv=[*worker_argv(model, name=name), *(["--task-events"] if events else [])],
        env=WORKER_ENV | device_env(settings.models[model].device_of(replica)),
        stop_grace_s=settings.worker.drain_grace_seconds + STOP_MARGIN_S,
        hurry_signal=HAND_BACK,
        log_path=log_path,
        served=lambda pid: _has_served(settings, model, pid),
    )


def workers(settings: Settings, *, events: bool) -> list[Child]:
    """All workers that these settings have here."""
    return [worker for model in enabled_models(settings) for worker in _replicas(settings, model, events=events)]


def _replicas(settings: Settings, model: str, *, events: bool) -> list[Child]:
    """The model's workers here. What they hand back is counted for the model, so only the first one tells it."""
    workers = [
        worker_child(settings, model, replica=replica, events=events)
        for replica in range(settings.models[model].replicas)
    ]
    return [_telling(settings, model, worker, counts=worker is workers[0]) for worker in workers]


def checked_device(device: str) -> str:
    """The devices of one replica, as they were given. Raises ConfigurationError where they are none."""
    if device and not names_devices(device):
        raise ConfigurationError(
            f"--device {device!r} names no device; give what CUDA_VISIBLE_DEVICES takes, e.g. 0 or 0,1.", param="device"
        )
    return device


def device_env(device: str) -> dict[str, str]:
    """What lets a process see these devices alone, from before anything is loaded in it; "" changes nothing."""
    return {DEVICES_VARIABLE: device} if device else {}


def _has_served(settings: Settings, model: str, pid: int) -> bool:
    """Whether the worker with this process id, which has just ended, had loaded `model`, or needed not to: its place in
    the registry outlives it by a lease. True when that cannot be told."""
    client = connect(state_url(settings), max_connections=1)
    try:
        host = socket.gethostname()
        return any(
            (rank.host, rank.pid) == (host, pid) and rank.state not in (LOADING, FAILED)
            for rank in RankRegistry(client, model).present()
        )
    except StateUnavailable:
        return True
    finally:
        client.connection_pool.disconnect()


def _telling(settings: Settings, model: str, child: Child, *, counts: bool) -> Child:
    """The worker, with a line at its end about generations that the model's workers could not finish, from the one
    that `counts`: nothing of them is lost."""
    if not counts:
        return replace(child, hurry_note=HURRY_NOTE)

    def parting() -> Callable[[], str]:
        before = _handed_back(settings, model)

        def farewell() -> str:
            count = _handed_back(settings, model) - before
            if count <= 0:
                return ""
            where = "at another worker or the next start" if settings.state.url else "after the next start"
            return f"{model}: unfinished generations handed back: {count}; they go on {where}"

        return farewell

    return replace(child, parting=parting, hurry_note=HURRY_NOTE)


def _handed_back(settings: Settings, model: str) -> int:
    """How many generations of the model workers have ever handed back; 0 when that cannot be told."""
    client = connect(state_url(settings), max_connections=1, timeout_s=READY_TIMEOUT_S)
    try:
        return surveys(client, [model])[model].totals.requeued["handed_back"]
    except StateUnavailable:
        return 0
    finally:
        client.connection_pool.disconnect()


def state_child(server: StateServer) -> Child:
    """The embedded state server. Takes the folder's lock; the caller releases it when the child has ended."""
    server.acquire()
    return Child(
        name="state", argv=server.argv(), ready=server.is_ready, log_path=server.log_path, pass_fds=server.pass_fds
    )


def api_argv() -> list[str]:
    """The gunicorn command that serves the web application; where it listens is the settings' say."""
    return [sys.executable, "-m", "gunicorn", "-c", "python:webapp.gunicorn_conf", "webapp.app:create_app()"]


def api_child(settings: Settings, port: int) -> Child:
    """gunicorn with the web application; ready when `/readyz` answers 200."""
    host = settings.server.host
    return Child(
        name="api",
        argv=api_argv(),
        env={"GENPOOL_SERVER__PORT": str(port), "PROMETHEUS_MULTIPROC_DIR": str(_metrics_folder(settings, port))},
        ready=lambda: answers_ok(host, port, "/readyz", timeout_s=READY_TIMEOUT_S),
        stop_grace_s=API_GRACE_S,
    )


def remove_metrics(settings: Settings, port: int) -> None:
    """Remove the files through which the API's processes share their counters. A state folder of our own may hold more
    of them, from runs that were killed."""
    mine = _metrics_folder(settings, port)
    for folder in [mine] if settings.state.url else mine.parent.glob("metrics-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _metrics_folder(settings: Settings, port: int) -> Path:
    return state_folder(settings) / f"metrics-{port}"


def flower_child(port: int) -> Child:
    """Flower, on loopback. Raises ConfigurationError when it is not installed or its port is taken."""
    if importlib.util.find_spec("flower") is None:
        raise ConfigurationError('Flower is not installed. Run: pip install "genpool[flower]"')
    claim_port(FLOWER_HOST, port)
    argv = [sys.executable, "-m", "celery", "-A", "tasks", "flower", f"--address={FLOWER_HOST}", f"--port={port}"]
    return Child(name="flower", argv=argv)


def embedded_server(settings: Settings) -> StateServer | None:
    """The state server to run here; None when the settings name one that runs elsewhere."""
    if settings.state.url:
        return None
    return StateServer(state_folder(settings), appendfsync=settings.state.appendfsync)


def stages(
    settings: Settings, *, server: StateServer | None, port: int, flower_port: int | None
) -> Sequence[Sequence[Child]]:
    """Everything `genpool up` runs, in starting order. The stage of the workers may be empty: some may come later."""
    flower = [flower_child(flower_port)] if flower_port else []
    before = [[state_child(server)] if server else [], flower]
    return [
        *(stage for stage in before if stage),
        workers(settings, events=bool(flower)),
        [api_child(settings, port)],
    ]


def claim_port(host: str, port: int) -> int:
    """`port` if it is free, or a free one for 0. Raises ConfigurationError when it is taken.

    Another process may still take it before the server does; the server then says so itself.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"Port {port} of {host} cannot be used: {error.strerror}. Choose another one.",
                param="server.port",
            ) from error
        return int(probe.getsockname()[1])


def base_url(host: str, port: int) -> str:
    """What clients put in front of `/v1`."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def ready_line(settings: Settings, url: str) -> str:
    """What there is to say when everything runs: which models it serves, and which an admin has unloaded."""
    unloaded = _unloaded_models(settings)
    served = [model for model in enabled_models(settings) if model not in unloaded]
    line = f"genpool is ready: {url}/v1 serves {', '.join(served) or 'no model'}"
    if unloaded:
        line += f"; unloaded by an admin: {', '.join(unloaded)} (genpool models load NAME)"
    return f"{line}; examples are at {url}/docs"


def _unloaded_models(settings: Settings) -> list[str]:
    """Enabled models that take no requests until an admin loads them again; none where that cannot be told."""
    client = connect(state_url(settings), max_connections=1, timeout_s=READY_TIMEOUT_S)
    try:
        return [model for model in enabled_models(settings) if Lifecycle(client, model).read().unloads]
    except StateUnavailable:
        return []
    finally:
        client.connection_pool.disconnect()


def exec_worker(model: str, *, concurrency: int | None, name: str | None, device: str) -> None:
    """Become the worker of `model` on this device ("": whatever it finds). Does not return."""
    environment: Mapping[str, str] = {**os.environ, **WORKER_ENV, **device_env(device)}
    os.execve(sys.executable, worker_argv(model, concurrency=concurrency, name=name), environment)


def exec_api() -> None:
    """Become the API. Does not return."""
    os.execv(sys.executable, api_argv())
