"""Identity: each source with its defaults, their order, and everything that is refused with its field named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.datastructures import Headers

from pool.errors import InvalidRequest
from pool.rules.programs.claims import Claim, Hints, Identity, Source
from pool.rules.programs.identity import claim_of
from pool.rules.programs.metadata import MAX_DURATION_SECONDS, MAX_JSON_BYTES, MAX_WHOLE
from pool.rules.programs.session_headers import session_of_headers

CANONICAL = "vllm_xargs.agentic_context"
WHOLE_CONTEXT = {
    "program_id": "task-a:researcher",
    "task_id": "task-a",
    "session_id": "session-a",
    "agent_id": "researcher",
    "parent_program_id": "task-a:lead",
    "root_program_id": "task-a:lead",
    "blocks_parent": False,
    "expected_resume": True,
    "agent_role": "subagent",
    "spawn_reason": "research",
    "request_id": "request-a",
    "step_id": 7,
    "priority": 10,
    "deadline_seconds": 30,
    "expected_output_length": 2048,
    "kv_retention_ttl_seconds": 5,
}


def claim(
    body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None, key: str = "auto"
) -> Claim | None:
    """What a request with this body and these headers says, in the server's own kind of headers."""
    return claim_of(body or {}, Headers(dict(headers or {})), key)


def canonical(context: Any, **more: Any) -> Claim | None:
    """What this `agentic_context` says, with the default key."""
    return claim({"vllm_xargs": {"agentic_context": context}, **more}, key=CANONICAL)


def identity(found: Claim | None) -> Identity:
    """The identity of a claim that must be there."""
    assert found is not None
    return found.identity


