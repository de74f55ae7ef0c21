"""The served part of the batch benchmark: streaming chat completions over HTTP, by us and by llama.cpp's own server.

Everybody has the same weights, threads and slots. All servers are up and warm; whoever is not measured is frozen.

* `genpool`: API process, worker, state server, with flash attention, as the others have it by default.
* `genpool-exact`: the same with the settings that promise the same tokens in every batch.
* `llama-server`: built from the source of our library, with its flags.
* `xllamacpp`: a prebuilt llama.cpp server. It knows AVX2 and nothing newer, so it is a row to look at, not a bound.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks import report
from benchmarks.llama_server import llama_server
from benchmarks.peer_environments import environment
from benchmarks.processes import START_S, Command, Dialogue, Worker, free_port, module, peer, state_server, wait_for
from benchmarks.streaming_client import HOST
from tasks.config import SHIPPED_MODELS
from workers.weights import ensure_weights

WEIGHTS = "smollm2-135m-instruct:q4_0"
CLIENTS = (1, 8, 16)
SLOTS = 16
#: Positions of a slot: a prompt and its answer take a quarter of them.
SLOT_TOKENS = 512
FAST, EXACT = "fast", "exact"
#: The entry of the shipped catalogue whose settings count where they are no matter of size.
_LIKE = "smollm2-135m-q4"
_GENPOOL = {"genpool": FAST, "genpool-exact": EXACT}
_KV_BYTES_PER_POSITION = 23_040  # SmolLM2's, float16
_CONFIGURATION = """\
[server]
port = {port}
threads = 64
[state]
url = "{url}"
[models.smollm2-135m-instruct]
enabled = false
"""
_MODEL = """\
[models.{name}]
backend = "llama_cpp"
source = "{weights}"
flash_attention = {flash}
threads = {threads}
target_inflight = {slots}
max_active_sessions = {slots}
max_batch_size = {slots}
kept_prefixes = 0
kv_budget_bytes = {kv_bytes}
max_prefill_tokens_per_tick = {prefill_tokens}
"""


#: A server's command, by its port.
Peer = Callable[[int], Command]


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of an answer; requests of each client, by number of clients; threads of an engine; positions of a slot."""

    tokens: int
    requests: Mapping[int, int]
    threads: int
    slot_tokens: int = SLOT_TOKENS


