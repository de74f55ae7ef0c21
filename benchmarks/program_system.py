"""The system of the program benchmark, one for each cell: state server, API process and worker under one policy; and
what agents saw of it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import httpx

from benchmarks import report
from benchmarks.agent_load import Load, Seen
from benchmarks.agent_traces import REGIMES, tasks, working_set_tokens
from benchmarks.policies import BINDING_ONLY, OFFLOAD, PLAIN
from benchmarks.processes import ROOT, START_S, Worker, free_port, module, state_server, tail, wait_for
from benchmarks.random_model import SIX_MILLION, kv_bytes
from benchmarks.streaming_client import HOST
from pool.store.connection import connect
from pool.store.program_keys import ProgramKeys
from workers.engines.paged_attention import KV_PAGE

MODEL = "agent"
#: Generations at once, also for requests without a Program: as many as two cores have a use for.
SLOTS = 8
#: Samples of a window: small, so that a warm-up fills it.
WINDOW = 50
#: Longest prompt and output of a task, and its share of llama.cpp's KV, which is divided among sequences.
LONGEST_TOKENS = {"numpy": 7500, "llama_cpp": 3900}
SEQUENCE_TOKENS = 4096
#: Memory for offloaded KV, in parts of the engine's own.
OFFLOAD_PARTS = 4
LOAD_S = 3600.0

_CONFIGURATION = """\
[server]
port = {port}
threads = 100
[state]
url = "{url}"
[models.smollm2-135m-instruct]
enabled = false
[models.{model}]
backend = "{backend}"
source = "{source}"
threads = 2
target_inflight = {slots}
max_active_sessions = {slots}
max_batch_size = {slots}
kept_prefixes = {kept}
kv_budget_bytes = {kv_bytes}
scratch_budget_bytes = 268435456
offload_memory_bytes = {offload_bytes}
"""
_PROGRAMS = """\
[programs]
enabled = true
stats_window_size = {window}
token_capacity_per_dp_rank = {kv_tokens}
decode_buffer_tokens = 16
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination. `part`: of what the agents would hold, that the engine has as KV; `settings`: further lines of
    `[programs]`, as TOML."""

    policy: str
    regime: str = "capped"
    agents: int = 16
    part: float = 0.35
    backend: str = "numpy"
    seconds: float = 80.0
    warm_requests: int = 80
    abandoned: int = 0
    settings: str = ""

    def with_policy(self, policy: str, *, abandoned: int = 0) -> Cell:
        """The same under another one."""
        return replace(self, policy=policy, abandoned=abandoned)


@dataclass
class Bench:
    """What all cells share. `costs`: by backend, the coefficients as lines of TOML; `served`: how many systems there
    were."""

    folder: Path
    model: Path
    costs: Mapping[str, str]
    task_requests: int = 8
    served: int = field(default=0)

    def kv_tokens(self, cell: Cell) -> int:
        """The engine's KV in this cell: whole pages, and never less than the longest task needs."""
        longest = LONGEST_TOKENS[cell.backend]
        found = tasks(REGIMES[cell.regime], length=self.task_requests, longest_tokens=longest, seed=1)
        wanted = max(round(working_set_tokens(found, cell.agents) * cell.part), longest)
        return -(-wanted // KV_PAGE) * KV_PAGE

    def measure(self, cell: Cell) -> report.Sample:
        """Run a cell."""
        kv_tokens = self.kv_tokens(cell)
        with self.system(cell.policy, cell.backend, kv_tokens, cell.settings) as (port, keys_url):
            load = Load(
                port=port,
                model=MODEL,
                regime=cell.regime,
                agents=cell.agents,
                task_requests=self.task_requests,
                longest_tokens=LONGEST_TOKENS[cell.backend],
                warm_requests=cell.warm_requests,
                seconds=cell.seconds,
                programs=cell.policy != PLAIN,
                abandoned=cell.abandoned,
            )
            seen = replayed(load, self.folder / "load.log")
            return figures(seen, cell) | transitions(keys_url) | {"KV tokens": kv_tokens}

    @contextmanager
    def system(self, policy: str, backend: str, kv_tokens: int, programs: str = "") -> Iterator[tuple[int, str]]:
        """A running system; its port and the state server's URL. `programs`: further lines of `[programs]`."""
        self.served += 1
        folder = self.folder / f"system-{self.served}"
        folder.mkdir()
        with state_server(folder) as state:
            port, config = free_port(), folder / "genpool.toml"
            config.write_text(
                self._configuration(policy, backend, kv_tokens, programs).format(port=port, url=state.url),
                encoding="utf-8",
            )
            variables = {"GENPOOL_CONFIG": str(config), "TMPDIR": str(folder)}
            serve = ("-c", "python:webapp.gunicorn_conf", "webapp.app:create_app()")
            work = ("-Q", MODEL, "-l", "WARNING", "--without-mingle", "--without-gossip", "-n", f"{MODEL}@bench")
            parts = [
                Worker(module("benchmarks.policy_api", policy, *serve, variables=variables), folder / "api.log"),
                Worker(module("benchmarks.policy_worker", policy, *work, variables=variables), folder / "worker.log"),
            ]
            try:
                wait_for(partial(_answers, port, parts), what="the system", timeout_s=3 * START_S, every_s=0.2)
                yield port, state.url
                for part in parts:
                    part.check()
            finally:
                for part in reversed(parts):
                    part.stop()

    def _configuration(self, policy: str, backend: str, kv_tokens: int, programs: str) -> str:
        sequences = max(kv_tokens // SEQUENCE_TOKENS, 2)
        slots = SLOTS if backend == "numpy" else max(sequences // 2, 1)
        text = _CONFIGURATION.replace("{port}", "\0port").replace("{url}", "\0url")
        text = text.format(
            model=MODEL,
            backend=backend,
            source=self.model,
            slots=slots,
            kept=max(sequences - slots, 0),
            kv_bytes=kv_bytes(kv_tokens),
            offload_bytes=kv_bytes(OFFLOAD_PARTS * kv_tokens) if policy == OFFLOAD else 0,
        )
        if policy != PLAIN:
            text += _PROGRAMS.format(window=WINDOW, kv_tokens=kv_tokens) + programs
            text += {BINDING_ONLY: "binding_only = true\n", OFFLOAD: 'on_pause = "offload"\n'}.get(policy, "")
            text += self.costs.get(backend, "")
        return text.replace("\0port", "{port}").replace("\0url", "{url}")


def calibrated(folder: Path, model: Path, backend: str, *, seconds: float) -> str:
    """The coefficients of this machine, as lines of TOML."""
    config = folder / "calibrate.toml"
    sequences = 4
    text = _CONFIGURATION.format(
        port=1,
        url="redis://127.0.0.1:1",
        model=MODEL,
        backend=backend,
        source=model,
        slots=sequences,
        kept=0,
        kv_bytes=kv_bytes(sequences * SIX_MILLION.context_length),
        offload_bytes=0,
    )
    config.write_text(text, encoding="utf-8")
    command = module(
        "genpool", "calibrate", MODEL, "--seconds", str(seconds), "--tolerance", "1000",
        variables={"GENPOOL_CONFIG": str(config)},
    )  # fmt: skip
    log = folder / "calibrate.log"
    process = command.start(log, piped=True)
    found, _ = process.communicate(timeout=600 + 10 * seconds)
    if process.returncode:
        raise RuntimeError(f"the coefficients could not be measured:\n{tail(log)}")
    return found.decode()


def replayed(load: Load, log: Path) -> list[Seen]:
    """Run the agents in a process of their own. Raises RuntimeError with its last words when it fails."""
    command = [sys.executable, "-m", "benchmarks.agent_load", json.dumps(asdict(load))]
    with log.open("w", encoding="utf-8") as errors:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, timeout=LOAD_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the agents failed:\n{tail(log)}")
    return [Seen(**each) for each in json.loads(done.stdout)]


def figures(seen: Sequence[Seen], cell: Cell) -> dict[str, float]:
    """Of the requests that ended in the measured time, and of the tasks; abandoned ones do not count."""
    counted = [each for each in seen if each.agent >= 0 and 0 <= each.ended_s <= cell.seconds]
    if not counted:
        raise RuntimeError("no request ended in the measured time")
    first_s = [each.first_s for each in counted]
    tasks_s = [each.task_s for each in counted if each.task_s >= 0]
    by_agent: defaultdict[int, int] = defaultdict(int)
    for each in counted:
        by_agent[each.agent] += 1
    prompt_tokens = sum(each.prompt_tokens for each in counted)
    found = {
        "requests/s": len(counted) / cell.seconds,
        "hit %": sum(each.cached_tokens for each in counted) / prompt_tokens * 100,
        "first p50 s": report.percentile(first_s, 50),
        "first p99 s": report.percentile(first_s, 99),
        "first max s": max(first_s),
        "tasks": float(len(tasks_s)),
        "prompt tokens/s": prompt_tokens / cell.seconds,
        "output tokens/s": sum(each.output_tokens for each in counted) / cell.seconds,
        "fewest / mean requests of an agent": min(by_agent.get(agent, 0) for agent in range(cell.agents))
        / (len(counted) / cell.agents),
    }
    if tasks_s:
        found |= {"task mean s": statistics.fmean(tasks_s), "task p99 s": report.percentile(tasks_s, 99)}
    return found


def transitions(url: str) -> dict[str, float]:
    """What became of Programs in the whole run, by kind."""
    client = connect(url, max_connections=1)
    try:
        counts = client.hgetall(ProgramKeys(f"{MODEL}:0").placement)
    finally:
        client.connection_pool.disconnect()
    found: Counter[str] = Counter()
    for name, count in counts.items():
        what, _, reason = name.decode().partition(":")
        if what == "admit":
            found["admissions"] += int(count)
            found["forced"] += int(count) * (reason == "forced")
        elif what == "pause":
            found[f"paused: {reason}"] += int(count)
        elif what == "bind" and reason == "relocation":
            found["relocations"] += int(count)
    return {name: float(count) for name, count in sorted(found.items())}


def _answers(port: int, parts: Sequence[Worker]) -> bool:
    """Whether a generation came to its end."""
    for part in parts:
        part.check()
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1, "ignore_eos": True}
    try:
        return httpx.post(f"http://{HOST}:{port}/v1/completions", json=body, timeout=10, trust_env=False).is_success
    except httpx.TransportError:
        return False