def refused_field(body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> str | None:
    """The field named by the error of a request that must be refused; its message names it too."""
    with pytest.raises(InvalidRequest) as refused:
        claim(body, headers)
    assert refused.value.param is not None
    assert refused.value.param.rpartition(".")[2] in refused.value.message
    return refused.value.param


# --- the canonical object


def test_the_whole_contract() -> None:
    """Every documented field arrives, names as identity and the rest as hints of this request."""
    assert canonical(WHOLE_CONTEXT) == Claim(
        Source.AGENTIC_CONTEXT,
        Identity(
            program_id="task-a:researcher",
            task_id="task-a",
            session_id="session-a",
            agent_id="researcher",
            parent_program_id="task-a:lead",
            root_program_id="task-a:lead",
            blocks_parent=False,
            expected_resume=True,
            says_resume=True,
            agent_role="subagent",
            spawn_reason="research",
            step_id=7,
        ),
        Hints("request-a", 10, 30.0, 2048, 5.0),
    )


def test_an_object_or_its_json_say_the_same() -> None:
    """Clients whose extension fields must be scalars send the object as text."""
    assert canonical(json.dumps(WHOLE_CONTEXT)) == canonical(WHOLE_CONTEXT)


def test_a_program_id_alone_is_enough() -> None:
    """Nothing else is made up for it."""
    assert canonical({"program_id": " p "}) == Claim(Source.AGENTIC_CONTEXT, Identity("p"), Hints())


@pytest.mark.parametrize(
    ("context", "program_id", "agent", "role", "parent", "blocks"),
    [
        ({"task_id": "t"}, "t:lead", "lead", "lead", None, False),
        ({"session_id": "s"}, "s:lead", "lead", "lead", None, False),
        ({"task_id": "t", "session_id": "s", "agent_id": "a"}, "t:a", "a", "subagent", "t:lead", True),
        ({"task_id": "t", "agent_id": "t:a"}, "t:a", "a", "subagent", "t:lead", True),
        ({"task_id": "t", "agent_id": "a", "parent_agent_id": "t:b"}, "t:a", "a", "subagent", "t:b", True),
        ({"program_id": "p:a", "agent_id": "a", "parent_agent_id": "b"}, "p:a", "a", "subagent", "p:b", True),
        ({"program_id": "p:a", "agent_id": "a"}, "p:a", "a", "subagent", "p:lead", True),
        ({"program_id": "p", "task_id": "t"}, "p", None, None, None, False),
        ({"program_id": "p", "task_id": "t", "agent_role": "subagent"}, "p", None, "subagent", "t:lead", True),
        ({"program_id": "p", "agent_role": "subagent"}, "p", None, "subagent", None, False),
        ({"program_id": "t:lead", "task_id": "t", "agent_role": "subagent"}, "t:lead", None, "subagent", None, False),
        ({"program_id": "p", "agent_role": "critic", "parent_id": "q"}, "p", None, "critic", "q", False),
        ({"program_id": "p", "parent_agent_id": "b"}, "p", None, None, None, False),
    ],
)
def test_names_that_are_not_given(
    context: dict[str, Any], program_id: str, agent: str | None, role: str | None, parent: str | None, blocks: bool
) -> None:
    """The Program is TASK:AGENT, the agent without a name is the lead, and a sub-agent descends from it and blocks it;
    nobody is his own parent."""
    found = identity(canonical(context))
    assert (found.program_id, found.agent_id, found.agent_role) == (program_id, agent, role)
    assert (found.parent_program_id, found.blocks_parent) == (parent, blocks)


@pytest.mark.parametrize(
    ("context", "expected", "says", "ends"),
    [
        ({"program_id": "p"}, True, False, False),
        ({"task_id": "t", "agent_id": "a"}, False, False, False),
        ({"task_id": "t", "agent_id": "a", "blocks_parent": False}, True, False, False),
        ({"program_id": "p", "parent_program_id": "q", "blocks_parent": True}, True, False, False),
        ({"program_id": "p", "expected_resume": False}, False, True, True),
        ({"task_id": "t", "agent_id": "a", "expected_resume": True}, True, True, False),
    ],
)
def test_only_an_explicit_no_ends_a_program(context: dict[str, Any], expected: bool, says: bool, ends: bool) -> None:
    """A blocking sub-agent is not expected to come back, but may: its Program stays."""
    found = identity(canonical(context))
    assert (found.expected_resume, found.says_resume, found.ends_program) == (expected, says, ends)


@pytest.mark.parametrize("context", [{}, {"request_id": "r"}, {"priority": 5, "agent_id": "a"}, None, "{}"])
def test_ids_of_requests_and_hints_make_no_program(context: Any) -> None:
    """Such a request keeps the plain path, as do trace headers."""
    assert canonical(context) is None
    assert claim({}, {"x-request-id": "r", "traceparent": "t", "x-trace-id": "t"}) is None


@pytest.mark.parametrize(
    ("alias", "value", "field"),
    [
        ("parent_id", "q", "parent_program_id"),
        ("root_id", "r", "root_program_id"),
        ("subagent_type", "x", "spawn_reason"),
        ("agent_type", "x", "spawn_reason"),
    ],
)
def test_other_names_of_fields(alias: str, value: str, field: str) -> None:
    """Names that agents of the same contract send; the documented one counts where both are there."""
    assert getattr(identity(canonical({"program_id": "p", alias: value})), field) == value
    assert getattr(identity(canonical({"program_id": "p", alias: value, field: "doc"})), field) == "doc"


def test_other_names_of_hints() -> None:
    """Likewise."""
    found = canonical({"program_id": "p", "deadline": 1, "expected_output_tokens": 2, "kv_retention_ttl": 3})
    assert found is not None
    assert found.hints == Hints(None, 0, 1.0, 2, 3.0)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *(
            (name, ["", "  ", 5, True, ["x"], "x" * 257, "é" * 129, "a\nb", "a\x1b[2J", "a\x00", "\ud800"])
            for name in (
                "program_id",
                "task_id",
                "session_id",
                "agent_id",
                "parent_program_id",
                "parent_agent_id",
                "root_program_id",
                "agent_role",
                "spawn_reason",
                "request_id",
            )
        ),
        *((name, ["true", 1, 0, []]) for name in ("blocks_parent", "expected_resume")),
        ("step_id", [-1, 1.0, "1", True, MAX_WHOLE + 1]),
        ("priority", ["high", 1.5, True, 2**31, -(2**31)]),
        ("expected_output_length", [-1, 1.5, "9", True, 2**31]),
        *(
            (name, [-1, -0.001, float("inf"), float("nan"), "5", True, [], -(10**400)])
            for name in ("deadline_seconds", "kv_retention_ttl_seconds")
        ),
    ],
)
def test_malformed_fields_are_named(field: str, values: list[Any]) -> None:
    """Wrong types, bad lengths, what would break a terminal or the store, negative and endless durations; also where
    the context names no Program."""
    for value in values:
        for context in ({"program_id": "p", field: value}, {field: value}):
            body = {"vllm_xargs": {"agentic_context": context}}
            assert refused_field(body) == f"{CANONICAL}.{field}", value