@dataclass(frozen=True, slots=True)
class Server:
    """What answers at a port, and its processes."""

    port: int
    model: str
    processes: tuple[Worker, ...]

    def ready(self) -> bool:
        """Whether it has answered a request."""
        for process in self.processes:
            process.check()
        body = {"model": self.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        with suppress(httpx.TransportError):
            answer = httpx.post(f"http://{HOST}:{self.port}/v1/chat/completions", json=body, timeout=5, trust_env=False)
            return answer.status_code == 200
        return False

    def cpu_s(self) -> float:
        """CPU seconds of its processes."""
        return sum(process.cpu_s() for process in self.processes)

    def hold(self) -> None:
        """Freeze all."""
        for process in self.processes:
            process.hold()

    def go(self) -> None:
        """Let all run."""
        for process in self.processes:
            process.go()


class Contest:
    """All servers, frozen, and the client."""

    def __init__(self, servers: Mapping[str, Server], client: Dialogue, size: Size) -> None:
        self._servers = servers
        self._client = client
        self._size = size
        #: Turns by server and number of clients; and how many prompt tokens there were in each turn.
        self._turns: Counter[tuple[str, int]] = Counter()
        self._prompt_tokens: dict[tuple[int, int], int] = {}

    @property
    def names(self) -> list[str]:
        """Of all servers."""
        return list(self._servers)

    def measure(self, name: str, clients: int) -> report.Sample:
        """One server with so many clients."""
        run, cpu_s = self._ask(name, f"{name}*{self._size.requests[clients]}", clients)
        self._compare_prompts(name, clients, run["prompt_tokens"])
        return {
            "tokens/s": run["output_tokens"] / run["took_s"],
            "gap p99 ms": report.percentile(run["gaps_ms"], 99),
            "gap p50 ms": report.percentile(run["gaps_ms"], 50),
            "first token p50 ms": report.percentile(run["first_ms"], 50),
            "CPU ms/token": cpu_s / run["output_tokens"] * 1000,
        }

    def measure_arrival(self, name: str, streams: int, prompt_tokens: int) -> report.Sample:
        """One server with so many streams, among which a prompt of about so many tokens arrives."""
        run, _ = self._ask(name, f"{name}@{prompt_tokens}", streams)
        self._compare_prompts(name, 0, run["prompt_tokens"])
        return {
            "longest gap ms": run["longest_ms"],
            "p50 gap before ms": report.percentile(run["before_ms"], 50),
            "newcomer's first token ms": run["first_ms"],
        }

    def _ask(self, name: str, what: str, number: int) -> tuple[dict[str, Any], float]:
        """The client's figures of one server, and the CPU seconds that the server used."""
        server = self._servers[name]
        server.go()
        try:
            # Whatever slept is awake now.
            wait_for(server.ready, what=f"{name} to go on", timeout_s=START_S, every_s=0.1)
            cpu_s = server.cpu_s()
            run = self._client.ask(what, number)
            return run, server.cpu_s() - cpu_s
        finally:
            server.hold()

    def _compare_prompts(self, name: str, clients: int, tokens: int) -> None:
        """Raises RuntimeError unless all servers made the same number of tokens of the same prompts."""
        turn = self._turns[name, clients]
        self._turns[name, clients] += 1
        if self._prompt_tokens.setdefault((clients, turn), tokens) != tokens:
            raise RuntimeError(f"{name} made {tokens} tokens of its prompts, another server did not")


@contextmanager
def genpool(folder: Path, weights: Path, size: Size) -> Iterator[dict[str, Server]]:
    """One API process over two models, each with a worker of its own."""
    with state_server(folder) as state:
        port, config = free_port(), folder / "genpool.toml"
        models = [
            _MODEL.format(
                name=name,
                weights=weights,
                flash=json.dumps(name == FAST),
                threads=size.threads,
                slots=SLOTS,
                kv_bytes=SLOTS * size.slot_tokens * _KV_BYTES_PER_POSITION,
                prefill_tokens=SHIPPED_MODELS[_LIKE]["max_prefill_tokens_per_tick"],
            )
            for name in _GENPOOL.values()
        ]
        config.write_text("".join([_CONFIGURATION.format(port=port, url=state.url), *models]), encoding="utf-8")
        variables = {"GENPOOL_CONFIG": str(config), "TMPDIR": str(folder)}
        # It is frozen for minutes, which its main process must not take for a hang.
        serve = ("-c", "python:webapp.gunicorn_conf", "--timeout", "3600", "webapp.app:create_app()")
        processes = [Worker(module("gunicorn", *serve, variables=variables), folder / "api.log")]
        try:
            servers = {}
            for name, model in _GENPOOL.items():
                celery = ("-A", "tasks", "worker", "-Q", model, "-l", "WARNING", "--without-mingle", "--without-gossip")
                command = module("celery", *celery, "-n", f"{model}@bench", variables=variables)
                processes.append(Worker(command, folder / f"{model}.log"))
                servers[name] = Server(port, model, (processes[0], processes[-1]))
            yield servers
        finally:
            for process in processes:
                process.stop()


def llama_cpp_servers(weights: Path, size: Size) -> dict[str, Peer]:
    """llama.cpp's own, by port; those that can be built and installed."""
    shape = {"threads": str(size.threads), "slots": str(SLOTS), "context": str(SLOTS * size.slot_tokens)}
    built, programs = llama_server(), environment("xllamacpp")

    def from_source(port: int) -> Command:
        options = {"-m": str(weights), "-t": shape["threads"], "-np": shape["slots"], "-c": shape["context"]}
        named = [part for option in {**options, "--host": HOST, "--port": str(port)}.items() for part in option]
        return Command([str(built), *named, "--log-disable", "--no-ui"])

    def prebuilt(port: int) -> Command:
        return peer(
            [str(programs and programs / "python"), "xllamacpp_server.py", str(port), str(weights), *shape.values()]
        )

    found: dict[str, Peer] = {"llama-server": from_source} if built else {}
    if programs:
        found["xllamacpp"] = prebuilt
    return found


@contextmanager
def contest(size: Size, peers: Mapping[str, Peer], weights: Path, *, start_s: float) -> Iterator[Contest]:
    """Our servers and the peers, all up and frozen. `start_s`: within which each must have answered a request."""
    with tempfile.TemporaryDirectory(prefix="genpool-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        servers = stack.enter_context(genpool(folder, weights, size))
        for peer_name, command in peers.items():
            port = free_port()
            process = Worker(command(port), folder / f"{peer_name}.log")
            stack.callback(process.stop)
            servers[peer_name] = Server(port, "any", (process,))
        for server_name, server in servers.items():
            wait_for(server.ready, what=server_name, timeout_s=start_s, every_s=0.2)
        for server in servers.values():
            server.hold()
        known = {server_name: {"port": each.port, "model": each.model} for server_name, each in servers.items()}
        client = Dialogue(
            module("benchmarks.streaming_client", json.dumps(known), str(size.tokens)), folder / "client.log"
        )
        stack.callback(client.stop)
        yield Contest(servers, client, size)


def cells(served: Contest, clients: Sequence[int]) -> dict[str, Callable[[], report.Sample]]:
    """What each round measures: all servers with all numbers of clients, named `SERVER, CLIENTS`. Warms them."""
    for server_name in served.names:
        served.measure(server_name, clients[-1])
    return {f"{name}, {count}": partial(served.measure, name, count) for count in clients for name in served.names}


def run(size: Size, rounds: int, clients: Sequence[int]) -> dict[str, list[report.Sample]]:
    """All servers with all numbers of clients, in turn."""
    weights = Path(ensure_weights(WEIGHTS))
    with contest(size, llama_cpp_servers(weights, size), weights, start_s=START_S * 3) as served:
        return report.interleaved(cells(served, clients), rounds)


def targets(samples: Mapping[str, Sequence[report.Sample]]) -> list[report.Target]:
    """Us against llama.cpp's own server."""
    medians = {name: report.medians(rounds) for name, rounds in samples.items()}

    def against(figure: str, clients: int) -> float | None:
        ours, theirs = (medians.get(f"{name}, {clients}", {}).get(figure) for name in ("genpool", "llama-server"))
        return report.ratio(ours, theirs)

    bounds = {1: 0.95, 8: 1.1, 16: 1.1}
    rates = [
        report.Target(f"HTTP, {clients} clients: tokens/s / llama-server", against("tokens/s", clients), at_least=bound)
        for clients, bound in bounds.items()
    ]
    gaps = [
        report.Target(f"HTTP, {clients} clients: gap p99 / llama-server", against("gap p99 ms", clients), at_most=1)
        for clients in bounds
    ]
    return rates + gaps
