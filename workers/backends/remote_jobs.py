"""The jobs of a runner over HTTP, and their choices: how far each is, and how a job ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tasks.ports import Finished, Generation
from workers.backends.exchange import Exchange
from workers.backends.outputs import Output, TextOutput, TokenOutput

Key = tuple[str, int]


@dataclass(eq=False, slots=True)
class Choice:
    """`whole`: the ids of its tokens come only with whole answers; `failures`: since its last token; `waits_s`: since
    when it waits for the server; `told_s`: when it told its last token; `done`: it has ended by itself."""

    job: Job
    output: Output
    whole: bool = False
    exchange: Exchange | None = None
    task: asyncio.Task[None] | None = None
    failures: int = 0
    waits_s: float | None = None
    told_s: float | None = None
    done: bool = False


@dataclass(eq=False, slots=True)
class Job:
    generation: Generation
    choices: list[Choice] = field(default_factory=list)
    over: bool = False

    @property
    def key(self) -> Key:
        """What others know it by."""
        return self.generation.job, self.generation.attempt


def finished_of(job: Job) -> Finished:
    generation, first = job.generation, job.choices[0].output
    outputs = tuple(choice.output.result() for choice in job.choices)
    prompt_tokens = first.prompt_tokens or 0 if isinstance(first, TextOutput) else len(generation.prompt)
    return Finished(*job.key, outputs, prompt_tokens, first.cached_tokens, decode_s=_decode_s(job))


def _decode_s(job: Job) -> float | None:
    """From the first token of any choice to the last; None where an earlier attempt had made some."""
    if any(job.generation.replay):
        return None
    spans = [_span_s(choice.output) for choice in job.choices]
    began_s = [began for began, _ in spans if began is not None]
    ended_s = [ended for _, ended in spans if ended is not None]
    return max(ended_s) - min(began_s) if began_s and ended_s else None


def _span_s(output: Output) -> tuple[float | None, float | None]:
    if isinstance(output, TokenOutput):
        return output.session.first_token_s, output.session.last_token_s
    assert isinstance(output, TextOutput)
    return output.first_s, output.last_s