def test_values_at_their_bounds() -> None:
    """The longest text, the largest numbers, and durations that are as good as for ever."""
    found = canonical(
        {
            "program_id": "é" * 128,
            "step_id": MAX_WHOLE,
            "priority": -(2**31) + 1,
            "deadline_seconds": 10**400,
            "kv_retention_ttl_seconds": 0,
            "expected_output_length": 0,
        }
    )
    assert found is not None
    assert (found.identity.program_id, found.identity.step_id) == ("é" * 128, MAX_WHOLE)
    assert found.hints == Hints(None, -(2**31) + 1, MAX_DURATION_SECONDS, 0, 0.0)


@pytest.mark.parametrize(
    ("context", "field"),
    [
        ({"program_id": "p", "parent_program_id": "p"}, "parent_program_id"),
        ({"task_id": "t", "agent_id": "a", "parent_agent_id": "a"}, "parent_program_id"),
        ({"program_id": "p", "blocks_parent": True}, "blocks_parent"),
        ({"program_id": "p", "blocking_parent": True}, "blocks_parent"),
        ({"task_id": "t" * 200, "agent_id": "a" * 56}, "program_id"),
        ({"program_id": "p", "task_id": "t" * 255, "parent_agent_id": "ab"}, "parent_program_id"),
        ({"task_id": "t", "agent_id": "t:"}, "agent_id"),
    ],
)
def test_names_that_contradict_each_other_are_refused(context: dict[str, Any], field: str) -> None:
    """A Program that is its own parent, a blocked parent that nobody names, and derived names that are too long."""
    assert refused_field({"vllm_xargs": {"agentic_context": context}}) == f"{CANONICAL}.{field}"


@pytest.mark.parametrize(
    "context", [5, [], True, "", "no json", "[]", '"text"', "[" * 9000, "1" * 5000, '{"a":"\ud800"}']
)
def test_a_context_that_is_no_object(context: Any) -> None:
    """Neither an object nor the JSON of one, however deep or long its text is."""
    assert refused_field({"vllm_xargs": {"agentic_context": context}}) == CANONICAL


def test_json_text_has_a_longest_length() -> None:
    """16 KiB in bytes of UTF-8."""

    def text(letters: int) -> str:
        return json.dumps({"program_id": "p", "pad": "é" * letters}, ensure_ascii=False)

    letters = (MAX_JSON_BYTES - len(text(0).encode())) // 2
    assert identity(canonical(text(letters))).program_id == "p"
    assert refused_field({"vllm_xargs": {"agentic_context": text(letters + 1)}}) == CANONICAL


def test_other_extensions_are_none_of_ours() -> None:
    """`vllm_xargs` may hold anything else, or nothing; it must be an object."""
    assert claim({"vllm_xargs": {"other": 1}}) is None
    assert claim({"vllm_xargs": None}) is None
    assert refused_field({"vllm_xargs": "agentic"}) == "vllm_xargs"


# --- agent_hint


def test_a_bare_hint_is_a_program_of_its_own() -> None:
    """The session names it; it blocks nobody, since there is nobody to block."""
    assert claim({"agent_hint": {"session_id": "s"}}) == Claim(
        Source.AGENT_HINT, Identity("s", session_id="s", expected_resume=True)
    )


@pytest.mark.parametrize(
    ("more", "blocks", "expected", "ends"),
    [
        ({}, True, False, False),
        ({"blocks_parent": False}, False, True, False),
        ({"expected_resume": True}, True, True, False),
        ({"expected_resume": False}, True, False, True),
    ],
)
def test_a_hint_with_a_parent_blocks_it(more: dict[str, Any], blocks: bool, expected: bool, ends: bool) -> None:
    """Unless it says otherwise; only an explicit word ends it."""
    found = identity(claim({"agent_hint": {"session_id": "s", "parent_session_id": "q", **more}}))
    assert (found.parent_program_id, found.task_id) == ("q", None)
    assert (found.blocks_parent, found.expected_resume, found.ends_program) == (blocks, expected, ends)


