"""The sessions of a batching loop: one per choice of a job, from prompt to last token.

A session knows which tokens exist (prompt, then output) and how many of them the engine holds; the difference is what
it still has to feed. Tokens that an earlier attempt logged are output from the start: they are fed like any other,
never drawn again, so a takeover and a cache miss are the ordinary path.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pool.rules.batching import peak_positions
from tasks.ports import ChoiceOutput, Generation, Logits, Member, Tokens
from tasks.vocabulary import Vocabulary
from workers.sampling import draw, logprobs_of
from workers.text import TextStream


@dataclass(slots=True, eq=False)
class Session:
    """One choice. `eos_ids`: the model's own ends, `stop_ids`: those the request names; `held`: positions whose KV the
    engine holds; `output`: token ids drawn or logged so far."""

    generation: Generation
    choice: int
    id: str
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    text: TextStream
    held: int = 0
    output: list[int] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    finish_reason: str = ""

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
        """Whether part of the prompt is still to be fed."""
        return self.held < self.prompt_tokens

    def chunk(self, stop: int) -> Member:
        """Prompt positions [held, stop)."""
        last = stop == self.prompt_tokens and not self.output
        return Member(self.id, self.generation.attempt, self.generation.prompt[self.held : stop], self.held, last)

    def row(self) -> Member:
        """The next output token to feed. Its logits matter only when no later token is known yet."""
        at = self.held - self.prompt_tokens
        token = np.array([self.output[at]], dtype=np.int32)
        return Member(self.id, self.generation.attempt, token, self.held, at == len(self.output) - 1)

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

    def take(self, token: int) -> str:
        """Append a token, decide whether the choice has ended, and return the text that became safe to show. That of a
        stop token is not shown, as that of a stop string is not."""
        self.output.append(token)
        sampling = self.generation.sampling
        stops = token in self.stop_ids
        piece = "" if stops else self.text.push(token)
        if stops or self.text.stopped or (token in self.eos_ids and not sampling.ignore_eos):
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


def sessions_of(generation: Generation, vocabulary: Vocabulary, eos_ids: frozenset[int]) -> list[Session]:
    """A job's sessions, logged tokens taken. One whose log already holds its end is finished at once."""
    return [_session(generation, choice, vocabulary, eos_ids) for choice in range(generation.n)]


def _session(generation: Generation, choice: int, vocabulary: Vocabulary, eos_ids: frozenset[int]) -> Session:
    session = Session(
        generation=generation,
        choice=choice,
        id=f"{generation.job}/{choice}",
        eos_ids=eos_ids,
        stop_ids=frozenset(generation.sampling.stop_token_ids),
        text=TextStream(vocabulary, generation.sampling.stop),
    )
    for token in generation.replay[choice] if generation.replay else ():
        session.take(token)
    return session
