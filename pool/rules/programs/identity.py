"""Which Program a request belongs to, and what it asks of the scheduler.

| source, in order | looked at with | Program | parent |
|---|---|---|---|
| body `vllm_xargs.agentic_context`, object or JSON | always | `program_id`, else TASK:AGENT | as said, else TASK:lead |
| body `agent_hint` | `auto` | `session_id` | `parent_session_id` |
| headers of known agents: `session_headers` | `auto` | SESSION:AGENT | SESSION:PARENT, else SESSION:lead |

The first source that is there is the only one that counts: they are never mixed. TASK is `task_id`, else `session_id`.
An agent without a name is `lead`; any other is a sub-agent that descends from it. Request and trace ids make no
Program. Whose a Program is, the tenant's key says, never the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pool.errors import InvalidRequest
from pool.program_settings import CANONICAL_KEY
from pool.rules.programs.claims import LEAD, SUBAGENT, Claim, Hints, Identity, Source, joined, role_of, without_task
from pool.rules.programs.metadata import MAX_WHOLE, Metadata, read_object, read_object_or_json
from pool.rules.programs.session_headers import Headers, claim_of_headers

#: What fits 32 bits, so that a record of it stays small.
MAX_PRIORITY = 2**31 - 1
MAX_OUTPUT_TOKENS = 2**31 - 1


def claim_of(body: Mapping[str, Any], headers: Headers, enable_key: str) -> Claim | None:
    """The Program that a request says it belongs to, None for a request that belongs to none.

    `enable_key`: the setting `program_scheduling_enable_key`. Raises InvalidRequest that names the field and the limit
    for a source that is there and malformed; a source that is not looked at may hold anything.
    """
    extensions = read_object(body.get("vllm_xargs"), "vllm_xargs")
    if extensions is not None:
        context = read_object_or_json(extensions.fields.get("agentic_context"), CANONICAL_KEY)
        if context is not None:
            return _of_context(context)
    if enable_key == CANONICAL_KEY:
        return None
    hint = read_object(body.get("agent_hint"), "agent_hint")
    if hint is not None:
        return Claim(Source.AGENT_HINT, _of_hint(hint))
    return claim_of_headers(headers)


# --- vllm_xargs.agentic_context


def _of_context(context: Metadata) -> Claim | None:
    """None where it names no Program: hints and request ids alone make none. It is checked all the same."""
    hints = Hints(
        request_id=context.text("request_id"),
        priority=context.whole("priority", least=-MAX_PRIORITY, most=MAX_PRIORITY) or 0,
        deadline_seconds=context.seconds("deadline_seconds", "deadline"),
        expected_output_length=context.whole(
            "expected_output_length", "expected_output_tokens", least=0, most=MAX_OUTPUT_TOKENS
        ),
        kv_retention_ttl_seconds=context.seconds("kv_retention_ttl_seconds", "kv_retention_ttl"),
    )
    identity = _identity_of_context(context)
    return None if identity is None else Claim(Source.AGENTIC_CONTEXT, identity, hints)


def _identity_of_context(context: Metadata) -> Identity | None:
    named = context.text("program_id")
    session = context.text("session_id")
    task = context.text("task_id") or session
    agent = without_task(task, context.text("agent_id"), f"{context.path}.agent_id")
    if agent is None and named is None and task is not None:
        agent = LEAD
    role = context.text("agent_role") or (None if agent is None else role_of(agent))
    program_id = named
    if program_id is None and task is not None and agent is not None:
        program_id = joined(task, agent, f"{context.path}.program_id")
    parent = _parent(context, program_id, task, agent, role)
    blocks = _blocks(context, parent, default=role == SUBAGENT)
    says_resume = context.yes_or_no("expected_resume")
    identity = Identity(
        program_id=program_id or "",
        task_id=task,
        session_id=session,
        agent_id=agent,
        parent_program_id=parent,
        root_program_id=context.text("root_program_id", "root_id"),
        blocks_parent=blocks,
        expected_resume=not (blocks and role == SUBAGENT) if says_resume is None else says_resume,
        says_resume=says_resume is not None,
        agent_role=role,
        spawn_reason=context.text("spawn_reason", "subagent_type", "agent_type"),
        step_id=context.whole("step_id", least=0, most=MAX_WHOLE),
    )
    return None if program_id is None else identity


def _parent(
    context: Metadata, program_id: str | None, task: str | None, agent: str | None, role: str | None
) -> str | None:
    """The parent as said, by its id or by its agent; else the lead of a sub-agent's task."""
    field = f"{context.path}.parent_program_id"
    parent = context.text("parent_program_id", "parent_id")
    parent_agent = without_task(task, context.text("parent_agent_id"), f"{context.path}.parent_agent_id")
    if parent is None and parent_agent is not None:
        parent = _relative(program_id, task, agent, parent_agent, field)
    if parent is not None:
        if parent == program_id:
            raise InvalidRequest(f"{field} must name another Program than this one.", param=field)
        return parent
    lead = _relative(program_id, task, agent, LEAD, field) if role == SUBAGENT else None
    return None if lead == program_id else lead


def _relative(program_id: str | None, task: str | None, agent: str | None, relative: str, field: str) -> str | None:
    """The Program of another agent, named as this one's is; None where nothing tells how."""
    if program_id is not None and agent is not None and program_id.endswith(f":{agent}"):
        return joined(program_id[: -len(agent) - 1], relative, field)
    return None if task is None else joined(task, relative, field)


# --- agent_hint


def _of_hint(hint: Metadata) -> Identity:
    session = hint.text("session_id")
    if session is None:
        raise InvalidRequest(f"{hint.path}.session_id is required.", param=f"{hint.path}.session_id")
    parent = hint.text("parent_session_id")
    if parent == session:
        field = f"{hint.path}.parent_session_id"
        raise InvalidRequest(f"{field} must name another session than this one.", param=field)
    blocks = _blocks(hint, parent, default=True)
    says_resume = hint.yes_or_no("expected_resume")
    return Identity(
        program_id=session,
        session_id=session,
        parent_program_id=parent,
        blocks_parent=blocks,
        expected_resume=not blocks if says_resume is None else says_resume,
        says_resume=says_resume is not None,
    )


def _blocks(metadata: Metadata, parent: str | None, *, default: bool) -> bool:
    """Whether the Program blocks its parent; the default counts only where there is one."""
    said = metadata.yes_or_no("blocks_parent", "blocking_parent")
    if said and parent is None:
        field = f"{metadata.path}.blocks_parent"
        raise InvalidRequest(f"{field} needs a parent.", param=field)
    return parent is not None and (default if said is None else said)
