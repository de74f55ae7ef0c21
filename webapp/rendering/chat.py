"""Jobs as ChatCompletion objects and streams of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pool.rules.fairness import TIERS
from pool.store.records import JobRecord
from webapp.rendering.chunks import ChunkStream, usage_of
from webapp.rendering.logprobs import Shown


def chat_completion(record: JobRecord, shown: Sequence[Shown | None]) -> dict[str, Any]:
    """A completed (or length-limited) job. `shown`: by choice, its tokens with log-probabilities if it asked."""
    return {
        "id": record.id,
        "object": "chat.completion",
        "created": record.created_ms // 1000,
        "model": record.model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": output.text, "refusal": None, "annotations": []},
                "logprobs": None if told is None else _logprobs(told),
                "finish_reason": output.finish_reason,
            }
            for index, (output, told) in enumerate(zip(record.outputs, shown, strict=True))
        ],
        "usage": usage_of(record),
        "service_tier": TIERS[record.lane],
        "system_fingerprint": None,
    }


def _logprobs(shown: Shown) -> dict[str, Any]:
    return {"content": shown.listed(), "refusal": None}


class ChatStream(ChunkStream):
    """Chunks of deltas; each choice opens with its role."""

    kind = "chat.completion.chunk"

    def opening(self) -> dict[str, Any]:
        """The role."""
        return {"delta": {"role": "assistant", "content": "", "refusal": None}}

    def piece(self, text: str) -> dict[str, Any]:
        """A delta; an empty one at the finish."""
        return {"delta": {"content": text} if text else {}}

    def told(self, shown: Shown) -> dict[str, Any]:
        """Those of the delta's content."""
        return _logprobs(shown)

    def extras(self) -> dict[str, Any]:
        """As in the whole answer."""
        return {"service_tier": TIERS[self._record.lane]}
