"""The sessions of a batching loop: one per choice of a job, from prompt to last token.

A session knows which tokens exist (prompt, then output) and how many of them the engine holds; the difference is what
it still has to feed. Tokens that an earlier attempt logged are output from the start: they are fed like any other,
never drawn again, so a takeover and a cache miss are the ordinary path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from pool.rules.admission import peak_positions
from tasks.ports import ChoiceOutput, Finished, Generation, Logits, Member, TokenIds, Tokens
from tasks.vocabulary import Vocabulary
from workers.sampling import draw, logprobs_of
from workers.text import TextStream


class Phase(StrEnum):
    """Where a session is in its life. A preempted one waits again."""

    WAITING = "waiting"
    PREFILLING = "pending-prefill"
    DECODING = "decoding"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Session:
    """One choice. `arrival`: its place in the order of arrival; `eos_ids`: the model's own ends, `stop_ids`:
    those the request names; `output`: token ids drawn or logged so far; `feed`: what is prefilled, the prompt and,
    where that gives the same bits, known output; `held`: positions whose KV the engine holds, of `room` it was given;
    `saved`: its KV as bytes while it is preempted."""

    generation: Generation
    choice: int
    id: str
    arrival: int
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    text: TextStream
    feed: TokenIds
    phase: Phase = Phase.WAITING
    held: int = 0
    room: int = 0
    saved: bytes | None = None
    #: What it began with when it first began; -1 before.
    cached: int = -1
    #: Taken into the bounded queue, and not yet active.
    queued: bool = False
    #: How often others passed it at the head of the queue.
    passed: int = 0
    #: The most positions it has held, and how many steps have found its KV gone since it got that far.
    furthest: int = 0
    misses: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    output: list[int] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def attempt(self) -> int:
        """Its KV's epoch."""
        return self.generation.attempt

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.generation.prompt)

    @property
    def peak_positions(self) -> int:
        """Positions it may come to hold."""
        return peak_positions(self.prompt_tokens, self.generation.max_tokens)

    @property
    def prefilling(self) -> bool:
        """Whether part of what is prefilled is still to be fed."""
        return self.held < len(self.feed)

    def chunk(self, stop: int) -> Member:
        """Positions [held, stop) of what is prefilled."""
        last = stop == len(self.feed) == self.prompt_tokens + len(self.output)
        return Member(self.id, self.attempt, self.feed[self.held : stop], self.held, last)

    def row(self) -> Member:
        """The next output token to feed. Its logits matter only when no later token is known yet."""
        at = self.held - self.prompt_tokens
        token = np.array([self.output[at]], dtype=np.int32)
        return Member(self.id, self.attempt, token, self.held, at == len(self.output) - 1)

    def known(self, positions: int) -> TokenIds:
        """The tokens at the first `positions`."""
        output = np.array(self.output[: max(positions - self.prompt_tokens, 0)], dtype=np.int32)
        return np.concatenate((self.generation.prompt[:positions], output))

    def rewind(self, *, with_output: bool) -> None:
        """Nothing of it is held: all is fed again, and all that is known is prefilled if `with_output`."""
        self.held = self.room = 0
        self.saved = None
        length = self.prompt_tokens + len(self.output)
        self.feed = self.known(length) if with_output and self.output else self.generation.prompt

    def draw(self, row: Logits) -> Tokens:
        """Draw the next token from `row` (V,) and take it."""
        generation, sampling, position = self.generation, self.generation.sampling, len(self.output)
        token = draw(
            row,
            sampling,
            seed=generation.seed,
            choice=self.choice,
            position=position,
            banned=self.eos_ids | self.stop_ids if position < sampling.min_tokens else (),
            prompt=generation.prompt,
            output=self.output,
        )
        logprobs = (logprobs_of(row, token, sampling.top_logprobs),) if sampling.logprobs else ()
        return Tokens(generation.job, generation.attempt, self.choice, (token,), self.take(token), logprobs)

    def told(self, now_s: float) -> float | None:
        """A token that it drew was told; how long after the one before, None for its first."""
        gap_s = None if self.last_token_s is None else now_s - self.last_token_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        return gap_s

    def take(self, token: int) -> str:
        """Append a token, decide whether the choice has ended, and return the text that became safe to show. That of a
        token that ends it is not shown, as that of a stop string is not."""
        self.output.append(token)
        sampling = self.generation.sampling
        ends = token in self.stop_ids or (token in self.eos_ids and not sampling.ignore_eos)
        piece = "" if ends else self.text.push(token, may_stop=len(self.output) > sampling.min_tokens)
        if ends or self.text.stopped:
            self.finish_reason = "stop"
        elif len(self.output) >= self.generation.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason:
            piece += self.text.finish()
        self.shown.append(piece)
        return piece

    def result(self) -> ChoiceOutput:
        """How it ended."""
        return ChoiceOutput("".join(self.shown), self.finish_reason, len(self.output))


@dataclass(slots=True, eq=False)
class Job:
    """A job's sessions; `left` counts those that have not ended; the `leader`'s prompt is prefilled first, for others
    of its choices to begin with."""

    generation: Generation
    sessions: list[Session]
    left: int
    leader: Session

    @property
    def key(self) -> tuple[str, int]:
        """What others know it by."""
        return self.generation.job, self.generation.attempt

    @classmethod
    def of(cls, generation: Generation, vocabulary: Vocabulary, eos_ids: frozenset[int], arrival: int) -> Job:
        """Logged tokens are taken. A choice whose log already holds its end is finished at once."""
        sessions = [
            _session(generation, choice, vocabulary, eos_ids, arrival + choice) for choice in range(generation.n)
        ]
        leader = next((session for session in sessions if not session.finish_reason), sessions[0])
        return cls(generation, sessions, len(sessions), leader)

    def finished(self) -> Finished:
        """The job's end, once all choices have theirs."""
        generation = self.generation
        outputs = tuple(session.result() for session in self.sessions)
        cached = self.leader.cached if self.leader.cached >= 0 else None
        return Finished(
            generation.job, generation.attempt, outputs, len(generation.prompt), cached, decode_s=self._decode_s()
        )

    def _decode_s(self) -> float | None:
        """From the first token that any choice drew to the last."""
        if any(self.generation.replay):
            return None
        began_s = [session.first_token_s for session in self.sessions if session.first_token_s is not None]
        ended_s = [session.last_token_s for session in self.sessions if session.last_token_s is not None]
        return max(ended_s) - min(began_s) if began_s and ended_s else None


def _session(
    generation: Generation, choice: int, vocabulary: Vocabulary, eos_ids: frozenset[int], arrival: int
) -> Session:
    session = Session(
        generation=generation,
        choice=choice,
        id=f"{generation.job}/{choice}",
        arrival=arrival,
        eos_ids=eos_ids,
        stop_ids=frozenset(generation.sampling.stop_token_ids),
        text=TextStream(vocabulary, generation.sampling.stop),
        feed=generation.prompt,
    )
    for token in generation.replay[choice] if generation.replay else ():
        session.take(token)
    return session
