"""What a request may say of its Program: the Program's names, hints for this one request, and how ids of tasks and
agents become a Program's id.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pool.errors import InvalidRequest
from pool.program_settings import CANONICAL_KEY
from pool.rules.programs.metadata import MAX_STRING_BYTES, checked_text

#: The agent of a task or session that has no name of its own, and the role of every other one.
LEAD = "lead"
SUBAGENT = "subagent"


class Source(StrEnum):
    """What told the Program of a request."""

    AGENTIC_CONTEXT = "agentic_context"
    AGENT_HINT = "agent_hint"
    CLAUDE_CODE = "claude_code"
    SESSION_THREAD = "session_thread"
    SESSION = "session"


_HEADERS = frozenset({Source.CLAUDE_CODE, Source.SESSION_THREAD, Source.SESSION})


@dataclass(frozen=True, slots=True)
class Identity:
    """A Program's names and its place among others. `blocks_parent`: whether its parent waits for it;
    `expected_resume`: whether more requests are expected after this one, and `says_resume`, whether the request said so
    itself: only then does False end the Program; `step_id`: None where the request does not number its steps."""

    program_id: str
    task_id: str | None = None
    session_id: str | None = None
    agent_id: str | None = None
    parent_program_id: str | None = None
    root_program_id: str | None = None
    blocks_parent: bool = False
    expected_resume: bool = True
    says_resume: bool = False
    agent_role: str | None = None
    spawn_reason: str | None = None
    step_id: int | None = None

    @property
    def ends_program(self) -> bool:
        """Whether the Program is over when this request has completed."""
        return self.says_resume and not self.expected_resume


@dataclass(frozen=True, slots=True)
class Hints:
    """What one request asks for itself; they die with it. None: nothing was said. Durations are in seconds."""

    request_id: str | None = None
    priority: int = 0
    deadline_seconds: float | None = None
    expected_output_length: int | None = None
    kv_retention_ttl_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request says of its Program, and by which source."""

    source: Source
    identity: Identity
    hints: Hints = Hints()

    @property
    def hash_key(self) -> str:
        """What consistent hashing goes by when the Program is first bound; at most 256 bytes. Agents that only send
        headers share the home of their session, and with it the prompt that they all begin with."""
        session = self.identity.session_id if self.source in _HEADERS else None
        return session or self.identity.program_id


def check_limits(hints: Hints, *, max_priority: int | None, min_deadline_seconds: float | None) -> None:
    """Raise InvalidRequest for hints beyond what the caller's key allows; None allows everything."""
    if max_priority is not None and hints.priority > max_priority:
        raise InvalidRequest(
            f"This key allows a priority of at most {max_priority}.", param=f"{CANONICAL_KEY}.priority"
        )
    deadline_seconds = hints.deadline_seconds
    if min_deadline_seconds is not None and deadline_seconds is not None and deadline_seconds < min_deadline_seconds:
        raise InvalidRequest(
            f"This key allows a deadline of at least {min_deadline_seconds:g} seconds.",
            param=f"{CANONICAL_KEY}.deadline_seconds",
        )


def role_of(agent: str) -> str:
    """What an agent is where nobody says it."""
    return LEAD if agent == LEAD else SUBAGENT


def joined(task: str, agent: str, name: str) -> str:
    """The Program of an agent in a task or session. `name`: the field to name where that is too long."""
    program_id = f"{task}:{agent}"
    if len(program_id.encode()) > MAX_STRING_BYTES:
        raise InvalidRequest(f"{name}: TASK:AGENT must have at most {MAX_STRING_BYTES} bytes of UTF-8.", param=name)
    return program_id


def without_task(task: str | None, agent: str | None, name: str) -> str | None:
    """The agent's id, where it was given as TASK:AGENT. `name`: the field to name where only TASK: was."""
    if task is None or agent is None or not agent.startswith(f"{task}:"):
        return agent
    return checked_text(agent[len(task) + 1 :], name)
