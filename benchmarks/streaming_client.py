"""Many clients in one process: streaming chat completions at one server, each client one request after another.

    python -m benchmarks.streaming_client SERVERS_JSON TOKENS

`SERVERS_JSON` names servers: `{"NAME": {"port": 8000, "model": "a"}}`. Answers a benchmark's dialogue:

| line in | what it does | line out |
|---|---|---|
| `NAME*R N` | N clients send R requests each to that server | an object of figures, see `Run` |

What comes is stamped when it arrives and read only after the end, so that a client takes little of the CPU that the
server has. Every request must give just TOKENS tokens, else the process ends with an error. Prompts differ, and
begin differently, but are the same for every server.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

HOST = "127.0.0.1"
#: Within this an answer is complete, or the benchmark fails.
ANSWER_S = 120.0
#: A prompt's words; with the chat template's own some sixty tokens.
WORDS = 24
_VOCABULARY = re.findall(
    r"[a-z]+",
    "river stone music window garden winter letter bridge candle forest market silver ocean paper road shadow "
    "summer table thunder village water yellow animal bottle castle doctor engine flower guitar island kitchen",
)
_DONE = b"data: [DONE]"


@dataclass(slots=True)
class Run:
    """Seconds from the first request to the last answer's end; output and prompt tokens in all; by request, the time to
    its first content; all times between two pieces of content of one answer."""

    took_s: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int = 0
    first_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)


class Answer(asyncio.Protocol):
    """One request over a connection of its own, and what comes, with its arrival times."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self.times_ns: list[int] = []
        self.pieces: list[bytes] = []
        self.asked_ns = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.asked_ns = time.perf_counter_ns()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Stamp it."""
        self.times_ns.append(time.perf_counter_ns())
        self.pieces.append(data)
        self._tail = self._tail[-len(_DONE) :] + data
        if _DONE in self._tail and not self.ended.done():
            self.ended.set_result(None)
            assert self._transport is not None
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        """An answer that breaks off is an error."""
        if not self.ended.done():
            start = b"".join(self.pieces)[:500].decode(errors="replace")
            self.ended.set_exception(ConnectionError(f"an answer broke off; it began with: {start!r}"))


def events(times_ns: list[int], pieces: list[bytes]) -> list[tuple[int, dict[str, Any]]]:
    """The server-sent events of a chunked answer, each with the arrival of its last byte. Raises ValueError for another
    status than 200 and for a body that is not chunked."""
    raw = b"".join(pieces)
    ends = list(accumulate(map(len, pieces)))
    head, found, _ = raw.partition(b"\r\n\r\n")
    if not found or not head.startswith(b"HTTP/1.1 200 ") or b"transfer-encoding: chunked" not in head.lower():
        raise ValueError(f"no chunked answer: {raw[:500].decode(errors='replace')}")
    at, rest, read = len(head) + 4, b"", []
    while at < len(raw):
        line = raw.find(b"\r\n", at)
        length = int(raw[at:line], 16) if line > 0 else 0
        if not length:
            break
        end = line + 2 + length
        arrived_ns = times_ns[min(bisect_left(ends, end), len(ends) - 1)]
        *whole, rest = (rest + raw[line + 2 : end]).split(b"\n\n")
        read += [(arrived_ns, each.partition(b"data: ")[2]) for each in whole if b"data: {" in each]
        at = end + 2
    return [(arrived_ns, json.loads(data)) for arrived_ns, data in read]


def tally(run: Run, times_ns: list[int], pieces: list[bytes], *, asked_ns: int, tokens: int) -> None:
    """Count one answer. Raises ValueError when it has not just `tokens` tokens, or names no usage."""
    usage: dict[str, Any] = {}
    content_ns: list[int] = []
    for at_ns, chunk in events(times_ns, pieces):
        usage = chunk.get("usage") or usage
        if any(choice["delta"].get("content") for choice in chunk.get("choices", [])):
            content_ns.append(at_ns)
    if usage.get("completion_tokens") != tokens or not content_ns or len(content_ns) > tokens:
        raise ValueError(f"an answer of {len(content_ns)} pieces, not of {tokens} tokens; usage: {usage}")
    run.output_tokens += tokens
    run.prompt_tokens += usage["prompt_tokens"]
    run.first_ms.append((content_ns[0] - asked_ns) / 1e6)
    run.gaps_ms += [(later - earlier) / 1e6 for earlier, later in pairwise(content_ns)]


def _same(answer: Answer) -> Answer:
    return answer


class Clients:
    """`tokens`: of each answer."""

    def __init__(self, servers: dict[str, dict[str, Any]], tokens: int) -> None:
        self._servers = servers
        self._tokens = tokens
        self._asked: Counter[tuple[str, int, int]] = Counter()

    async def run(self, name: str, clients: int, requests: int) -> Run:
        """Let `clients` clients send `requests` requests each to the server of this name."""
        server = self._servers[name]
        turn = self._asked[name, clients, requests]
        self._asked[name, clients, requests] += 1
        bodies = [
            [self._request(server, f"{turn} {clients} {client} {number}") for number in range(requests)]
            for client in range(clients)
        ]
        started_s = time.perf_counter()
        answers = await asyncio.gather(*(self._client(server["port"], each) for each in bodies))
        run = Run(took_s=time.perf_counter() - started_s)
        for answer in (answer for each in answers for answer in each):
            tally(run, answer.times_ns, answer.pieces, asked_ns=answer.asked_ns, tokens=self._tokens)
        return run

    async def _client(self, port: int, requests: list[bytes]) -> list[Answer]:
        answers = []
        for request in requests:
            answer = Answer(request)
            await asyncio.get_running_loop().create_connection(partial(_same, answer), HOST, port)
            await asyncio.wait_for(answer.ended, ANSWER_S)
            answers.append(answer)
        return answers

    def _request(self, server: dict[str, Any], seed: str) -> bytes:
        words = random.Random(seed).choices(_VOCABULARY, k=WORDS)
        body = json.dumps(
            {
                "model": server["model"],
                "messages": [{"role": "user", "content": f"Write a long story about: {' '.join(words)}"}],
                "max_tokens": self._tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}:{server['port']}\r\n"
        fields = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return f"{head}{fields}{body}".encode()


async def main() -> None:
    """Answer until the input ends."""
    servers, tokens = sys.argv[1:]
    clients = Clients(json.loads(servers), int(tokens))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word, count = line.split()
        name, _, requests = word.partition("*")
        print(json.dumps(asdict(await clients.run(name, int(count), int(requests)))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
