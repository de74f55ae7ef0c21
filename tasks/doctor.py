"""`genpool doctor`: what this machine and its state server must be for genpool to work, looked at one by one.

Reads only, except for a write to the state server that changes nothing. Every failure says what to do.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import stat
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from pool.errors import ConfigurationError, StateUnavailable
from pool.store.connection import connect, state_errors
from pool.store.jobs import JobStore
from pool.store.lifecycle import Lifecycle, Wanted
from pool.store.memory import FULL_SHARE, memory_of
from pool.store.nodes import is_spread, name_of, nodes
from pool.store.ranks import Rank, serving
from pool.store.server_binary import find_binary
from tasks.api_keys import KeyRing, check_exposed
from tasks.config import Settings, model_cache, state_folder, state_url
from tasks.launch import claim_port, enabled_models
from tasks.machine_memory import available_bytes, fit
from tasks.own_runtime import state_server_hint

OK, FAILED, SKIPPED = "ok", "failed", "skipped"

#: Always shown; any other requirement only when it is not met.
SHOWN = ("celery", "kombu", "redis")
OLDEST_SERVER = Version("7.0")
#: Times of different origin are shown side by side (Flower, `inspect generations`); nothing is decided by them.
CLOCK_LIMIT_S = 2.0
#: Free disk space that a healthy machine has; the state folder also needs room to rewrite its log.
DISK_RESERVE_BYTES = 512 * 2**20
PROBE_TIMEOUT_S = 2.0
KEYS_REMEDY = "Check server.keys_file and GENPOOL_API_KEYS. API processes that run keep the keys they had until then."

#: What is wrong with the weights of a source; None: nothing.
WeightsFault = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: `status` is ok, failed or skipped; `remedy` says what to do about a failure."""

    check: str
    status: str
    detail: str
    remedy: str = ""


def examine(
    settings: Settings, weights_fault: WeightsFault, clock: Callable[[], float] = time.time
) -> Iterator[Finding]:
    """All findings, as they are made. `clock`: this machine's, in seconds since 1970."""
    yield from _versions()
    ranks = yield from _state(settings, clock)
    yield from _models(settings, weights_fault)
    yield from _budgets(settings, ranks)
    yield _port(settings)
    yield _keys(settings)
    yield from _folders(settings)


# --- versions


def _versions() -> Iterator[Finding]:
    yield Finding("python", OK, platform.python_version())
    try:
        yield Finding("genpool", OK, importlib.metadata.version("genpool"))
        requirements = map(Requirement, importlib.metadata.requires("genpool") or ())
    except importlib.metadata.PackageNotFoundError:
        yield Finding("genpool", FAILED, "not installed as a package", "Run: pip install -e .")
        return
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found = _requirement(requirement)
            if found.status != OK or requirement.name in SHOWN:
                yield found


def _requirement(requirement: Requirement) -> Finding:
    remedy = f'Run: pip install "{requirement}"'
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(requirement.name, FAILED, "not installed", remedy)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(requirement.name, FAILED, f"{version}, but genpool needs {requirement.specifier}", remedy)
    return Finding(requirement.name, OK, version)


# --- the state server


def _state(settings: Settings, clock: Callable[[], float]) -> Generator[Finding, None, list[Rank]]:
    """Also the live ranks of enabled models."""
    ranks: list[Rank] = []
    if not settings.state.url:
        yield _program()
    hint = state_server_hint(settings)
    if hint is not None:
        remedy = "Check state.url and that server." if settings.state.url else "Run: genpool up"
        yield Finding("state server", FAILED, hint, remedy)
        yield Finding("workers", SKIPPED, "the state server does not answer")
        return ranks
    client = connect(state_url(settings), max_connections=1, timeout_s=PROBE_TIMEOUT_S)
    try:
        with state_errors():
            servers = nodes(client)
        yield _writable(JobStore(client, result_ttl_ms=1, pending_per_model=1), list(settings.models))
        if is_spread(client):
            yield _cluster(servers[0])
        for server in servers:
            for finding in _server(server, clock):
                yield replace(finding, check=f"{finding.check} {name_of(client, server)}".rstrip())
        for model in enabled_models(settings):
            wanted, present = Lifecycle(client, model).look()
            ranks += serving(present)
            yield _served(model, wanted, present)
    except StateUnavailable as error:
        yield Finding("state server", FAILED, error.message, "Look into the state server's log.")
    finally:
        client.connection_pool.disconnect()
    return ranks


def _program() -> Finding:
    try:
        return Finding("state server program", OK, str(find_binary()))
    except ConfigurationError as error:
        return Finding("state server program", FAILED, error.message, "Or name a server of yours in state.url.")