@pytest.mark.parametrize(
    ("hint", "field"),
    [
        ({}, "agent_hint.session_id"),
        ({"parent_session_id": "q"}, "agent_hint.session_id"),
        ({"session_id": 5}, "agent_hint.session_id"),
        ({"session_id": "s", "parent_session_id": "s"}, "agent_hint.parent_session_id"),
        ({"session_id": "s", "blocks_parent": True}, "agent_hint.blocks_parent"),
        ({"session_id": "s", "blocks_parent": "yes"}, "agent_hint.blocks_parent"),
        ({"session_id": "s", "expected_resume": 1}, "agent_hint.expected_resume"),
        ("s", "agent_hint"),
    ],
)
def test_malformed_hints_are_named(hint: Any, field: str) -> None:
    """A hint without a session, and a parent that is itself or is not there."""
    assert refused_field({"agent_hint": hint}) == field


# --- headers


@pytest.mark.parametrize(
    ("headers", "source", "program_id", "parent"),
    [
        ({"X-Claude-Code-Session-Id": "s"}, Source.CLAUDE_CODE, "s:lead", None),
        (
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"},
            Source.CLAUDE_CODE,
            "s:a",
            "s:lead",
        ),
        (
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-agent-id": "s:a",
                "x-claude-code-parent-agent-id": "b",
            },
            Source.CLAUDE_CODE,
            "s:a",
            "s:b",
        ),
        ({"x-claude-code-session-id": "s", "x-claude-code-parent-agent-id": "b"}, Source.CLAUDE_CODE, "s:lead", None),
        ({"session-id": "s"}, Source.SESSION_THREAD, "s:lead", None),
        ({"Session-Id": "s", "Thread-Id": "t"}, Source.SESSION_THREAD, "s:t", "s:lead"),
        ({"session-id": "s", "thread-id": "s"}, Source.SESSION_THREAD, "s:lead", None),
        ({"X-Session-ID": " s "}, Source.SESSION, "s:lead", None),
        ({"X-Session-Affinity": "s"}, Source.SESSION, "s:lead", None),
        ({"X-Correlation-ID": "s"}, Source.SESSION, "s:lead", None),
    ],
)
def test_header_families(headers: dict[str, str], source: Source, program_id: str, parent: str | None) -> None:
    """Each family's session and agent, whatever the case of the names; the session is the task."""
    found = claim({}, headers)
    assert found is not None
    assert (found.source, found.hints) == (source, Hints())
    assert (found.identity.program_id, found.identity.parent_program_id) == (program_id, parent)
    assert (found.identity.task_id, found.identity.session_id) == ("s", "s")
    is_lead = parent is None
    assert (found.identity.blocks_parent, found.identity.expected_resume) == (not is_lead, is_lead)
    assert found.identity.agent_role == ("lead" if is_lead else "subagent")
    assert not found.identity.ends_program
    assert session_of_headers(Headers(headers)) == "s"


def test_a_session_alone_is_that_of_the_first_family() -> None:
    """For requests without a Program: blank headers count as none, and a session that cannot be is refused by name."""
    both = {"session-id": "first", "x-session-id": "second"}
    assert session_of_headers(Headers(both)) == "first"
    assert session_of_headers(Headers({"x-session-id": "  ", "x-session-affinity": "a"})) == "a"
    assert session_of_headers(Headers({"thread-id": "t"})) is None
    with pytest.raises(InvalidRequest) as caught:
        session_of_headers(Headers({"x-session-id": "x" * 257}))
    assert caught.value.param == "x-session-id"


def test_what_consistent_hashing_goes_by() -> None:
    """A Program named in the body has a home of its own; agents of one session of headers share theirs."""
    of_body = canonical(WHOLE_CONTEXT)
    of_hint = claim({"agent_hint": {"session_id": "h"}})
    of_headers = [
        claim({}, {"x-claude-code-session-id": "s", **agent}) for agent in ({}, {"x-claude-code-agent-id": "a"})
    ]
    keys = [found.hash_key for found in (of_body, of_hint, *of_headers) if found is not None]
    assert keys == ["task-a:researcher", "h", "s", "s"]


