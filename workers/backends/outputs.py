"""What becomes of a choice's output as a server tells it: token ids, of which text and end are made here; or text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tasks.ports import UNTOLD, ChoiceOutput, Generation, Tokens
from tasks.vocabulary import Vocabulary
from workers.backends.dialect import News
from workers.backends.failures import Rejected, invalid_answer
from workers.sessions import Job, Session

LENGTH, STOP = "length", "stop"
_CONTENT_FILTER = "content_filter"


class Output(Protocol):
    """The output of one choice so far. `known`: token ids to go on from."""

    cached_tokens: int | None

    @property
    def ended(self) -> bool: ...

    @property
    def ends_itself(self) -> bool:
        """Whether the server ends where this has ended."""
        ...

    @property
    def known(self) -> list[int]: ...

    @property
    def can_go_on(self) -> bool:
        """Whether another request can continue it."""
        ...

    def take(self, news: News, now_s: float) -> Tokens | None:
        """What is to be told of an event. Raises UpstreamFailure."""
        ...

    def close(self, finish: str) -> Tokens | None:
        """The server says that it has ended; what is still to be told."""
        ...

    def result(self) -> ChoiceOutput: ...


class TokenOutput:
    """Of a server that tells token ids: a session like any other."""

    can_go_on = True

    def __init__(self, session: Session, vocabulary: Vocabulary) -> None:
        self.session = session
        self.cached_tokens: int | None = None
        self._vocabulary = vocabulary

    @property
    def ended(self) -> bool:
        """Whether it has, by whatever rule."""
        return bool(self.session.finish_reason)

    @property
    def ends_itself(self) -> bool:
        """At a limit and at an end of the model's own it does; a stop string is known only here."""
        session = self.session
        last = session.output[-1] if session.output else -1
        return session.finish_reason == LENGTH or (
            last in session.eos_ids and not session.generation.sampling.ignore_eos
        )

    @property
    def known(self) -> list[int]:
        """All of its tokens."""
        return self.session.output

    def take(self, news: News, now_s: float) -> Tokens | None:
        """Draw nothing, take what was drawn."""
        session, ids, pieces = self.session, list[int](), list[str]()
        for token in news.token_ids:
            if session.finish_reason:
                break
            if token >= self._vocabulary.size:
                raise invalid_answer("it holds a token that the vocabulary does not")
            pieces.append(session.take(token))
            ids.append(token)
        if not ids:
            return None
        session.told(now_s)
        job, logprobs = session.generation, news.logprobs[: len(ids)]
        if job.sampling.logprobs and len(logprobs) != len(ids):
            raise invalid_answer("log-probabilities are missing")
        shown = logprobs if job.sampling.logprobs else ()
        return Tokens(job.job, job.attempt, session.choice, tuple(ids), "".join(pieces), shown)

    def close(self, finish: str) -> Tokens | None:
        """It ended where no token says so; withheld text is shown."""
        session = self.session
        if session.finish_reason:
            return None
        session.finish_reason = LENGTH if finish == LENGTH else STOP
        piece = session.text.finish()
        if not piece:
            return None
        session.shown.append(piece)
        job = session.generation
        # No entry of a log is without a token.
        return Tokens(job.job, job.attempt, session.choice, (UNTOLD,), piece)

    def result(self) -> ChoiceOutput:
        """How it ended."""
        return self.session.result()


@dataclass(slots=True)
class TextOutput:
    """Of a server that tells text. Each piece counts as a token in the log; the server says how many there were."""

    generation: Generation
    choice: int
    pieces: list[str] = field(default_factory=list)
    finish_reason: str = ""
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    first_s: float | None = None
    last_s: float | None = None

    ends_itself = True

    @property
    def ended(self) -> bool:
        """Whether the server has said so."""
        return bool(self.finish_reason)

    @property
    def known(self) -> list[int]:
        """Of no token."""
        return []

    @property
    def can_go_on(self) -> bool:
        """Only from the beginning."""
        return not self.pieces

    def take(self, news: News, now_s: float) -> Tokens | None:
        """A piece of text, or counts."""
        if news.output_tokens is not None:
            self.output_tokens = news.output_tokens
        if news.prompt_tokens is not None:
            self.prompt_tokens = news.prompt_tokens
        if not news.text:
            return None
        self.first_s = now_s if self.first_s is None else self.first_s
        self.last_s = now_s
        self.pieces.append(news.text)
        job = self.generation
        return Tokens(job.job, job.attempt, self.choice, (UNTOLD,), news.text)

    def close(self, finish: str) -> Tokens | None:
        """It ended for this reason. Raises Rejected where the server took offence."""
        if finish == _CONTENT_FILTER:
            raise Rejected("The upstream server's content filter ended the output.", code=_CONTENT_FILTER)
        self.finish_reason = LENGTH if finish == LENGTH else STOP
        return None

    def result(self) -> ChoiceOutput:
        """How it ended."""
        tokens = len(self.pieces) if self.output_tokens is None else self.output_tokens
        return ChoiceOutput("".join(self.pieces), self.finish_reason, tokens)


def outputs_of(generation: Generation, vocabulary: Vocabulary | None) -> list[Output]:
    """Of each choice, with what earlier attempts have logged."""
    if vocabulary is None:
        return [TextOutput(generation, choice) for choice in range(generation.n)]
    job = Job.of(generation, vocabulary, frozenset(vocabulary.eos_ids), 0)
    return [TokenOutput(session, vocabulary) for session in job.sessions]
