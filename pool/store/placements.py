"""What passes between the store and a worker for a Program's job: its place, and what it told of the Program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pool.rules.programs.windows import RequestSample
from pool.store.scripts import Value

#: Fields of the record as program_begin replies them.
PLACED = ("gen", "epoch", "prompt", "ctx", "shared", "fresh_ms", "rounds", "segment", "finish_ms", "activated_ms")


@dataclass(slots=True)
class Placement:
    """The place that a job was sent to, as far as its end needs it. `program`: the Program's id; `generation`, `epoch`:
    of the place; `front`: the job behind it in the pool, once a verb has named it. As its attempt began:
    `previous_prompt_tokens`: 0 before the first; `context_tokens`, `shared_tokens`, `fresh_until_ms` (None: never
    observed); `rounds` since it became active, at `activated_ms`, `segment_rounds` since it was last paused by TTL;
    `last_finish_ms`: end of its last request, 0 before the first; `dispatched_ms`: when the job was sent;
    `retention_ms`: its hint, None without one."""

    program: str
    rank: str
    generation: int
    epoch: int
    previous_prompt_tokens: int = 0
    context_tokens: int = 0
    shared_tokens: int = 0
    fresh_until_ms: int | None = None
    rounds: int = 0
    segment_rounds: int = 0
    activated_ms: int = 0
    last_finish_ms: int = 0
    dispatched_ms: int = 0
    retention_ms: int | None = None
    front: str = ""

    @property
    def is_first(self) -> bool:
        """Whether the Program had completed nothing in this place when the attempt began."""
        return self.last_finish_ms <= self.activated_ms


def placement_of(program: str, rank: str, reply: Sequence[Any]) -> Placement:
    """Decode what program_begin says beside what begin does."""
    _, _, values, dispatched_ms, retention_ms = reply
    known = {name: int(value) for name, value in zip(PLACED, values, strict=True) if value is not None}
    return Placement(
        program=program,
        rank=rank,
        generation=known["gen"],
        epoch=known["epoch"],
        previous_prompt_tokens=known.get("prompt", 0),
        context_tokens=known.get("ctx", 0),
        shared_tokens=known.get("shared", 0),
        fresh_until_ms=known.get("fresh_ms"),
        rounds=known.get("rounds", 0),
        segment_rounds=known.get("segment", 0),
        activated_ms=known.get("activated_ms", 0),
        last_finish_ms=known.get("finish_ms", 0),
        dispatched_ms=int(dispatched_ms or 0),
        retention_ms=None if retention_ms is None else int(retention_ms),
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a completed request tells of its Program.

    `context_tokens`: prompt and output; `ttl_ms`: how long its place is kept, 0 not at all, and `automatic_ms`, the
    part of it that the statistics would give; `impact_s`: what it would cost if its KV were lost; `is_round`: whether
    it prolongs the segment; `shared_tokens`, `fresh_until_ms`: an observed shared prefix, None to leave it as it is;
    `sample`: for the window of requests.
    """

    prompt_tokens: int
    context_tokens: int
    ttl_ms: int = 0
    automatic_ms: int = 0
    impact_s: float = 0.0
    is_round: bool = True
    shared_tokens: int | None = None
    fresh_until_ms: int | None = None
    sample: RequestSample | None = None

    def fields(self) -> list[Value]:
        """As program_complete takes it: name, number ..."""
        pairs: dict[str, Value] = {
            "prompt": self.prompt_tokens,
            "context": self.context_tokens,
            "ttl": self.ttl_ms,
            "automatic": min(self.automatic_ms, self.ttl_ms),
            "impact": round(self.impact_s * 1_000_000),
            "round": int(self.is_round),
        }
        if self.shared_tokens is not None and self.fresh_until_ms is not None:
            pairs |= {"shared": self.shared_tokens, "fresh": self.fresh_until_ms}
        return [item for pair in pairs.items() for item in pair]

    def packed_sample(self) -> bytes:
        """The sample as it is stored, b"" for none."""
        return b"" if self.sample is None else self.sample.packed()


#: Of a request of which nothing is known: its place is not kept.
NOTHING = Outcome(0, 0)