def test_sources_are_taken_in_order_and_never_mixed() -> None:
    """The first that is there is the only one that counts; what comes later may be malformed."""
    body: dict[str, Any] = {
        "vllm_xargs": {"agentic_context": {"program_id": "canonical"}},
        "agent_hint": {"session_id": "hint"},
    }
    headers = {
        "x-claude-code-session-id": "claude",
        "session-id": "codex",
        "thread-id": "thread",
        "x-session-id": "generic",
        "x-session-affinity": "affinity",
        "x-correlation-id": "correlation",
    }
    seen = [identity(claim({**body, "agent_hint": 5}, headers)).program_id]
    del body["vllm_xargs"]
    seen.append(identity(claim(body, {**headers, "x-session-id": "x" * 300})).program_id)
    del body["agent_hint"]
    for name in ("x-claude-code-session-id", "session-id", "x-session-id", "x-session-affinity", "x-correlation-id"):
        seen.append(identity(claim(body, headers)).program_id)
        headers[name] = "  "
    assert seen == [
        "canonical",
        "hint",
        "claude:lead",
        "codex:thread",
        "generic:lead",
        "affinity:lead",
        "correlation:lead",
    ]
    assert claim(body, headers) is None


def test_a_context_without_a_name_hides_later_sources() -> None:
    """It is there, so it is the one that counts."""
    assert claim({"vllm_xargs": {"agentic_context": {"priority": 1}}}, {"x-session-id": "s"}) is None


def test_by_default_only_the_canonical_object_counts() -> None:
    """Everything else may be there, in any shape, and is not looked at."""
    assert claim({"agent_hint": 5}, {"x-session-id": "x" * 999}, CANONICAL) is None
    assert claim({"agent_hint": {"session_id": "s"}}, {"x-session-id": "s"}, CANONICAL) is None


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"x-session-id": "x" * 257}, "x-session-id"),
        ({"x-session-affinity": "x" * 252}, "x-session-affinity"),
        ({"session-id": "s", "thread-id": "x" * 257}, "thread-id"),
        ({"session-id": "s" * 200, "thread-id": "x" * 200}, "session-id"),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "s:"}, "x-claude-code-agent-id"),
        (
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-agent-id": "a",
                "x-claude-code-parent-agent-id": "s:a",
            },
            "x-claude-code-parent-agent-id",
        ),
    ],
)
def test_malformed_headers_are_named(headers: dict[str, str], field: str) -> None:
    """Too long, alone or together with the agent, without an agent behind the session, or its own parent."""
    assert refused_field({}, headers) == field


# --- anything at all

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from([*WHOLE_CONTEXT, "parent_agent_id", "parent_session_id", "agentic_context"])
OBJECTS = st.dictionaries(FIELDS, JSON | st.sampled_from(["t", "t:a", "a", "lead", "subagent"]), max_size=6)


@given(
    context=OBJECTS | JSON,
    hint=OBJECTS | JSON,
    headers=st.dictionaries(
        st.sampled_from(
            ["x-claude-code-session-id", "x-claude-code-agent-id", "session-id", "thread-id", "x-session-id"]
        ),
        st.text(max_size=300),
    ),
)
def test_any_request_is_understood_or_refused_by_name(context: Any, hint: Any, headers: dict[str, str]) -> None:
    """No input gets through that the store could not keep, and none breaks anything."""
    body = {"vllm_xargs": {"agentic_context": context}, "agent_hint": hint}
    try:
        found = claim_of(body, headers, "auto")
    except InvalidRequest as refused:
        assert refused.param
        return
    if found is None:
        return
    who = found.identity
    names = (who.program_id, who.task_id, who.session_id, who.agent_id, who.parent_program_id, who.root_program_id)
    for name in (*names, who.agent_role, who.spawn_reason, found.hints.request_id):
        assert name is None or 1 <= len(name.encode()) <= 256
    assert who.parent_program_id != who.program_id
    assert not who.blocks_parent or who.parent_program_id is not None
    for seconds in (found.hints.deadline_seconds, found.hints.kv_retention_ttl_seconds):
        assert seconds is None or 0 <= seconds <= MAX_DURATION_SECONDS
