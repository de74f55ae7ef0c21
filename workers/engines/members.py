"""What an engine checks of a batch's members before it computes anything. Nothing here names a token in a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tasks.ports import CacheMiss, Member, MemberError, TokenIds

Key = tuple[str, int]


class Begun(Protocol):
    """A session: `prompt` (P,) that it began with, holding `began` positions; `length` positions held, of `room`."""

    @property
    def prompt(self) -> TokenIds: ...

    @property
    def began(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def room(self) -> int: ...


S = TypeVar("S", bound=Begun)


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds for all members of an engine. `grid`: prefill chunks start at multiples of it, but for a session's
    first one."""

    vocabulary_size: int
    context_length: int
    grid: int


@dataclass(slots=True)
class Accepted(Generic[S]):
    """A member that may run: its session, and its tokens (T,)."""

    session: S
    tokens: npt.NDArray[np.int64]


def accept(
    member: Member, seen: set[Key], session_of: Callable[[Key], S | None], limits: Limits
) -> Accepted[S] | MemberError | CacheMiss:
    """Check one member; `seen`: keys of the batch so far, to which its own is added."""
    key = (member.session, member.epoch)
    if key in seen:
        return MemberError("the session is in this batch already")
    seen.add(key)
    tokens = np.array(member.tokens, np.int64)  # (T,)
    problem = _problem(tokens, member.start, limits)
    if problem:
        return MemberError(problem)
    session = session_of(key)
    if session is None or session.length != member.start:
        return CacheMiss()
    problem = _discontinuity(session, tokens, limits.grid)
    return MemberError(problem) if problem else Accepted(session, tokens)


def _problem(tokens: npt.NDArray[np.int64], start: int, limits: Limits) -> str | None:
    """Why these tokens cannot run in any session."""
    if tokens.ndim != 1 or len(tokens) == 0:
        return "a member needs a non-empty, one-dimensional array of tokens"
    # A decode row's only token is by far the most frequent case, where numpy's ways cost more than what they do.
    least, most = (tokens[0], tokens[0]) if len(tokens) == 1 else (tokens.min(), tokens.max())
    if least < 0 or most >= limits.vocabulary_size:
        return f"a token id is outside the vocabulary, 0 to {limits.vocabulary_size - 1}"
    if start < 0 or start + len(tokens) > limits.context_length:
        return f"position {start + len(tokens) - 1} is outside the context of {limits.context_length} positions"
    return None


def _discontinuity(session: Begun, tokens: npt.NDArray[np.int64], grid: int) -> str | None:
    """Why these tokens cannot come next in this one."""
    if len(tokens) > 1 and session.length % grid and session.length != session.began:
        return f"a prefill chunk must start at a multiple of {grid}, not at {session.length}"
    stop = session.length + len(tokens)
    if stop > session.room:
        return f"the session has room for {session.room} positions, not for {stop}"
    if session.length >= len(session.prompt):
        return None
    known = session.prompt[session.length : stop]
    if not np.array_equal(known, tokens[: len(known)]):
        return "these are not the tokens of the prompt that the session began with"
    return None
