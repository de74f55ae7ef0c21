"""Many clients in one process: streaming chat completions at one server, each client one request after another.

    python -m benchmarks.streaming_client SERVERS_JSON TOKENS

`SERVERS_JSON` names servers: `{"NAME": {"port": 8000, "model": "a"}}`. Answers a benchmark's dialogue:

| line in | what it does | line out |
|---|---|---|
| `NAME*R N` | N clients send R requests each to that server | an object of figures, see `Run` |
| `NAME@P N` | N streams run there, and a prompt of about P tokens arrives | an object of figures, see `Arrival` |

What comes is stamped when it arrives and read only after the end, so that a client takes little of the CPU that the
server has. Every request of the first kind must give just TOKENS tokens, else the process ends with an error. Prompts
differ, and begin differently, but are the same for every server.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

HOST = "127.0.0.1"
#: Within this an answer is complete, or the benchmark fails.
ANSWER_S = 300.0
#: A prompt's words; with the chat template's own some sixty tokens.
WORDS = 24
#: Among streams: pieces that each has had when the prompt arrives; tokens of theirs, more than they ever make; tokens
#: of the newcomer's answer.
BEFORE_PIECES = 24
STREAM_TOKENS = 1024
NEWCOMER_TOKENS = 8
#: Tokens of a long prompt that are no words of its own, about.
_FRAME_TOKENS = 48
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


@dataclass(slots=True)
class Arrival:
    """`prompt_tokens`: of the prompt that arrived; `first_ms`: until its answer began; `longest_ms`: the longest gap of
    the streams that lies, in part at least, in that time; `before_ms`: their gaps before."""

    prompt_tokens: int
    first_ms: float
    longest_ms: float
    before_ms: list[float]

    @classmethod
    def of(cls, streams_ns: Sequence[Sequence[int]], *, asked_ns: int, first_ns: int, prompt_tokens: int) -> Arrival:
        """From the times at which pieces came; those of the beginning, when streams were still being let in, do not
        count."""
        pairs = [pair for each in streams_ns for pair in pairwise(each[BEFORE_PIECES // 3 :])]
        during = [(after - before) / 1e6 for before, after in pairs if after > asked_ns and before < first_ns]
        former = [(after - before) / 1e6 for before, after in pairs if after <= asked_ns]
        return cls(prompt_tokens, (first_ns - asked_ns) / 1e6, max(during), former)


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
        #: So many pieces, and whether they have come.
        self._awaited = BEFORE_PIECES
        self.running = asyncio.Event()

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
        if len(self.pieces) == self._awaited:
            self.running.set()
        self._tail = self._tail[-len(_DONE) :] + data
        if _DONE in self._tail and not self.ended.done():
            self.ended.set_result(None)
            self.leave()

    def leave(self) -> None:
        """Close the connection."""
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


def contents(times_ns: list[int], pieces: list[bytes]) -> tuple[list[int], dict[str, Any]]:
    """When each event with content came, and the usage, where it was told."""
    usage: dict[str, Any] = {}
    content_ns: list[int] = []
    for at_ns, chunk in events(times_ns, pieces):
        usage = chunk.get("usage") or usage
        if any(choice["delta"].get("content") for choice in chunk.get("choices", [])):
            content_ns.append(at_ns)
    return content_ns, usage


def tally(run: Run, times_ns: list[int], pieces: list[bytes], *, asked_ns: int, tokens: int) -> None:
    """Count one answer. Raises ValueError when it has not just `tokens` tokens, or names no usage."""
    content_ns, usage = contents(times_ns, pieces)
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

    async def obey(self, word: str, count: int) -> Run | Arrival:
        """One line of the dialogue."""
        name, mark, number = re.split(r"([*@])", word)
        act = self.run if mark == "*" else self.arrive
        return await act(name, count, int(number))

    async def run(self, name: str, clients: int, requests: int) -> Run:
        """Let `clients` clients send `requests` requests each to the server of this name."""
        server = self._servers[name]
        turn = self._asked[name, clients, requests]
        self._asked[name, clients, requests] += 1
        bodies = [
            [
                self._request(server, f"{turn} {clients} {client} {number}", tokens=self._tokens)
                for number in range(requests)
            ]
            for client in range(clients)
        ]
        started_s = time.perf_counter()
        answers = await asyncio.gather(*(self._client(server["port"], each) for each in bodies))
        run = Run(took_s=time.perf_counter() - started_s)
        for answer in (answer for each in answers for answer in each):
            tally(run, answer.times_ns, answer.pieces, asked_ns=answer.asked_ns, tokens=self._tokens)
        return run

    async def arrive(self, name: str, streams: int, prompt_tokens: int) -> Arrival:
        """Let so many streams run at the server of this name, and a prompt of about so many tokens arrive."""
        server = self._servers[name]
        turn = self._asked[name, streams, -prompt_tokens]
        self._asked[name, streams, -prompt_tokens] += 1
        seeds = [f"arrival {turn} {stream}" for stream in range(streams)]
        running = [Answer(self._request(server, seed, tokens=STREAM_TOKENS)) for seed in seeds]
        words = prompt_tokens - _FRAME_TOKENS
        newcomer = Answer(self._request(server, f"arrival {turn}", tokens=NEWCOMER_TOKENS, words=words))
        for each in running:
            await self._connect(server["port"], each)
        try:
            await asyncio.wait_for(asyncio.gather(*(each.running.wait() for each in running)), ANSWER_S)
            await self._connect(server["port"], newcomer)
            await asyncio.wait_for(newcomer.ended, ANSWER_S)
        finally:
            for each in running:
                each.leave()
            # That they break off is meant.
            await asyncio.gather(*(each.ended for each in running), return_exceptions=True)
        first_ns, usage = contents(newcomer.times_ns, newcomer.pieces)
        return Arrival.of(
            [contents(each.times_ns, each.pieces)[0] for each in running],
            asked_ns=newcomer.asked_ns,
            first_ns=first_ns[0],
            prompt_tokens=usage["prompt_tokens"],
        )

    async def _client(self, port: int, requests: list[bytes]) -> list[Answer]:
        answers = []
        for request in requests:
            answer = Answer(request)
            await self._connect(port, answer)
            await asyncio.wait_for(answer.ended, ANSWER_S)
            answers.append(answer)
        return answers

    async def _connect(self, port: int, answer: Answer) -> None:
        await asyncio.get_running_loop().create_connection(partial(_same, answer), HOST, port)

    def _request(self, server: dict[str, Any], seed: str, *, tokens: int, words: int = WORDS) -> bytes:
        chosen = random.Random(seed).choices(_VOCABULARY, k=words)
        body = json.dumps(
            {
                "model": server["model"],
                "messages": [{"role": "user", "content": f"Write a long story about: {' '.join(chosen)}"}],
                "max_tokens": tokens,
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
        print(json.dumps(asdict(await clients.obey(word, int(count)))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
