"""Reading what servers write as JSON: every value is checked, and none is believed to be there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from pool.store.log import TokenLogprobs
from workers.backends.failures import failure_in_stream, invalid_answer
from workers.sampling import MIN_LOGPROB

#: Of token ids and of counts.
MAX_ID = 2**31 - 1


def document_of(data: str) -> Mapping[str, Any]:
    """The object of an event. Raises UpstreamFailure for anything else, and for an error in its place."""
    try:
        found = json.loads(data)
    except ValueError:
        raise invalid_answer("it is no JSON") from None
    if not isinstance(found, dict):
        raise invalid_answer("it is no object")
    if found.get("error"):
        raise failure_in_stream(found["error"])
    return found


def text_of(holder: Mapping[str, Any], name: str) -> str:
    """A text that may be missing. Half of a surrogate pair, which JSON can write and nobody can store, is U+FFFD."""
    value = holder.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise invalid_answer(f"{name} is no text")
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return value


def count_of(holder: Any, name: str) -> int | None:
    """A number of tokens, None where it does not say."""
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ID else None


def ids_of(holder: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Token ids that may be missing."""
    value = holder.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(map(is_id, value)):
        raise invalid_answer(f"{name} are no token ids")
    return tuple(value)


def is_id(value: Any) -> TypeGuard[int]:
    """Whether it may be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ID


def object_of(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object that may be missing."""
    value = holder.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid_answer(f"{name} is no object")
    return value


def objects_of(holder: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of objects that may be missing."""
    value = holder.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise invalid_answer(f"{name} is no list of objects")
    return value


def logprob_of(value: Any) -> float:
    """A log-probability as the token log has it: finite, not above 0, one of float32's."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise invalid_answer("a log-probability is no number")
    return float(np.float32(min(max(value, MIN_LOGPROB), 0.0)))


def logprobs_of(drawn: Any, top: Mapping[int, Any], count: int) -> TokenLogprobs:
    """Of a drawn token, and of the likeliest `count` in its place."""
    ranked = sorted(((token, logprob_of(each)) for token, each in top.items()), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(logprob_of(drawn), tuple(ranked[:count]))
