"""Programs of agents that only send headers: a session, and in some families the agent in it.

| headers | Program | parent |
|---|---|---|
| `x-claude-code-session-id`, `-agent-id`, `-parent-agent-id` | SESSION:AGENT | SESSION:PARENT, else SESSION:lead |
| `session-id`, `thread-id` (Codex, OpenCode) | SESSION:THREAD | SESSION:lead |
| the first of `x-session-id`, `x-session-affinity`, `x-correlation-id` | SESSION:lead | none |

The first family whose session is there is the only one that counts. Without an agent it is `lead`, who has no parent.
"""

from __future__ import annotations

from typing import Protocol

from pool.errors import InvalidRequest
from pool.rules.programs.claims import LEAD, Claim, Identity, Source, joined, role_of, without_task
from pool.rules.programs.metadata import checked_text

_CLAUDE_CODE_SESSION = "x-claude-code-session-id"
_CLAUDE_CODE_AGENT = "x-claude-code-agent-id"
_CLAUDE_CODE_PARENT = "x-claude-code-parent-agent-id"
_SESSION = "session-id"
_THREAD = "thread-id"
_GENERIC = ("x-session-id", "x-session-affinity", "x-correlation-id")


class Headers(Protocol):
    """A request's headers; names are found whatever their case."""

    def get(self, name: str, /) -> str | None:
        """The header's value, None without one."""


def claim_of_headers(headers: Headers) -> Claim | None:
    """The Program that the headers name; None where no family's session is there. A blank header counts as none.

    Raises InvalidRequest that names the header.
    """
    session = _header(headers, _CLAUDE_CODE_SESSION)
    if session is not None:
        return Claim(Source.CLAUDE_CODE, _of_claude_code(session, headers))
    session = _header(headers, _SESSION)
    if session is not None:
        thread = without_task(session, _header(headers, _THREAD), _THREAD)
        # The first thread of a session carries the session's own id.
        agent = LEAD if thread is None or thread == session else thread
        return Claim(Source.SESSION_THREAD, _of_agent(session, agent, None, _SESSION))
    for name in _GENERIC:
        session = _header(headers, name)
        if session is not None:
            return Claim(Source.SESSION, _of_agent(session, LEAD, None, name))
    return None


def session_of_headers(headers: Headers) -> str | None:
    """The session alone, of the same family, for requests that belong to no Program; None without one.

    Raises InvalidRequest that names the header.
    """
    for name in (_CLAUDE_CODE_SESSION, _SESSION, *_GENERIC):
        session = _header(headers, name)
        if session is not None:
            return session
    return None


def _of_claude_code(session: str, headers: Headers) -> Identity:
    agent = without_task(session, _header(headers, _CLAUDE_CODE_AGENT), _CLAUDE_CODE_AGENT)
    if agent is None:  # A parent's header means something only beside an agent's.
        return _of_agent(session, LEAD, None, _CLAUDE_CODE_SESSION)
    parent = without_task(session, _header(headers, _CLAUDE_CODE_PARENT), _CLAUDE_CODE_PARENT)
    if parent == agent:
        raise InvalidRequest(f"{_CLAUDE_CODE_PARENT} must name another agent.", param=_CLAUDE_CODE_PARENT)
    return _of_agent(session, agent, parent, _CLAUDE_CODE_SESSION)


def _of_agent(session: str, agent: str, parent: str | None, name: str) -> Identity:
    """`parent`: the agent that this one says it descends from; `name`: the header that holds the session."""
    is_lead = agent == LEAD
    if parent is None and not is_lead:
        parent = LEAD
    return Identity(
        program_id=joined(session, agent, name),
        task_id=session,
        session_id=session,
        agent_id=agent,
        parent_program_id=None if parent is None else joined(session, parent, name),
        blocks_parent=not is_lead,
        expected_resume=is_lead,
        agent_role=role_of(agent),
    )


def _header(headers: Headers, name: str) -> str | None:
    value = headers.get(name)
    return checked_text(value, name) if value and value.strip() else None
