"""Agents that replay tasks against one API process: each one request after another, with its tools' time between.

    python -m benchmarks.agent_load LOAD_JSON

Prints one JSON object with what every request saw; `Load` is what may be asked for, `Seen` what is told. An agent whose
task is over begins the next one that nobody has begun. The first `warm_requests` that end are the warm-up, whatever
they take, and so are those of abandoned Programs; then it goes on for `seconds`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial

from benchmarks.agent_traces import REGIMES, Request, Task, tasks
from benchmarks.streaming_client import HOST, Answer, events

#: Within this a request is answered, or the benchmark fails.
ANSWER_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """What to do. `agents`: at once; `task_requests`: requests of a task; `longest_tokens`: of prompt and output;
    `programs`: whether requests name their Program; `abandoned`: Programs that send one request in the warm-up and
    never say that they are over."""

    port: int
    model: str
    regime: str
    agents: int
    task_requests: int
    longest_tokens: int
    warm_requests: int
    seconds: float
    programs: bool = True
    abandoned: int = 0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """One request, with seconds since the warm-up ended (negative: in it). `first_s`: until its first token;
    `task_s`: of a task's last request, since the task began; else -1."""

    agent: int
    asked_s: float
    first_s: float
    took_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    task_s: float = -1.0

    @property
    def ended_s(self) -> float:
        """When its answer was complete."""
        return self.asked_s + self.took_s


class Agents:
    """Replays a load. `warm_s`: when the warm-up ended, 0 before."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._work = self._endless(
            tasks(REGIMES[load.regime], length=load.task_requests, longest_tokens=load.longest_tokens, seed=load.seed)
        )
        self.seen: list[Seen] = []
        self.warm_s = 0.0

    def _endless(self, found: list[Task]) -> Iterator[Task]:
        """Each again and again, as another one each time: it shares nothing with itself."""
        for turn in itertools.count():
            yield from (replace(task, name=f"{task.name}.{turn}") for task in found)

    async def run(self) -> list[Seen]:
        """All of it."""
        load = self._load
        agents = [asyncio.create_task(self._agent(number)) for number in range(load.agents)]
        abandoned = [asyncio.create_task(self._abandon(number)) for number in range(load.abandoned)]
        waits = [*agents, *abandoned]
        try:
            while len(self.seen) < load.warm_requests or not all(each.done() for each in abandoned):
                await asyncio.sleep(0.02)
                _raise_first(waits)
            self.warm_s = time.monotonic()
            await asyncio.sleep(load.seconds)
            _raise_first(waits)
        finally:
            for each in waits:
                each.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*waits, return_exceptions=True)
        return [replace(each, asked_s=each.asked_s - self.warm_s) for each in self.seen]

    async def _agent(self, number: int) -> None:
        # They do not all begin at once: the first prompts would come together.
        await asyncio.sleep(number * 0.2)
        while True:
            task = next(self._work)
            began_s = time.monotonic()
            for at, request in enumerate(task.requests):
                await asyncio.sleep(request.gap_s)
                seen = await self._ask(number, task.name, request, is_last=at == len(task.requests) - 1)
                if at == len(task.requests) - 1:
                    seen = replace(seen, task_s=time.monotonic() - began_s)
                self.seen.append(seen)

    async def _abandon(self, number: int) -> None:
        """One request in the second half of the warm-up, and then nothing ever."""
        while len(self.seen) < self._load.warm_requests // 2:
            await asyncio.sleep(0.05)
        await asyncio.sleep(number * 0.05)
        task = next(self._work)
        await self._ask(-1, f"abandoned-{number}", task.requests[0], is_last=False)

    async def _ask(self, agent: int, name: str, request: Request, *, is_last: bool) -> Seen:
        answer = Answer(self._message(name, request, is_last=is_last))
        asked_s = time.monotonic()
        await asyncio.get_running_loop().create_connection(partial(_same, answer), HOST, self._load.port)
        try:
            await asyncio.wait_for(answer.ended, ANSWER_S)
        finally:
            answer.leave()
        return seen_of(agent, answer, asked_s, request)

    def _message(self, name: str, request: Request, *, is_last: bool) -> bytes:
        body = {
            "model": self._load.model,
            "prompt": request.prompt(name),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._load.programs:
            context = {"program_id": name, "expected_resume": not is_last}
            body["vllm_xargs"] = {"agentic_context": context}
        encoded = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(encoded)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + encoded


def _same(answer: Answer) -> Answer:
    return answer


def _raise_first(waits: list[asyncio.Task[None]]) -> None:
    """Raise what ended one of them."""
    for each in waits:
        if each.done() and not each.cancelled() and (error := each.exception()) is not None:
            raise error


def seen_of(agent: int, answer: Answer, asked_s: float, request: Request) -> Seen:
    """From what came over the wire. Raises ValueError for an answer without the tokens that were asked for."""
    usage: dict[str, int] = {}
    cached, first_ns = 0, 0
    for at_ns, chunk in events(answer.times_ns, answer.pieces):
        if any(choice.get("text") or choice.get("finish_reason") for choice in chunk.get("choices", [])):
            first_ns = first_ns or at_ns
        if told := chunk.get("usage"):
            usage = told
            cached = (told.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if usage.get("completion_tokens") != request.output_tokens or usage["prompt_tokens"] != request.prompt_tokens:
        start = b"".join(answer.pieces)[:600].decode(errors="replace")
        raise ValueError(f"not the answer that was asked for: usage {usage}; it began with {start!r}")
    return Seen(
        agent=agent,
        asked_s=asked_s,
        first_s=(first_ns - answer.asked_ns) / 1e9,
        took_s=(answer.times_ns[-1] - answer.asked_ns) / 1e9,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=cached,
        output_tokens=usage["completion_tokens"],
    )


def main() -> None:
    """Replay, and print."""
    seen = asyncio.run(Agents(Load(**json.loads(sys.argv[1]))).run())
    print(json.dumps([asdict(each) for each in seen]))


if __name__ == "__main__":
    main()