def _server(server: Any, clock: Callable[[], float]) -> Iterator[Finding]:
    """The state server, or one node of a cluster."""
    with state_errors():
        info = server.info()
    yield _server_version(info)
    yield _policy(info)
    yield _persistence(info)
    yield _memory(server)
    yield _clock_offset(server, clock)


def _cluster(node: Any) -> Finding:
    with state_errors():
        info, rows = node.execute_command("CLUSTER INFO"), node.execute_command("CLUSTER", "SLOTS")
    primaries = {tuple(row[2][:2]) for row in rows}
    alone = len({tuple(row[2][:2]) for row in rows if len(row) < 4})
    if info["cluster_state"] != "ok":
        return Finding("state cluster", FAILED, "some slots have no node", "Look at CLUSTER NODES, and at its logs.")
    copies = f"{alone} of {len(primaries)} nodes have no replica" if alone else "every node has a replica"
    return Finding("state cluster", OK, f"all slots are served; {copies}")


def _server_version(info: dict[str, Any]) -> Finding:
    name = str(info.get("server_name", "redis"))
    shown = f"{name} {info.get(f'{name}_version', info['redis_version'])}"
    if Version(str(info["redis_version"])) < OLDEST_SERVER:
        return Finding("state server", FAILED, shown, f"Use Valkey, or Redis {OLDEST_SERVER} or later.")
    return Finding("state server", OK, f"{shown} answers")


def _writable(store: JobStore, models: Sequence[str]) -> Finding:
    try:
        store.ping(models)
    except StateUnavailable as error:
        return Finding("state writable", FAILED, error.message, "Point state.url at a primary that takes writes.")
    return Finding("state writable", OK, "takes writes")


def _policy(info: dict[str, Any]) -> Finding:
    policy = str(info.get("maxmemory_policy", "unknown"))
    if policy == "noeviction":
        return Finding("state memory policy", OK, policy)
    remedy = "Set maxmemory-policy noeviction in the server's configuration."
    return Finding("state memory policy", FAILED, f"{policy} can drop jobs", remedy)


def _persistence(info: dict[str, Any]) -> Finding:
    if not info.get("aof_enabled"):
        remedy = "Set appendonly yes in the server's configuration."
        return Finding("state persistence", FAILED, "no append-only file: a restart loses jobs", remedy)
    if info.get("aof_last_write_status", "ok") != "ok":
        remedy = "Look at its disk and its log."
        return Finding("state persistence", FAILED, "the last write to the append-only file failed", remedy)
    return Finding("state persistence", OK, "append-only file")


def _memory(server: Any) -> Finding:
    memory = memory_of(server)
    used = f"{memory.used_bytes / 2**20:.1f} MiB used"
    if memory.share is None:
        return Finding("state memory", OK, f"{used}, no maxmemory")
    detail = f"{used}, {memory.share:.0%} of maxmemory"
    if memory.share > FULL_SHARE:
        remedy = "Raise maxmemory, or lower state.result_ttl_seconds."
        return Finding("state memory", FAILED, f"{detail}; new jobs are refused above {FULL_SHARE:.0%}", remedy)
    return Finding("state memory", OK, detail)


def _clock_offset(server: Any, clock: Callable[[], float]) -> Finding:
    """The server's clock against this machine's; half of the round trip may be the way there."""
    before_s = clock()
    seconds, micros = server.time()
    after_s = clock()
    offset_s = seconds + micros / 1e6 - (before_s + after_s) / 2
    detail = f"the state server is {abs(offset_s):.3f} s {'ahead' if offset_s > 0 else 'behind'}"
    if abs(offset_s) - (after_s - before_s) / 2 > CLOCK_LIMIT_S:
        return Finding("clock", FAILED, detail, "Synchronize both machines' clocks (NTP).")
    return Finding("clock", OK, detail)


def _served(model: str, wanted: Wanted, present: list[Rank]) -> Finding:
    """What an admin wants is no failure, as long as there is somebody to load the model again."""
    ranks = serving(present)
    if present and wanted.unloads and not wanted.loads_next:
        state = wanted.state(present)
        return Finding(f"worker {model}", OK, f"{state} by an admin; to load it: genpool models load {model}")
    if not ranks:
        return Finding(f"worker {model}", FAILED, "no live worker", f"Run: genpool up, or: genpool worker {model}")
    return Finding(f"worker {model}", OK, ", ".join(sorted(rank.id for rank in ranks)))


# --- this machine


def _models(settings: Settings, weights_fault: WeightsFault) -> Iterator[Finding]:
    for name in enabled_models(settings):
        source = settings.models[name].gguf_source
        fault = None if source is None else weights_fault(source)
        if fault is None:
            yield Finding(f"model {name}", OK, settings.models[name].shown_source)
        else:
            yield Finding(f"model {name}", FAILED, fault, f"Run: genpool models pull {name}, or check its source.")
    if any(settings.models[name].backend == "llama_cpp" for name in enabled_models(settings)):
        yield _llama_cpp()


