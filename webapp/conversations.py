"""The stored input of a response: listed item by item, and as the beginning of a next turn."""

from __future__ import annotations

from typing import Any

from pool.errors import InvalidRequest, JobUnknown
from pool.rules import jobs
from pool.store.inputs import read_input
from pool.store.records import JobRecord
from tasks.payloads import PROMPT, ChatPrompt, Message, TextPrompt
from webapp.auth import own_view
from webapp.node import Node
from webapp.schemas.responses import ItemsQuery

FIELD = "previous_response_id"
#: As official clients know it.
NOT_FOUND = "previous_response_not_found"


def conversation(node: Node, previous: str) -> list[Message]:
    """All turns of the response with this id, its answer the last; its instructions are not among them.

    Raises JobUnknown, also for one that has expired, and InvalidRequest, which name the field, and StateUnavailable.
    """
    try:
        record = own_view(node, previous).record
    except JobUnknown:
        raise JobUnknown("There is no previous response with this id.", param=FIELD, code=NOT_FOUND) from None
    if record.state not in (jobs.COMPLETED, jobs.INCOMPLETE):
        raise InvalidRequest(
            f"The previous response is {record.state}; only a completed or an incomplete one goes on.", param=FIELD
        )
    if len(record.outputs) != 1:
        raise InvalidRequest(
            f"The previous response has {len(record.outputs)} choices; a conversation goes on from one.", param=FIELD
        )
    turns = _turns(node, record)
    if turns is None:
        raise InvalidRequest("The input of the previous response was not stored (store: false).", param=FIELD)
    return [*turns, Message(role="assistant", content=record.outputs[0].text)]


def input_items(node: Node, record: JobRecord, query: ItemsQuery) -> dict[str, Any]:
    """A page of what the response was made from.

    Raises InvalidRequest (an unknown `after`, or an input that was not stored) and StateUnavailable.
    """
    turns = _turns(node, record)
    if turns is None:
        raise InvalidRequest("The input of this response was not stored (store: false).", code="input_not_stored")
    items = [_item(record, number, turn) for number, turn in enumerate(turns)]
    if query.order == "desc":
        items.reverse()
    start = 0
    if query.after is not None:
        start = next((at + 1 for at, item in enumerate(items) if item["id"] == query.after), -1)
        if start < 0:
            raise InvalidRequest("No item of this input has this id.", param="after")
    page = items[start : start + query.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + query.limit < len(items),
    }


def _turns(node: Node, record: JobRecord) -> list[Message] | None:
    """The stored turns without the instructions, which are a field of their own; None when they were not kept."""
    stored = read_input(node.services.client, record.ref)
    if stored is None:
        return None
    prompt = PROMPT.validate_json(stored)
    if isinstance(prompt, ChatPrompt):
        turns = list(prompt.messages)
        instructions = record.params.get("instructions")
        return turns[1:] if instructions and turns[0] == Message(role="system", content=instructions) else turns
    # A raw prompt, of a completion or from Celery, is what its user said; token ids are shown as such.
    return [
        Message(role="user", content=prompt.text if isinstance(prompt, TextPrompt) else str(list(prompt.token_ids)))
    ]


def _item(record: JobRecord, number: int, turn: Message) -> dict[str, Any]:
    spoken = turn.role == "assistant"
    part: dict[str, Any] = {"type": "output_text" if spoken else "input_text", "text": turn.content}
    if spoken:
        part |= {"annotations": [], "logprobs": []}
    return {
        "id": f"msg_{record.ref.token}_in_{number}",
        "type": "message",
        "role": turn.role,
        "status": "completed",
        "content": [part],
    }
