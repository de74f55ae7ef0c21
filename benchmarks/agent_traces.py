"""Work of agents from recorded traces, made small: what each request sends, and how long its tools run before it.

A *task* is a few requests in a row of one session, sent by one agent: a Program. Lengths are divided by k. A prompt is
made of the numbers of its blocks, so two prompts of a task share just the beginning that the recorded ones shared; all
tasks share the beginning that stands for tools and system prompt, and nothing else.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

DATA = Path(__file__).parent / "data"
#: Tokens of a block of the recorded prompts.
BLOCK_TOKENS = 64
#: Ordinary tokens of the benchmark's model: those behind its three control tokens.
FIRST_TOKEN, LAST_TOKEN = 3, 511

#: `capped`: as recorded, a second at most. `divided`: by k, as lengths are. `recorded`: as they are.
Gaps = Literal["capped", "divided", "recorded"]


@dataclass(frozen=True, slots=True)
class Regime:
    """Which traces, divided by `k`, with which gaps."""

    source: str
    k: int
    gaps: Gaps

    def gap_s(self, recorded_ms: int) -> float:
        """How long a tool runs."""
        seconds = recorded_ms / 1000
        return min(seconds, 1.0) if self.gaps == "capped" else seconds / self.k if self.gaps == "divided" else seconds


REGIMES = {
    "capped": Regime("claude_code", 64, "capped"),
    "divided": Regime("claude_code", 64, "divided"),
    # Its contexts are small: with this they have the others' mean length.
    "swe": Regime("swe_agent", 2, "recorded"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """`blocks`: first and count of each run of block numbers; `shared_tokens`: of its prompt, with all tasks;
    `gap_s`: between the end of the request before and this one."""

    blocks: tuple[int, ...]
    block_tokens: int
    shared_tokens: int
    output_tokens: int
    gap_s: float

    @property
    def prompt_tokens(self) -> int:
        """Length of its prompt."""
        return sum(self.blocks[1::2]) * self.block_tokens

    def prompt(self, task: str) -> list[int]:
        """Its token ids. `task`: whose it is."""
        numbers = [
            number
            for start, count in zip(self.blocks[::2], self.blocks[1::2], strict=True)
            for number in range(start, start + count)
        ]
        tokens = [token for number in numbers for token in _tokens_of_block(f"{task}:{number}", self.block_tokens)]
        shared = min(self.shared_tokens, len(tokens))
        tokens[:shared] = _shared(shared)
        return tokens


@dataclass(frozen=True, slots=True)
class Task:
    """Requests that one agent sends, one after the other. `name`: of its Program; no other task has it."""

    name: str
    requests: tuple[Request, ...]

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of its longest request: what its KV grows to."""
        return max(request.prompt_tokens + request.output_tokens for request in self.requests)


def load(source: str) -> list[dict[str, Any]]:
    """The sessions of an extract."""
    lines = (DATA / f"{source}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def tasks(regime: Regime, *, length: int, longest_tokens: int, seed: int) -> list[Task]:
    """All sessions cut into tasks of `length` requests, in an order that `seed` decides; without those with a request
    of more than `longest_tokens`, output included."""
    found = [
        task
        for session in load(regime.source)
        for start in range(0, len(session["requests"]) - length + 1, length)
        if (task := _task(session, start, length, regime)).longest_tokens <= longest_tokens
    ]
    random.Random(seed).shuffle(found)
    return found


def working_set_tokens(chosen: Iterable[Task], agents: int) -> int:
    """KV that `agents` tasks hold at once, when all of them keep theirs: the mean of what tasks grow to."""
    lengths = [task.longest_tokens for task in chosen]
    return round(sum(lengths) / len(lengths) * agents)


def _task(session: dict[str, Any], start: int, length: int, regime: Regime) -> Task:
    requests = [
        _request(each, regime, session["shared"], is_first=number == 0)
        for number, each in enumerate(session["requests"][start : start + length])
    ]
    return Task(f"{session['id']}-{start}", tuple(requests))


def _request(recorded: Sequence[Any], regime: Regime, shared: int, *, is_first: bool) -> Request:
    length, output, gap_ms, runs = recorded
    block_tokens = max(BLOCK_TOKENS // regime.k, 1)
    # Where nothing is told of blocks, the prompt only grows.
    blocks = runs or [1, max(length // BLOCK_TOKENS, 1)]
    return Request(
        blocks=tuple(blocks),
        block_tokens=block_tokens,
        shared_tokens=shared // regime.k,
        output_tokens=max(output // regime.k, 1),
        gap_s=0.0 if is_first else regime.gap_s(gap_ms),
    )


def _tokens_of_block(name: str, count: int) -> list[int]:
    digest = blake2b(name.encode(), digest_size=min(2 * count, 64)).digest()
    values = [int.from_bytes(digest[at : at + 2], "big") for at in range(0, len(digest), 2)]
    return [FIRST_TOKEN + values[at % len(values)] % (LAST_TOKEN - FIRST_TOKEN + 1) for at in range(count)]


@cache
def _shared(count: int) -> list[int]:
    """The first tokens of every prompt."""
    return [_tokens_of_block(f"shared:{number}", 1)[0] for number in range(count)]