def _budgets(settings: Settings, ranks: list[Rank]) -> Iterator[Finding]:
    """Whether this machine has the memory for a worker of each model; what its workers have counts as theirs."""
    here = {rank.pid for rank in ranks if rank.host == socket.gethostname()}
    available = available_bytes(here)
    if available is None:
        yield Finding("memory", SKIPPED, "this machine does not say what is available")
        return
    # Others have their memory elsewhere, or settings of their own for it.
    models = {name: settings.models[name] for name in enabled_models(settings)}
    models = {name: model for name, model in models.items() if model.backend not in ("openai_remote", "vllm_serve")}
    for name, found in fit(models.items(), available).items():
        weights = "" if models[name].weight_bytes else "; weights are not counted, weight_bytes is 0"
        detail = f"budgets take {_mib(found.needed_bytes)} of {_mib(found.left_bytes)}{weights}"
        if found.fits:
            yield Finding(f"memory of {name}", OK, detail)
        else:
            field = f"models.{name}.{found.field}"
            most = f" to {found.most_bytes} at most" if found.most_bytes > 0 else ", or disable a model"
            yield Finding(f"memory of {name}", FAILED, detail, f"Lower {field}{most}.")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"


def _llama_cpp() -> Finding:
    """A source package, so it is no requirement; a model may need it all the same."""
    try:
        return Finding("llama.cpp", OK, importlib.metadata.version("llama-cpp-python"))
    except importlib.metadata.PackageNotFoundError:
        remedy = 'Run: make llama, or: pip install "genpool[llama]"'
        return Finding("llama.cpp", FAILED, "a model needs it, and it is not installed", remedy)


def _port(settings: Settings) -> Finding:
    host, port = settings.server.host, settings.server.port
    try:
        claim_port(host, port)
    except ConfigurationError:
        if _is_genpool(host, port):
            return Finding("api port", OK, f"genpool answers at {host}:{port}")
        remedy = "Choose another server.port, or stop that program."
        return Finding("api port", FAILED, f"{host}:{port} is taken by another program", remedy)
    return Finding("api port", OK, f"{host}:{port} is free")


def _keys(settings: Settings) -> Finding:
    """API keys: understood, changeable by their owner alone, and there if other machines reach the API."""
    try:
        ring = KeyRing(settings)
        check_exposed(settings.server.host, keyed=ring.required)
    except ConfigurationError as error:
        return Finding("api keys", FAILED, error.message, KEYS_REMEDY)
    file = Path(settings.server.keys_file).expanduser() if settings.server.keys_file else None
    if file is not None and file.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return Finding("api keys", FAILED, f"others can write to {file}", f"Run: chmod go-w {file}")
    if not ring.required:
        return Finding("api keys", OK, "none: the API is open, to this machine alone")
    return Finding("api keys", OK, f"{len(ring)} in force")


def _is_genpool(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        return answer.getheader("x-request-id") is not None and json.loads(answer.read(1000)) == {"status": "ok"}
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def _folders(settings: Settings) -> Iterator[Finding]:
    folders = {"model cache": model_cache()}
    if not settings.state.url:
        folders = {"state folder": state_folder(settings), **folders}
    for name, folder in folders.items():
        yield _permissions(name, folder)
        yield _space(name, folder)


def _permissions(name: str, folder: Path) -> Finding:
    """Usable by this user, changeable by nobody else; and nobody else may read the state."""
    there = _existing(folder)
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, FAILED, f"{there} cannot be written", f"Run: chown {os.getuid()} {there}")
    if there != folder:
        return Finding(name, OK, f"{folder} will be made")
    if folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return Finding(name, FAILED, f"others can write to {folder}", f"Run: chmod go-w {folder}")
    if name == "state folder" and (readable := next(_readable_by_others(folder), None)):
        return Finding(name, FAILED, f"others can read {readable}", f"Run: chmod -R go-rwx {folder}")
    return Finding(name, OK, str(folder))


def _readable_by_others(folder: Path) -> Iterator[Path]:
    """Files of the state that others can reach and read."""
    if not folder.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        return
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            yield file


def _space(name: str, folder: Path) -> Finding:
    free_bytes = shutil.disk_usage(_existing(folder)).free
    detail = f"{free_bytes / 2**30:.1f} GiB free"
    if free_bytes < DISK_RESERVE_BYTES:
        needed = f"{DISK_RESERVE_BYTES / 2**20:.0f} MiB"
        return Finding(f"disk of {name}", FAILED, f"{detail}, less than {needed}", f"Make room for {folder}.")
    return Finding(f"disk of {name}", OK, detail)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def failures(findings: Iterable[Finding]) -> int:
    """How many checks failed."""
    return sum(finding.status == FAILED for finding in findings)
